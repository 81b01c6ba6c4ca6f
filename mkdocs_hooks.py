"""What the site has and a git host does not need: pages for files outside docs/, and the reference of all public names.

Notebooks (docs/notebooks) are shown as they were executed: a page for each, of its texts, code and outputs.

Documents link to each other and to files of the repository by relative paths, which is right on a git host. The site
shows the repository's own documents (README.md is its first page) and, at the path source/, each other file that a
document links to; links are rewritten to those pages. A link to nothing is left alone, and MkDocs refuses it.
"""

from __future__ import annotations

import ast
import html
import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.testing.equations import with_equations

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parent
DOCUMENTS = {"README.md": "index.md", "SECURITY.md": "security.md", "CONTRIBUTING.md": "contributing.md"}
DOCUMENTS |= {"CHANGELOG.md": "changelog.md"}
ORIGINS = {page: document for document, page in DOCUMENTS.items()}
ELSEWHERE = re.compile(r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="?((?:https?:)?//[^"> ]*)')
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)(?=[)#])")

# The order of the page; `reference` refuses a public name that is missing here, and one that is not public.
PUBLIC = {
    "Train": "run resume prepare plan RunPlan Result Benefit attack",
    "Compare, tune, recommend": "compare compare_runs compare_tuned Comparison tune Tuning recommend Recommendation",
    "Data": "Federation from_clients targets metric",
    "Models that clients take home": "load export onboard",
    "Prepare a model": "lora",
    "Write a method": "Method Task METHODS tree",
    "Optimisers, schedules, samplers": "Optimizer SGD Adam AdamW RMSprop Schedule Sampler",
    "Errors": "CoterieError ConfigError DataError CoterieWarning",
}
FLOWER = "client_app server_app"
# Wide enough for the tables of a terminal, and rows as near to each other as on a git host.
STYLE = """.md-grid { max-width: 78rem }
.md-typeset table:not([class]) td { padding: 0.4em 1em }
.output { margin: -0.5em 0 1.5em; padding-left: 1em; border-left: 0.15rem solid var(--md-default-fg-color--lightest) }
.output { overflow-x: auto; font-size: 0.7rem }
.md-typeset .output pre { margin: 0.3em 0 }
.md-typeset .output table:not([class]) { box-shadow: none; background: none }
.md-typeset .output img { background: white }
.equations { overflow-x: auto; margin: 1em 0; padding: 0.6em 1em; background: var(--md-code-bg-color) }
.equations > div { display: flex; gap: 2em; justify-content: space-between; min-width: max-content; line-height: 1.8 }
.equations > div > span:first-child { font-family: "STIX Two Math", "Cambria Math", Georgia, serif; font-size: 1.05em }
.equations .where { color: var(--md-default-fg-color--light); font-size: 0.85em }
"""


def page_of(path: str) -> str | None:
    """Return the page of the site that shows a file of the repository."""
    if path in DOCUMENTS:
        return DOCUMENTS[path]
    if path.startswith("docs/"):
        return re.sub(r"\.ipynb$", ".md", path.removeprefix("docs/"))
    return f"source/{path}.md" if (ROOT / path).is_file() else None


def targets(markdown: str, page: str) -> Iterator[str]:
    """Yield the paths in the repository that a page links to."""
    for match in LINK.finditer(markdown):
        yield target(match[1], page)


def target(link: str, page: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(ORIGINS.get(page, f"docs/{page}")), link))


def with_links_of_the_site(markdown: str, page: str) -> str:
    """Return a page whose links lead to pages of the site."""

    def rewritten(match: re.Match[str]) -> str:
        there = page_of(target(match[1], page))
        return match[1] if there is None else posixpath.relpath(there, posixpath.dirname(page) or ".")

    return LINK.sub(rewritten, markdown)


def source_page(path: str) -> str:
    """Return a page that shows a file."""
    kind = {".py": "python", ".toml": "toml", ".cpp": "cpp"}.get(Path(path).suffix, "text")
    text = (ROOT / path).read_text(encoding="utf-8")
    return f"---\nsearch:\n  exclude: true\n---\n# `{path}`\n\n`````{kind}\n{text}`````\n"


def notebook_page(path: Path) -> str:
    """Return a page that shows a notebook: its texts, its code, and what came out."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    parts = []
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        shown = "".join(map(_output, cell["outputs"]))
        if shown:
            parts.append(f'<div class="output">{shown}</div>')
    link = f'<p><a href="{path.name}" download>Download this notebook</a> and run it yourself.</p>'
    parts.insert(1, link)  # below the heading and what comes first
    return "\n\n".join(parts) + "\n"


def _output(output: dict[str, Any]) -> str:
    """Return one output as HTML on one line: Markdown must not read it, and takes empty lines for its end."""
    data = output.get("data", {})
    if "text/html" in data:
        return re.sub(r"\s*\n\s*", " ", "".join(data["text/html"]))
    if "image/png" in data:
        image = "".join(data["image/png"]).strip()
        return f'<img alt="The figure that this cell draws" src="data:image/png;base64,{image}">'
    text = html.escape("".join(output.get("text", data.get("text/plain", ""))).rstrip())
    return f"<pre><code>{text}</code></pre>".replace("\n", "&#10;") if text else ""


def public_names() -> set[str]:
    """Return the names that the package exports, without importing it (and PyTorch)."""
    tree = ast.parse((ROOT / "src/coterie/__init__.py").read_text(encoding="utf-8"))
    (exported,) = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and [ast.unparse(name) for name in node.targets] == ["_WHERE"]
    ]
    return set(ast.literal_eval(exported))


def reference() -> str:
    """Return the page of all public names, which mkdocstrings fills in from their docstrings."""
    listed = {name for names in PUBLIC.values() for name in names.split()}
    if listed != public_names():
        raise ValueError(f"mkdocs_hooks.PUBLIC and coterie.__all__ differ in {sorted(listed ^ public_names())}")
    groups = {title: [f"coterie.{name}" for name in names.split()] for title, names in PUBLIC.items()}
    groups["With Flower"] = [f"coterie.flower.{name}" for name in FLOWER.split()]
    parts = ["# Python", "Every name that `coterie` and `coterie.flower` export."]
    for title, names in groups.items():
        parts += [f"## {title}", *(f"::: {name}" for name in names)]
    return "\n\n".join(parts) + "\n"


def on_files(files: Files, config: Any) -> Files:
    """Add the documents at the root, the reference, and the files that documents link to."""
    from mkdocs.structure.files import File

    pages = {page: (ROOT / document).read_text(encoding="utf-8") for document, page in DOCUMENTS.items()}
    linked = {
        path
        for page, text in [
            *pages.items(),
            *((file.src_uri, file.content_string) for file in files.documentation_pages()),
        ]
        for path in targets(text, page)
    }
    pages |= {"api.md": reference(), "site.css": STYLE}
    for notebook in (ROOT / "docs" / "notebooks").glob("*.ipynb"):
        pages[f"notebooks/{notebook.stem}.md"] = notebook_page(notebook)
    for path in linked:
        page = page_of(path)
        if page is not None and page.startswith("source/"):
            pages[page] = source_page(path)
    for page, text in sorted(pages.items()):
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri.startswith("source/"):
        return markdown
    shown = with_equations(markdown) if page.file.src_uri == "methods.md" else markdown
    return with_links_of_the_site(shown, page.file.src_uri)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Refuse a page that a browser would ask another host for."""
    if found := ELSEWHERE.findall(output):
        raise ValueError(f"{page.file.src_uri} loads {', '.join(found)}: the site shall need no other host")
    return output
