"""The report in a real Chromium; `make test-browser` installs what this needs."""

import importlib.util
import json
import shutil
import subprocess
import tarfile

import pytest
import torch

import coterie
from coterie.report import write, write_figures
from coterie.report.images import BROWSERS, PNG_SCALE, WIDTH
from tests.report.runs import QUICK, add_benefit, clients, run

CHROMIUM = next((path for path in map(shutil.which, BROWSERS) if path), None)
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: `make test-browser` installs it, or says how"),
    pytest.mark.skipif(importlib.util.find_spec("playwright") is None, reason="no playwright: `make test-browser`"),
]
AXE = "axe-core@4.14.1"  # checks a page's accessibility; npm fetches it, since it is no part of the project
DESK, PHONE = {"width": 1180, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """{name: report.html}: a run with intervals and a matrix, and a comparison."""
    folder = tmp_path_factory.mktemp("reports")
    run(folder / "fedamp", rounds=4)
    add_benefit(folder / "fedamp")
    settings = {**QUICK, "rounds": 1}
    coterie.compare(("local", "fedavg", "fedamp"), 2, clients(), out=folder / "compared", **settings)
    return {name: write(folder / name) for name in ("fedamp", "compared")}


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser, reports):
    """Opens a report; whatever the page complains of, or asks the network for, is in `page.troubles`."""
    contexts = []

    def open_(name, scheme="light", viewport=DESK):
        context = browser.new_context(viewport=viewport, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.troubles = []
        page.on("console", lambda m: page.troubles.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: page.troubles.append(str(error)))
        page.on("request", lambda r: page.troubles.append(r.url) if r.url[:5] not in ("file:", "blob:", "data:") else 0)
        page.goto(reports[name].as_uri())
        page.wait_for_selector("html[data-drawn]", timeout=60_000)
        return page

    yield open_
    for context in contexts:
        context.close()


def plotted(page, name, what):
    return page.evaluate(f"""() => {{
        const trace = document.querySelector('[data-figure="{name}"] .plot')._fullData[0];
        return Array.from(trace.{what}, (row) => row.length === undefined ? row : Array.from(row));
    }}""")


@pytest.mark.parametrize("name", ["fedamp", "compared"])
@pytest.mark.parametrize("viewport", [DESK, PHONE], ids=["desk", "phone"])
def test_it_opens_without_complaint_or_network_and_fits(visit, name, viewport):
    page = visit(name, viewport=viewport)
    assert page.troubles == []
    assert page.locator("#trouble").is_hidden()
    figures = page.locator("[data-figure]")
    assert figures.count() >= 6
    assert page.locator("[data-figure] .plot svg.main-svg").count() >= figures.count()
    wide = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    assert wide[0] <= wide[1]
    over = page.evaluate(
        "[...document.querySelectorAll('.card')].filter(c => c.scrollWidth > c.clientWidth + 1).map(c => c.innerText)"
    )
    assert over == []


def test_the_slider_moves_the_matrix_and_the_graph_with_it(visit):
    page = visit("fedamp")
    slider = page.locator('input[data-control="collaboration"]')
    slider.fill("0")
    page.wait_for_timeout(200)
    first = plotted(page, "collaboration", "z")
    slider.fill("3")
    page.wait_for_timeout(200)
    last = plotted(page, "collaboration", "z")
    assert first != last
    assert len(first) == len(first[0]) == 6
    other = page.locator('input[data-control="graph"]')
    assert other.input_value() == "3"
    assert other.locator("xpath=..").locator("output").inner_text() == "4"
    assert page.troubles == []


def test_the_choosers_change_what_is_drawn(visit):
    page = visit("fedamp")
    before = plotted(page, "client-weights", "y")
    page.select_option('select[data-control="client-weights"]', "3")
    page.wait_for_timeout(200)
    assert plotted(page, "client-weights", "y") != before
    page.select_option('select[data-control="curves"]', label="loss")
    page.wait_for_timeout(200)
    title = page.evaluate("document.querySelector('[data-figure=curves] .plot')._fullLayout.yaxis.title.text")
    assert title == "loss"
    assert page.troubles == []


def test_a_click_sorts_the_table(visit):
    page = visit("fedamp")
    column = '[data-table="clients"] tbody tr td:nth-child(2)'

    def keys():
        return [float(cell.get_attribute("data-key")) for cell in page.locator(column).all()]

    head = page.locator('[data-table="clients"] th:nth-child(2) button')
    head.click()
    assert keys() == sorted(keys())
    head.click()
    assert keys() == sorted(keys(), reverse=True)
    assert len(set(keys())) > 1
    assert page.locator('[data-table="clients"] th:nth-child(2)').get_attribute("aria-sort") == "descending"
    assert page.locator('[data-table="clients"] tfoot td').first.inner_text() == "mean of 6"


def test_tables_are_copied_as_markdown_and_latex(visit):
    page = visit("compared")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    table = page.locator('[data-table="methods"]')
    table.locator('[data-copy="markdown"]').click()
    table.get_by_text("Copied.").wait_for()
    lines = page.evaluate("navigator.clipboard.readText()").splitlines()
    assert lines[0].startswith("| method | seeds | test balanced accuracy (%) |")
    assert lines[1].startswith("| --- | ---: | ---: |")
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| local", "| fedamp", "| fedavg"]
    table.locator('[data-copy="latex"]').click()
    table.locator('[data-copy="latex"][data-copied]').wait_for()
    latex = page.evaluate("navigator.clipboard.readText()")
    assert latex.startswith("\\begin{tabular}{lrrrrrrr}\n\\toprule\nmethod & seeds & test balanced accuracy (\\%)")
    assert "$\\pm$" in latex
    assert latex.rstrip().endswith("\\bottomrule\n\\end{tabular}")


CONTRAST = """(selector) => {
    const parse = (text) => text.match(/[\\d.]+/g).map(Number);
    const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
        .map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, k) => sum + v * [0.2126, 0.7152, 0.0722][k], 0);
    const behind = (node) => {
        for (; node; node = node.parentElement) {
            const [r, g, b, a = 1] = parse(getComputedStyle(node).backgroundColor);
            if (a > 0) return [r, g, b];
        }
        return [255, 255, 255];
    };
    return [...document.querySelectorAll(selector)].filter((node) => node.textContent.trim()).map((node) => {
        const style = getComputedStyle(node);
        const ink = parse(node instanceof SVGElement ? style.fill : style.color);
        const [a, b] = [light(ink), light(behind(node))].sort((x, y) => y - x);
        return (a + 0.05) / (b + 0.05);
    });
}"""
TEXTS = (
    *(
        "#verdict",
        "h1",
        "h3",
        ".subtitle",
        "figcaption",
        "td",
        "th button",
        ".tile dd",
        ".tile .beside",
        "nav a",
        "button",
    ),
    *(".xtick text", ".ytick text", ".xtitle", ".legendtext", ".annotation-text"),
)


def assert_legible(page):
    for selector in TEXTS:
        found = page.evaluate(CONTRAST, selector)
        assert found, selector
        assert min(found) >= 4.5, f"{selector}: contrast {min(found):.2f}"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_are_legible(visit, scheme):
    page = visit("fedamp", scheme)
    back = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (max(map(int, back[4:-1].split(","))) < 60) == (scheme == "dark")
    assert_legible(page)


def test_the_button_changes_the_theme_of_page_and_figures(visit):
    page = visit("fedamp", "light")
    page.locator("#theme").click()
    page.wait_for_selector('html[data-drawn="dark"]', timeout=60_000)
    assert page.locator("#theme").inner_text() == "Light"
    assert_legible(page)
    assert page.troubles == []


@pytest.fixture(scope="module")
def axe(tmp_path_factory):
    """The script of axe-core."""
    if shutil.which("npm") is None:
        pytest.skip("no npm here, which fetches axe-core")
    folder = tmp_path_factory.mktemp("axe")
    got = subprocess.run(["npm", "pack", AXE], cwd=folder, capture_output=True, text=True, timeout=120)
    if got.returncode:
        pytest.skip(f"npm could not fetch {AXE}: {got.stderr.strip()[-300:]}")
    with tarfile.open(next(folder.glob("*.tgz"))) as archive:
        script = archive.extractfile("package/axe.min.js")
        assert script is not None
        return script.read().decode()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["fedamp", "compared"])
def test_axe_finds_nothing(visit, axe, name, scheme):
    page = visit(name, scheme)
    page.evaluate(axe)
    found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    assert len(found["passes"]) > 15
    assert [(rule["id"], [node["html"][:200] for node in rule["nodes"]]) for rule in found["violations"]] == []


def test_the_keyboard_reaches_and_works_everything(visit):
    page = visit("fedamp")
    wanted = page.locator("a, button, input, select, .scroll").count()
    reached = set()
    for _ in range(3 * wanted):
        page.keyboard.press("Tab")
        mark = "(() => { const e = document.activeElement; return e.dataset.at ??= Math.random(); })()"
        reached.add(page.evaluate(mark))
        if len(reached) > wanted:  # the page itself, after the last
            break
    assert len(reached) >= wanted
    page.locator('[data-table="clients"] th:nth-child(2) button').focus()
    page.keyboard.press("Enter")
    assert page.locator('[data-table="clients"] th:nth-child(2)').get_attribute("aria-sort") == "ascending"
    page.locator('input[data-control="collaboration"]').focus()
    page.keyboard.press("Home")
    page.wait_for_timeout(200)
    assert page.locator('input[data-control="graph"]').input_value() == "0"
    page.locator("#theme").focus()
    page.keyboard.press("Space")
    page.wait_for_selector('html[data-drawn="dark"]', timeout=60_000)


PAPER = 688  # pixels of A4 between margins of 14 mm
ON_PAPER = """window.addEventListener("beforeprint", () => {
    const plots = [...document.querySelectorAll(".plot svg.main-svg")];
    const card = (plot) => plot.closest(".half") ? 0.5 : 1;
    window.printed = { widths: plots.map((plot) => [plot.clientWidth, card(plot)]) };
    window.printed.ink = getComputedStyle(document.querySelector(".plot .xtick text")).fill;
})"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_paper_is_light_and_holds_every_figure(visit, scheme):
    page = visit("fedamp", scheme)
    width = "document.querySelector('[data-figure=gain] svg.main-svg').clientWidth"
    before = page.evaluate(width)
    page.evaluate(ON_PAPER)
    assert page.pdf(format="A4").startswith(b"%PDF")
    printed = page.evaluate("window.printed")
    assert len(printed["widths"]) >= 8
    assert all(PAPER * share / 2 < width <= PAPER * share - 38 for width, share in printed["widths"])
    assert printed["ink"] == "rgb(86, 97, 110)"  # the light page's, on a dark one too
    page.wait_for_selector(f'html[data-drawn="{scheme}"]', timeout=60_000)
    assert page.evaluate(width) == before
    assert page.troubles == []


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """The report of a run with 500 clients, ten rounds and a matrix of who learns from whom."""
    draw = torch.Generator().manual_seed(0)
    data = {}
    for k in range(500):
        x = torch.randn(20, 6, generator=draw)
        data[f"site {k}"] = (x, (x[:, :4] * (1 if k % 2 else -1)).argmax(1))
    folder = tmp_path_factory.mktemp("many") / "run"
    run(folder, "fedamp", data, engine="stacked", rounds=10)
    add_benefit(folder)
    return write(folder)


def test_it_opens_in_two_seconds_with_500_clients(browser, many):
    """Of the processor's time, so that it does not depend on what else the machine does: page and first figures."""
    assert many.stat().st_size < 6_000_000
    page = browser.new_context(viewport=DESK).new_page()
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    page.goto(many.as_uri())
    while not page.evaluate("performance.getEntriesByName('coterie-screen-drawn').length"):
        page.wait_for_timeout(50)
    worked = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}
    print(f"{worked['TaskDuration']:.2f} s of the processor until all figures on the screen were drawn")
    assert 0.05 < worked["TaskDuration"] < 2, json.dumps(worked)
    assert page.locator('[data-figure="gain"] svg.main-svg').count()
    page.wait_for_selector("html[data-drawn]", timeout=60_000)
    assert page.locator('[data-table="clients"] tbody tr').count() == 500
    page.context.close()


def test_figures_are_written_as_images(reports, tmp_path):
    pytest.importorskip("kaleido", reason="kaleido is not installed: pip install 'coterie[figures]'")
    made = write_figures(reports["fedamp"].parent, tmp_path / "figures")
    assert {path.name for path in made} >= {"gain.png", "gain.svg", "collaboration.png", "graph.svg", "data.svg"}
    for path in made:
        start = path.read_bytes()[:300]
        if path.name == "gain.png":
            assert int.from_bytes(start[16:20], "big") == WIDTH * PNG_SCALE
        assert start.startswith(b"\x89PNG") if path.suffix == ".png" else b"<svg" in start, path
