"""Writes docs/reproduce.md from docs/reproduce.json, what was measured, and docs/reproduce.toml, what explains it.

    python -m coterie.experiment.reproduce.page                              the page anew
    python -m coterie.experiment.reproduce.page --results runs/reproduce     first takes over what is measured there

What was measured before stays in reproduce.json until the same table, at the same size, is measured anew with at least
as many results. Figures are drawn from reproduce.json into docs/reproduce/, and the results themselves are kept there
in results.jsonl, so that `coterie reproduce` goes on from them on any machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coterie.experiment.reproduce import shipped
from coterie.experiment.reproduce.cache import Cache
from coterie.experiment.reproduce.figures.catalogue import FIGURES
from coterie.experiment.reproduce.figures.making import made_file, make, sizes_of
from coterie.experiment.reproduce.figures.svg import draw
from coterie.experiment.reproduce.markdown import grid, heading, hours, is_far, markdown, variants_of
from coterie.experiment.reproduce.measured import Measured, measure, to_ship
from coterie.experiment.reproduce.names import paper_of
from coterie.experiment.reproduce.papers import TABLES
from coterie.experiment.reproduce.running import Request
from coterie.experiment.reproduce.tables import SIZES, Size
from coterie.storage import files

PAPERS = {"fedmap": "FedMAP", "fedamp": "FedAMP", "pfedvmp": "pFedVMP", "federico": "FedeRiCo", "pfedbred": "pFedBreD"}
Explained = Mapping[str, Any]  # reproduce.toml


def key_of(name: str, size: Size) -> str:
    """Return the name of a table at a size in reproduce.json."""
    return name if size == "full" else f"{name} small"


def collect(kept: Mapping[str, Any], cache: Cache) -> dict[str, Any]:
    """Return what was measured, with what is in the cache instead of what it replaces."""
    tables, figures = dict(kept.get("tables", {})), dict(kept.get("figures", {}))
    for name, table in TABLES.items():
        for size in table.sizes():
            # All seeds that are there, whichever number was asked for.
            new = measure(name, Request(table, size), cache)
            if new is not None and _results(new.to_json()) >= _results(tables.get(key_of(name, size))):
                tables[key_of(name, size)] = json.loads(files.to_json(new.to_json()))
    for name, figure in FIGURES.items():
        for size in sizes_of(figure):
            if figure.experiment is None or made_file(cache, name, size).exists():
                made = make(name, size, cache)
                if made is not None:
                    figures[key_of(name, size)] = made
    order = {key_of(name, size): None for name in (*TABLES, *FIGURES) for size in SIZES}
    return {
        "format": 1,
        "tables": {key: tables[key] for key in order if key in tables},
        "figures": {key: figures[key] for key in order if key in figures},
    }


def _results(measured: Mapping[str, Any] | None) -> int:
    return 0 if measured is None else sum(len(row["seeds"]) for row in measured["rows"].values())


def page(kept: Mapping[str, Any], explained: Explained) -> str:
    """Return the page as Markdown.

    A table of which less than half of the rows is measured (they may be those of another table) is only listed.
    """
    every = {key: Measured.from_json(value) for key, value in kept["tables"].items()}
    measured = {key: each for key, each in every.items() if 2 * len(each.rows) >= len(TABLES[each.name].entries)}
    parts = [explained["intro"]["text"].strip(), ""]
    for paper, title in PAPERS.items():
        parts += [f"## {title}", ""]
        if text := explained.get(paper, {}).get("text"):
            parts += [text.strip(), ""]
        for name, table in TABLES.items():
            if paper_of(name) == paper and table.variant_of is None:
                parts += _section(name, measured, explained)
        for key, figure in kept["figures"].items():
            if paper_of(key) == paper:
                parts += _figure(key, figure, explained)
    return "\n".join([*parts, *_not_measured(every, kept["figures"])]).rstrip() + "\n"


def _section(name: str, measured: Mapping[str, Measured], explained: Explained) -> list[str]:
    """Return what is measured of a table, at each size, and of its variants."""
    parts: list[str] = []
    table = TABLES[name]
    for size in table.sizes():
        found = measured.get(key_of(name, size))
        variants = {
            other.variant_of[1]: (other, measured[key_of(each, size)])
            for each, other in TABLES.items()
            if other.variant_of is not None and other.variant_of[0] == name and key_of(each, size) in measured
        }
        if found is None and not variants:
            continue
        parts += [f"### {table.title}{', small' * (size == 'small')}", ""]
        if found is not None:
            parts += [heading(table, found), "", markdown(table, found)]
            parts += _differences(key_of(name, size), found, explained)
        if variants:
            first = {_first_variant(table.title): (table, found)} if found is not None else {}
            parts += [_variants_head(name), "", variants_of({**first, **variants})]
        if text := explained.get(key_of(name, size), {}).get("text"):
            parts += [text.strip(), ""]
    return parts


def _first_variant(title: str) -> str:
    return ", ".join(title.split(": ", 1)[1].split(", ")[1:]) if "table 4" not in title else title.split(", ")[3]


def _variants_head(name: str) -> str:
    others = [each for each, other in TABLES.items() if other.variant_of is not None and other.variant_of[0] == name]
    listed = ", ".join(f"`{each}`" for each in others)
    return f"By the paper's protocol, and otherwise the same ({listed}):"


def _differences(key: str, measured: Measured, explained: Explained) -> list[str]:
    """Return a sentence for every row that is far from the paper; rows with the same one share it."""
    found = explained.get(key, {}).get("rows", [])
    by_why: dict[str, list[str]] = {}
    for label in far_labels(measured):
        why = next((each["why"] for each in found if label in each["of"]), NOT_EXPLAINED)
        by_why.setdefault(why.strip(), []).append(f"**{label}**")
    lines = [f"- {'; '.join(labels)}: {why}" for why, labels in by_why.items()]
    return ["Further than two standard deviations from the paper:", "", *lines, ""] if lines else []


NOT_EXPLAINED = "not explained."


def far_labels(measured: Measured) -> list[str]:
    """Return the rows that are far from the paper; none at the small size, which is another experiment."""
    if measured.size != "full":
        return []
    there = [entry for entry in TABLES[measured.name].entries if entry.label in measured.rows]
    return [entry.label for entry in there if is_far(entry, measured.rows[entry.label])]


def far_rows(kept: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the rows that are far from the paper, by table; of a table's variants, only the main one is explained."""
    every = {key: Measured.from_json(value) for key, value in kept["tables"].items()}
    main = {key: each for key, each in every.items() if TABLES[each.name].variant_of is None}
    return {key: labels for key, each in main.items() if (labels := far_labels(each))}


def _figure(key: str, made: Mapping[str, Any], explained: Explained) -> list[str]:
    name, small = key.removesuffix(" small"), key.endswith(" small")
    figure = FIGURES[name]
    words = f"`coterie reproduce {name}{' --size small' * small}`, {made['date']}. {figure.note}".strip()
    text = explained.get(key, {}).get("text", "").strip()
    picture = f"![{figure.title}](reproduce/{file_of(key)})"
    return [f"### {figure.title}{', small' * small}", "", words, "", picture, "", *([text, ""] if text else [])]


def file_of(key: str) -> str:
    """Return the name of a figure's picture."""
    return f"{key.replace(' ', '-')}.svg"


def _not_measured(measured: Mapping[str, Measured], figures: Mapping[str, Any]) -> list[str]:
    """Return the list of what was not measured, with commands and estimates."""
    lines = []
    for name, table in TABLES.items():
        for size in table.sizes():
            found = measured.get(key_of(name, size))
            there = 0 if found is None else sum(len(row.seeds) for row in found.rows.values())
            number = len(table.entries) * table.seeds_at(size)
            if there < number:
                command = f"`coterie reproduce {name}{' --size small' * (size == 'small')}`"
                share = "" if not there else f"{there} of {number} results"
                lines.append([command, table.title, share, hours(table.minutes_at(size))])
    for name, figure in FIGURES.items():
        for size in sizes_of(figure):
            if key_of(name, size) not in figures and not (figure.experiment is None and size == "full"):
                command = f"`coterie reproduce {name}{' --size small' * (size == 'small')}`"
                needs = f"from {', '.join(figure.tables)}" if figure.tables else hours(figure.minutes[size])
                lines.append([command, figure.title, "", needs])
    head = ["command", "what", "measured", "the whole takes, on one core"]
    return ["## What is not measured, or not with all seeds", "", grid(head, lines)] if lines else []


def write(docs: Path, results: Path | None) -> Path:
    """Write the page and its pictures; see the top of this file."""
    source = docs / "reproduce.json"
    kept = json.loads(source.read_text(encoding="utf-8")) if source.exists() else {"tables": {}, "figures": {}}
    if results is not None:
        cache = Cache(results, docs / "reproduce" / "results.jsonl")
        kept = json.loads(files.to_json(collect(kept, cache)))
        files.write_text(source, _one_line_each(kept))
        shipped.write(docs / "reproduce" / "results.jsonl", to_ship(cache))
    explained = read_explained(docs)
    (docs / "reproduce").mkdir(exist_ok=True)
    for key, made in kept["figures"].items():
        files.write_text(docs / "reproduce" / file_of(key), draw(made["drawing"]))
    target = docs / "reproduce.md"
    files.write_text(target, page(kept, explained))
    return target


def read_explained(docs: Path) -> Explained:
    """Return the explanations beside the page."""
    return tomllib.loads((docs / "reproduce.toml").read_text(encoding="utf-8"))


def _one_line_each(kept: Mapping[str, Any]) -> str:
    """Return JSON with a line for each table and figure, so that a change of one shows as such."""
    parts = []
    for part in ("tables", "figures"):
        each = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in kept[part].items()]
        parts.append(f'"{part}": {{\n' + ",\n".join(each) + "\n}")
    return '{"format": 1,\n' + ",\n".join(parts) + "\n}\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the top of this file says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--results", type=Path, help="the folder of `coterie reproduce`, to take results from")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="the folder of the page")
    asked = parser.parse_args(arguments)
    print(write(asked.docs, asked.results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
