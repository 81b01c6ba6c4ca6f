"""What the documents say is true: their code runs, their method obeys the laws."""

import importlib
import os
import re
import subprocess
import sys
import tomllib
from glob import glob
from pathlib import Path

import pytest
from typer.testing import CliRunner

import coterie
from coterie import METHODS, testing
from coterie.cli import app
from coterie.core import extensions
from coterie.testing import messages
from tests.cli.commands import cli

ROOT = Path(__file__).parent.parent


def blocks(path, language="python"):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / path).read_text(), re.S)


@pytest.fixture(scope="module")
def guide():
    """Runs the guide's code from top to bottom, all laws included."""
    space = {}
    for block in blocks("docs/add-a-method.md"):
        exec(compile(block, "add-a-method.md", "exec"), space)
    return space


def test_the_guides_method_runs_and_obeys_the_laws(guide):
    assert guide["result"].config.hyper == {"pull": 0.3}
    assert guide["result"].mean("accuracy") > 0.3
    assert [row.outcome for row in guide["rows"]] == ["held"] * len(testing.LAWS)


def test_the_guides_method_is_short():
    assert len(blocks("docs/add-a-method.md")[0].splitlines()) < 60


def test_every_method_is_in_the_table_at_a_glance():
    text = (ROOT / "docs/methods-at-a-glance.md").read_text()
    for name in METHODS:
        assert f"`{name}`" in text, name


@pytest.mark.parametrize("path", ["README.md", "docs/python.md"])
def test_the_first_python_that_a_reader_sees_runs(path):
    assert blocks(path)
    for block in blocks(path):
        quick = 'rounds=1, local_steps=3, engine="loop", compile=False, workers=1'
        exec(compile(re.sub(r"rounds=\d+", quick, block), path, "exec"), {})


def test_the_readme_is_short_and_shows_a_small_picture():
    """What, why, two commands, a picture, five links: everything else has a page of its own."""
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 60
    (picture,) = re.findall(r"^!\[.{20,}\]\((\S+)\)$", readme, re.M)
    assert 10_000 < (ROOT / picture).stat().st_size < 200_000
    assert len(re.findall(r"^- \[", readme.partition("## Where to go")[2], re.M)) == 5


def test_every_command_is_on_the_page_of_commands():
    from coterie.cli import app

    named = {command.name or command.callback.__name__.replace("_", "-") for command in app.registered_commands}
    named |= {group.name for group in app.registered_groups}
    shown = set(re.findall(r"\bcoterie ([a-z]+)", (ROOT / "docs/commands.md").read_text()))
    assert named <= shown


@pytest.mark.parametrize(
    ("path", "change"), [("docs/deploy.md", messages.with_table), ("docs/methods-at-a-glance.md", messages.with_column)]
)
def test_what_crosses_the_wire_is_what_the_documents_say(path, change):
    text = (ROOT / path).read_text()
    assert change(text) == text, f"{path} is not up to date: run `{messages.COMMAND}`"


def test_the_guide_to_evaluation_runs():
    quick = "rounds=1, local_steps=1, engine='loop', compile=False, workers=1"
    for block in blocks("docs/evaluation.md"):
        exec(compile(block.replace("rounds=2", quick), "evaluation.md", "exec"), {})


def test_the_guide_to_models_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quick = "rounds=1, local_steps=1, engine='loop', compile=False, workers=1, report=False"
    space = {}
    for block in blocks("docs/models.md"):
        exec(compile(block.replace("rounds=2", quick), "models.md", "exec"), space)
    assert space["small"].rounds[-1]["bytes_up"] < space["full"].rounds[-1]["bytes_up"] / 3


def test_the_guide_to_tuning_runs():
    for block in blocks("docs/tune.md"):
        quick = "rounds=1, local_steps=1, engine='loop', compile=False, workers=1"
        exec(compile(block.replace("rounds=2", quick), "tune.md", "exec"), {})


def test_the_guide_to_performance_runs():
    quick = 'rounds=3, local_steps=1, engine="loop", compile=False, workers=1, reference=False, profile=True'
    for block in blocks("docs/performance-guide.md"):
        exec(compile(block.replace("profile=True", quick), "performance-guide.md", "exec"), {})


def test_the_python_for_own_data_runs():
    for block in blocks("docs/own-data.md"):
        space = {}
        exec(
            compile(block.replace("rounds=2", 'rounds=1, engine="loop", compile=False, workers=1'), "own-data", "exec"),
            space,
        )
        assert list(space["result"].names) == ["north", "south"]


@pytest.fixture
def ours(tmp_path, monkeypatch):
    """The file of the page on extensions, in the current folder, and installed as a package with its entry points."""
    *definitions, example = blocks("docs/extend.md")
    (tmp_path / "ours.py").write_text("\n".join(definitions))
    facts = tmp_path / "ours-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: ours\nVersion: 1.0\n")
    groups = tomllib.loads(blocks("docs/extend.md", "toml")[0])["project"]["entry-points"]
    lines = [
        line for group, names in groups.items() for line in (f"[{group}]", *(f"{k} = {v}" for k, v in names.items()))
    ]
    (facts / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("ours", None)  # another test's file may have that name
    extensions.added.cache_clear()
    yield example
    extensions.added.cache_clear()
    sys.modules.pop("ours", None)


def test_every_command_of_the_page_on_extensions_is_understood(ours, monkeypatch):
    """Up to where training would begin; and all together from Python, with training."""

    class Begun(BaseException):
        """Training would begin."""

    def begin(setup, *_, **__):
        began.append(setup.config)
        raise Begun

    began = []
    monkeypatch.setattr("coterie.cli.run.run_setup", begin)
    typed = commands("docs/extend.md")
    assert len(typed) > 12
    for command in typed:
        with pytest.raises(Begun):
            print(CliRunner().invoke(app, [*command.split()[1:], "--quiet"]).output)
    assert len(began) == len(typed)
    assert (began[-1].schedule.period, began[-1].optimizer["name"]) == (3, "ours:Lion")
    assert began[-1].to_file()["sampler"] == "ours:half_of_the_large"
    names = vars(importlib.import_module("ours"))
    exec(compile(ours, "extend.md", "exec"), dict(names))


def test_the_guide_to_tasks_runs():
    quick, space = 'rounds=1, local_steps=2, engine="loop", compile=False, workers=1', {}
    for block in blocks("docs/tasks.md"):
        exec(compile(block.replace("rounds=2", quick), "tasks.md", "exec"), space)
    assert space["result"].metric == "brier"
    assert all(0 <= row["test_brier"] <= 1 for row in space["result"].clients)


TUTORIAL = "docs/first-federation.md"


def make_clinics(folder, monkeypatch):
    monkeypatch.chdir(folder)
    exec(compile(blocks(TUTORIAL)[0], "make_clinics.py", "exec"), {})


def commands(path):
    return re.findall(r"^    (coterie .*|head .*)$", (ROOT / path).read_text(), re.M)


def test_the_tutorials_files_are_the_ones_it_shows(tmp_path, monkeypatch):
    make_clinics(tmp_path, monkeypatch)
    text = (ROOT / TUTORIAL).read_text()
    assert "\n".join((tmp_path / "clinics/north.csv").read_text().splitlines()[:3]) in text
    done = cli(
        *commands(TUTORIAL)[0].replace("clinics/*.csv", " ".join(sorted(map(str, glob("clinics/*"))))).split()[1:]
    )
    assert "\n".join(line.rstrip() for line in done.output.splitlines()) in text


def run_as_written(commands):
    """Run commands in the shell, one after the other; a server that one of them starts ends with it."""
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": programs, "OMP_NUM_THREADS": "1"}
    for command in commands:
        done = subprocess.run(command, shell=True, env=environment, text=True, capture_output=True, timeout=600)
        assert done.returncode == 0, command + done.stdout + done.stderr


@pytest.mark.slow
def test_every_command_of_the_tutorial_runs(tmp_path, monkeypatch):
    make_clinics(tmp_path, monkeypatch)
    run_as_written(commands(TUTORIAL))
    made = {"schema.toml", "first/report.html", "several/report.html", "advice/federation.toml", "south.onnx"}
    assert {name for name in made if (tmp_path / name).is_file()} == made
    assert (tmp_path / "first/clients/lake/model.safetensors").is_file()


@pytest.mark.slow
def test_what_was_simulated_is_what_sites_get(tmp_path, monkeypatch, capsys):
    make_clinics(tmp_path, monkeypatch)
    path = "docs/simulation-to-flower.md"
    (tmp_path / "clinics.toml").write_text(blocks(path, "toml")[0])
    run_as_written([commands(TUTORIAL)[0], *commands(path)])
    exec(compile(blocks(path)[0], path, "exec"), {})
    assert capsys.readouterr().out == "".join(f"{name} True\n" for name in ("children", "east", "north", "south"))
    assert (tmp_path / "app" / "pyproject.toml").is_file()


def test_versions_agree():
    """The version is written in `coterie`; a version that is not released yet says so in the list of changes."""
    version, _, unreleased = coterie.__version__.partition(".dev")
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[0].startswith(version + " (unreleased)" if unreleased else version)
    assert re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M) == [coterie.__version__]


def test_what_is_claimed_of_other_versions_was_run():
    claims, table = (ROOT / "pyproject.toml").read_text(), (ROOT / "docs/versions.md").read_text()
    ((python, torch),) = re.findall(r'requires-python = ">=([\d.]+)".*"torch>=([\d.]+)"', claims, re.S)
    (tested,) = re.findall(r"torch==([\d.]+)", (ROOT / "constraints.txt").read_text())
    rows = re.findall(r"^\| ([\d.]+) \| ([\d.]+)", table, re.M)
    for wanted in (torch, tested):
        assert any(own.startswith(f"{python}.") and f"{each}.".startswith(f"{wanted}.") for own, each in rows), wanted


def test_no_document_names_a_file_that_is_not_there():
    for path in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        for name in re.findall(r"`((?:src|tests|docs|benchmarks|examples)/[\w./-]+)`", path.read_text()):
            assert (ROOT / name).exists(), f"{path.name} names {name}"


EXTEND = "docs/extend-data.md"


@pytest.fixture
def clinics(tmp_path, monkeypatch):
    """The files of the page, in a folder that is searched, and nothing of them is left imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for block in blocks(EXTEND):
        path = Path(re.match(r"# (\S+)\n", block)[1])
        path.parent.mkdir(exist_ok=True)
        path.write_text(block)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "clinics"]:
        del sys.modules[name]


def test_every_command_of_the_page_on_extending_data_runs(clinics, package_of):
    kinds = {group: kind for kind, group in extensions.GROUPS.items()}
    (table,) = blocks(EXTEND, "toml")
    groups = tomllib.loads(table)["project"]["entry-points"]
    told = {}
    for command in [*commands(EXTEND)]:
        if "--section worst-clients" in command:  # the last one, of the installed package
            for group, names in groups.items():
                package_of(kinds[group], **names)
        quick = "--engine loop --no-compile --workers 1" if command.startswith("coterie run") else ""
        done = cli(*f"{command} {quick}".split()[1:])
        assert done.exit_code == 0, f"{command}\n{done.output}"
        told[command] = " ".join(done.output.split())
    assert {"scans.html", "watched", "shown", "stopped"} <= {path.name for path in clinics.iterdir()}
    shown = (clinics / "shown" / "report.html").read_text()
    assert "<h2>The clients that are worst off</h2>" in shown
    assert "<h2>How long the runs were</h2>" in shown
    assert "Stopped after round" in told[next(key for key in told if "Budget" in key)]
    (stopped,) = [told[key] for key in told if "--early-stop" in key]
    (promised,) = re.findall(r"^    (Stopped after .*)$", (ROOT / EXTEND).read_text(), re.M)
    words = re.sub(r"round\\ \d+", r"round\\ \\d+", re.escape(promised))  # another processor rounds otherwise
    assert re.search(words, stopped)
    assert (clinics / "watched" / "norms.csv").read_text().startswith("2,scanner 1,")
    listed = cli("data").output + cli("data", "settings").output
    assert "Scans of several scanners, each of which" in listed
    assert "Whole scanners, so many" in listed
