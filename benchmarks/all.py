"""All benchmarks, one after another, and the page that tells of them.

    python benchmarks/all.py                     what `make bench` does: docs/performance.md, with its plots
    python benchmarks/all.py --only seeds choice only these; the other sections stay as they were
    python benchmarks/all.py --only study ablation   those that take long, and are run only when they are named
    python benchmarks/all.py --only              no benchmark: the page is made anew from docs/performance.json
    python benchmarks/all.py --quick --out DIR   a smoke test of all of it; nothing is judged

Each script is a process of its own. What it told is kept in performance.json, with its date, commit, machine, and the
share of the machine that other processes took meanwhile. The page is written after every script, so nothing is lost if
one is stopped. A script that fails or misses a target does not stop the others; the exit code is 1 then.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import chart
from machine import Busy, about
from telling import Row, cell, limit, parser

from coterie.storage import files

HERE = Path(__file__).resolve().parent
SCRIPTS = (
    *("whole_run", "study", "local_training", "choice", "seeds", "many_clients"),
    *("server_steps", "class_moments", "data_path", "flower_round"),
)
LONG = ("study", "ablation")
BUSY = 0.1  # of the machine taken by others: from here on, ratios are not to be trusted


def run(name: str, quick: bool) -> dict[str, Any]:
    """A section of the page: what the script told, or that it failed, and what to read it with."""
    busy, begin = Busy(), time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="coterie-benchmark-") as scratch:
        told = Path(scratch) / f"{name}.json"
        command = [sys.executable, str(HERE / f"{name}.py"), "--json", str(told), *(["--quick"] if quick else [])]
        code = subprocess.run(command, check=False).returncode
        found = json.loads(told.read_text(encoding="utf-8")) if told.exists() else {"title": name, "failed": code}
    date, taken = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), time.perf_counter() - begin
    return {**found, "quick": quick, "date": date, "seconds": taken, "others": busy.others(), "machine": about()}


def good(section: Mapping[str, Any]) -> bool:
    return "failed" not in section and (section["quick"] or all(each["reached"] for each in section["targets"]))


def verdict(section: Mapping[str, Any]) -> str:
    if "failed" in section:
        return f"**failed** (exit code {section['failed']})"
    if section["quick"]:
        return "smoke test, not judged"
    number = sum(each["reached"] for each in section["targets"])
    return f"{number} of {len(section['targets'])} reached" if section["targets"] else "no target"


def table(columns: Row, rows: Sequence[Row]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join("| " + " | ".join(cell(each).replace("|", "\\|") for each in line) + " |\n" for line in lines)


def section_of(name: str, section: Mapping[str, Any], plots: str) -> str:
    """The Markdown of one benchmark."""
    doc = ast.get_docstring(ast.parse((HERE / f"{name}.py").read_text(encoding="utf-8"))) or ""
    others = f"other processes took {section['others']:.0%} of the machine"
    if section["others"] > BUSY:
        others += ", **too much for its ratios to be trusted**"
    parts = [
        f"## {section['title']}\n",
        " ".join(doc.split("\n\n")[0].split()) + f" [`benchmarks/{name}.py`](../benchmarks/{name}.py)\n",
        f"{section['date']}, commit {section['machine']['commit']}; took {section['seconds']:.0f} s; {others}.\n",
    ]
    if "failed" in section:
        return "\n".join([*parts, f"The script {verdict(section)}: there is nothing to show.\n"])
    parts += [f"![{section['plot']['title']}]({plots}/{name}.svg)\n", table(section["columns"], section["rows"])]
    for each in section["tables"]:
        parts += [f"{each['title']}:\n", table(each["columns"], each["rows"])]
    parts += [f"{note}\n" for note in section["notes"]]
    judged = [
        [each["name"], each["value"], limit(each), "-" if section["quick"] else "yes" if each["reached"] else "**no**"]
        for each in section["targets"]
    ]
    return "\n".join(
        [*parts, table(["target", "measured", "must be", "reached"], judged) if judged else "No target.\n"]
    )


def page(sections: Mapping[str, Mapping[str, Any]], plots: str = "performance") -> str:
    overview = [
        [
            f"[{section['title']}](#{anchor(section['title'])})",
            *(verdict(section), section["date"], section["machine"]["commit"]),
            *(f"{section['others']:.0%}", f"{section['seconds']:.0f} s"),
        ]
        for section in sections.values()
    ]
    machines = {
        "{cpu}, {cores} cores, {memory:.1f} GB of memory, {system}; Python {python}, PyTorch {torch}".format(
            **section["machine"]
        )
        for section in sections.values()
    }
    missing = [f"`benchmarks/{name}.py`" for name in (*SCRIPTS, *LONG) if name not in sections]
    parts = [
        "# Performance, as measured\n",
        "Written by `make bench` (`benchmarks/all.py`) from performance.json: not by hand. Ratios are of two sides "
        "measured in turn in one run; seconds are of this machine and that day.\n",
        "Measured on " + "; and on ".join(sorted(machines)) + ".\n" if machines else "Nothing is measured yet.\n",
        *([f"Not measured yet: {', '.join(missing)}.\n"] if missing else []),
        table(["benchmark", "targets", "date", "commit", "others took", "time"], overview),
    ]
    return "\n".join([*parts, *(section_of(name, section, plots) for name, section in sections.items())])


def anchor(title: str) -> str:
    """As GitHub makes it of a heading."""
    return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c in "-_")


def render(sections: Mapping[str, Mapping[str, Any]], out: Path) -> None:
    for name, section in sections.items():
        if "failed" not in section:
            drawn, judged = section["plot"], not section["quick"]
            picture = chart.draw(drawn["title"], drawn["bars"], log=drawn["log"], judged=judged)
            files.write_text(out / "performance" / f"{name}.svg", picture)
    files.write_text(out / "performance.json", json.dumps(sections, indent=1) + "\n")
    files.write_text(out / "performance.md", page(sections))


def clock(seconds: float) -> str:
    return f"{seconds // 60:.0f} min {seconds % 60:02.0f} s"


def main(arguments: Sequence[str] | None = None) -> int:
    asking = parser(__doc__, json=False)
    asking.add_argument(
        "--only", nargs="*", choices=[*SCRIPTS, *LONG], default=SCRIPTS, help="these only", metavar="NAME"
    )
    asking.add_argument("--out", type=Path, help="the folder of the page; docs/ if not given")
    asked = asking.parse_args(arguments)
    if asked.quick and asked.out is None:
        asking.error("a smoke test does not belong into docs/: give --out FOLDER")
    out = asked.out or HERE.parent / "docs"
    kept = out / "performance.json"
    sections = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    begin, fresh = time.perf_counter(), []
    for k, name in enumerate(asked.only, 1):
        print(f"[{k}/{len(asked.only)}] {name}.py, {clock(time.perf_counter() - begin)} so far", flush=True)
        fresh.append(run(name, asked.quick))
        print(f"[{k}/{len(asked.only)}] {name}.py: {verdict(fresh[-1])} in {clock(fresh[-1]['seconds'])}", flush=True)
        sections = {
            each: fresh[-1] if each == name else sections[each]
            for each in (*SCRIPTS, *LONG)
            if each in {*sections, name}
        }
        render(sections, out)
    render(sections, out)
    print(f"{out / 'performance.md'}: {clock(time.perf_counter() - begin)} in all")
    return int(not all(map(good, fresh)))


if __name__ == "__main__":
    sys.exit(main())
