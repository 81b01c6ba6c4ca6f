"""Links of documents are right on a git host and on the site, and the reference has every public name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import coterie
import mkdocs_hooks as hooks
from coterie import flower
from tests.places import ROOT


@pytest.mark.parametrize(
    ("page", "link", "there"),
    [
        ("plan.md", "tune.md#a", "tune.md#a"),
        ("deploy.md", "../SECURITY.md", "security.md"),
        ("deploy.md", "../README.md#two-commands", "index.md#two-commands"),
        ("performance.md", "../benchmarks/study.py", "source/benchmarks/study.py.md"),
        ("performance.md", "performance/seeds.svg", "performance/seeds.svg"),
        ("index.md", "docs/data.md#formats", "data.md#formats"),
        ("index.md", "CONTRIBUTING.md", "contributing.md"),
        ("security.md", "docs/deploy.md", "deploy.md"),
        ("plan.md", "#here", "#here"),
        ("plan.md", "https://a.org/docs/plan.md", "https://a.org/docs/plan.md"),
        ("plan.md", "../benchmarks/absent.py", "../benchmarks/absent.py"),  # left for MkDocs to refuse
    ],
)
def test_links_lead_to_pages_of_the_site(page: str, link: str, there: str) -> None:
    assert hooks.with_links_of_the_site(f"See [this]({link}).", page) == f"See [this]({there})."


def test_documents_link_to_files_that_are_there() -> None:
    """The links of a git host; `make docs` checks those of the site, with their anchors."""
    pages = {page: ROOT / document for document, page in hooks.DOCUMENTS.items()}
    pages |= {path.name: path for path in (ROOT / "docs").glob("*.md")}
    absent = [
        f"{path.name}: {name}"
        for page, path in pages.items()
        for name in hooks.targets(path.read_text(encoding="utf-8"), page)
        if not (ROOT / name).exists()
    ]
    assert absent == []


def test_the_reference_has_every_public_name() -> None:
    assert hooks.public_names() == set(coterie.__all__)
    listed = re.findall(r"^::: coterie\.(.*)$", hooks.reference(), re.M)
    assert sorted(listed) == sorted([*coterie.__all__, *(f"flower.{name}" for name in flower.__all__)])


def test_a_public_name_that_the_page_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hooks.PUBLIC, "Train", "run")
    with pytest.raises(ValueError, match="'plan', 'prepare', 'resume'"):
        hooks.reference()


def test_a_page_that_needs_another_host_is_refused() -> None:
    class Page:
        class file:
            src_uri = "plan.md"

    own = '<script src="a.js"></script><a href="https://a.org">a</a>'
    assert hooks.on_post_page(own, Page()) == own
    with pytest.raises(ValueError, match=r"plan\.md loads https://fonts\.org/a\.css"):
        hooks.on_post_page(own + '<link rel="stylesheet" href="https://fonts.org/a.css">', Page())


def test_a_page_of_source_shows_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "ROOT", tmp_path)
    (tmp_path / "a.py").write_text("print('```')\n")
    assert hooks.source_page("a.py").endswith("# `a.py`\n\n`````python\nprint('```')\n`````\n")
