"""What hostile clients do to the honest ones, and what the defences are worth: writes docs/robustness.md.

    python benchmarks/robustness.py [--quick] [--only METHOD ...] [--seconds N] [--results FILE] [--out FILE]

Ten clients with scikit-learn's digits, of whom one or two are hostile, under every attack of `coterie.attack` and every
defence; once with similar clients, once with different ones. Results are kept in docs/robustness.json, so that the
script runs what is missing: all after a change of the settings, nothing if nothing changed. After a change of code that
changes results, take the method's rows out of that file. It is no part of `make bench`, since it measures no time.

**Nothing was chosen on the seeds of the tables.** `--choose` measures on other seeds (`CHOOSING`) what each defence
costs under attack; `RECOMMENDED` has the one that is recommended.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import coterie
from coterie.experiment.attack import ABSENT, ATTACKS
from coterie.storage import files

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = 0.02  # what honest clients may lose with the right defence
SEEDS = tuple(range(10, 14))  # of the recommended defence, and of what it is compared with
FEWER = SEEDS[:2]  # of the others, which are there for comparison
CHOOSING = tuple(range(100, 103))
HOSTILE = (1, 2)
LAST = 5  # rounds at the end over which scores are averaged
SETTINGS: Mapping[str, Any] = {
    **{"data": "digits", "clients": 10, "rounds": 60, "optimizer": "sgd", "local_epochs": 2, "select": "accuracy"}
}
PARTITIONS = {"similar clients": "dirichlet:10:min=60", "different clients": "dirichlet:1:min=60"}
NO_ATTACK, WITHOUT_THEM = "no attack", "without them"
ROWS = (NO_ATTACK, WITHOUT_THEM, *ATTACKS)


class Case(NamedTuple):
    """A method's settings, and its defences."""

    settings: Mapping[str, Any]
    defences: tuple[str, ...]


AVERAGED = ("none", "median", "clip:auto", "nnm:2+geometric-median", "multi-krum:2")
OF_NINE = "reject 2 of 9 neighbours"
METHODS: Mapping[str, Case] = {
    "fedavg": Case({"lr": 0.1}, AVERAGED),
    "fedmap": Case({"lr": 0.1}, AVERAGED),
    "pfedbred": Case({"lr": 0.03}, AVERAGED),
    "pfedvmp": Case({"lr": 0.1}, AVERAGED),
    "fedamp": Case({"lr": 0.1}, ("none", "cap 0.3")),
    "federico": Case({"lr": 0.1}, ("none", "cap 0.3", OF_NINE)),
}


RECOMMENDED = {
    **dict.fromkeys(("fedavg", "fedmap", "pfedbred", "pfedvmp"), "multi-krum:2"),
    **{"fedamp": "none", "federico": OF_NINE},
}
NOTES = (
    "What a defence costs depends on whether training had time to end. Fewer rounds, or a step size with which a",
    "method is restless (pFedBreD's 0.1, with which it wins or loses three points from one round to the next), make",
    "every rule and every attack dearer: a rule that leaves out the messages farthest from the others leaves out the",
    "largest steps.",
    "",
    "FedeRiCo's clients ask three others for their models, so that about four contribute to a model. Among so few",
    "nobody can tell two hostile ones from two that differ, and bounds on length or direction stop honest",
    "collaboration before they stop an attack. Its defence is therefore to ask all nine, and to leave out the two",
    "contributions to each model that lie farthest from the others; that costs 2.5 times the work of a round.",
    "",
    "What these tables do not say: hostile clients that adapt to the defence can do more than these; `robust` acts on",
    "models only, so pFedVMP's class means are not protected; and no rule helps where most clients are hostile. The",
    "more clients differ, the less a rule can tell a hostile one from one that is different.",
)


class Results:
    """Scores by what was run, in a file."""

    def __init__(self, path: Path, quick: bool, until: float) -> None:
        self.path, self.quick, self.until = path, quick, until
        kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        about = {method: self.settings(method) for method in METHODS}
        same = [method for method, settings in kept.get("settings", {}).items() if settings == about.get(method)]
        self.scores: dict[str, dict[str, float]] = {
            key: scores for key, scores in kept.get("scores", {}).items() if key.split(" | ")[0] in same
        }
        self.about = about
        self.saved = time.monotonic()

    def settings(self, method: str) -> dict[str, Any]:
        short = {"rounds": 2, "local_epochs": 1} if self.quick else {}
        return {**SETTINGS, **METHODS[method].settings, **short, "last": 1 if self.quick else LAST}

    def score(self, method: str, kind: str, hostile: int, row: str, defence: str, seed: int) -> float | None:
        """Return the honest clients' mean accuracy, measured if it is not known; None if there is no time left."""
        key = " | ".join((method, kind, str(hostile), row, defence))
        found = self.scores.setdefault(key, {})
        if str(seed) not in found:
            if time.monotonic() > self.until:
                return None
            which = {NO_ATTACK: None, WITHOUT_THEM: ABSENT}.get(row, row)
            settings = {**self.settings(method), "partition": PARTITIONS[kind], **defended(defence)}
            try:
                found[str(seed)] = round(coterie.attack(which, hostile, method, seed=seed, **settings).mean, 5)
            except coterie.CoterieError:  # it diverged: nobody has a model that is worth anything
                found[str(seed)] = 0.0
            if time.monotonic() - self.saved > 30:
                self.save()
        return found[str(seed)]

    def save(self) -> None:
        scores = {key: self.scores[key] for key in sorted(self.scores) if self.scores[key]}
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in scores.items())
        files.write_text(self.path, f'{{"settings": {json.dumps(self.about)},\n "scores": {{\n{lines}\n}}}}\n')
        self.saved = time.monotonic()


def defended(defence: str) -> dict[str, Any]:
    """Return the settings of a defence."""
    if defence == "none":
        return {}
    if defence == OF_NINE:
        return {"neighbours": 9, "reject": 2}
    return {"cap": float(defence.split()[1])} if defence.startswith("cap ") else {"robust": defence}


class Loss(NamedTuple):
    """What honest clients lose against the same federation without the hostile ones and without a defence."""

    mean: float
    error: float | None  # standard error over seeds, each of which is compared with itself; None: there is only one

    def __str__(self) -> str:
        return f"{100 * self.mean:+.1f}" + ("" if self.error is None else f" ± {100 * self.error:.1f}")


class Table:
    """The scores of a method in a federation with so many hostile clients; all defences are tried against most."""

    def __init__(self, method: str, kind: str, hostile: int, choosing: bool, quick: bool) -> None:
        self.method, self.kind, self.hostile, self.best = method, kind, hostile, RECOMMENDED[method]
        every = hostile == max(HOSTILE) or choosing or quick
        self.defences = [each for each in METHODS[method].defences if every or each == self.best]
        self.rows = ROWS[:4] if quick else ROWS
        self.many, self.few = (CHOOSING, CHOOSING) if choosing else (SEEDS[:1],) * 2 if quick else (SEEDS, FEWER)
        self.scores: dict[tuple[str, str], dict[int, float]] = {}

    def needed(self, row: str, defence: str) -> bool:
        """Return whether the table "In short" needs these scores."""
        return defence == self.best or (row, defence) == (WITHOUT_THEM, "none")

    def measure(self, results: Results, seed: int, needed: bool) -> None:
        """Find the scores of a seed that "In short" needs, or the others; all or none of those that it needs."""
        found = {}
        for row in self.rows:
            for defence in dict.fromkeys(("none", *self.defences) if row == WITHOUT_THEM else self.defences):
                self.scores.setdefault((row, defence), {})
                if self.needed(row, defence) == needed:
                    found[row, defence] = results.score(self.method, self.kind, self.hostile, row, defence, seed)
        if needed and None in found.values():
            return
        for key, score in found.items():
            if score is not None:
                self.scores[key][seed] = score

    def loss(self, row: str, defence: str) -> Loss | None:
        without = self.scores[WITHOUT_THEM, "none"]
        apart = [score - without[seed] for seed, score in self.scores[row, defence].items() if seed in without]
        if not apart:
            return None
        return Loss(statistics.mean(apart), statistics.stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else None)

    def worst(self, defence: str) -> Loss | None:
        """Return what the worst attack costs; None if not all are measured."""
        losses = [self.loss(row, defence) for row in self.rows[2:]]
        found = [each for each in losses if each is not None]
        return min(found, key=lambda each: each.mean) if len(found) == len(losses) else None

    def lines(self) -> list[str]:
        heads = [f"{each} ({len(self.scores[NO_ATTACK, each])})" for each in self.defences]
        told = [f"{self.kind}, {self.hostile} of 10 hostile:", "", f"| attack | {' | '.join(heads)} |"]
        told += ["|---|" + "---|" * len(self.defences)]
        for row in self.rows:
            cells = []
            for defence in self.defences:
                scores, loss = self.scores[row, defence], self.loss(row, defence)
                value = f"{100 * statistics.mean(scores.values()):.1f}" if scores else "–"
                cells.append(f"**{value}**" if loss is not None and loss.mean >= -ALLOWED else value)
            told.append(f"| {row} | {' | '.join(cells)} |")
        told.append("| worst loss | " + " | ".join(str(self.worst(each) or "–") for each in self.defences) + " |")
        return [*told, ""]


def chosen_defences(tables: Mapping[str, Sequence[Table]]) -> list[str]:
    """Return a table of what each defence costs in all of a method's federations, for choosing one."""
    told = ["| method | defence | mean of the worst losses | the worst of all |", "|---|---|---|---|"]
    for method, found in tables.items():
        for defence in found[0].defences:
            losses = [100 * loss.mean for each in found if (loss := _worst(each, defence)) is not None]
            if losses:
                told.append(f"| {method} | {defence} | {statistics.mean(losses):+.1f} | {min(losses):+.1f} |")
    return told


def summary(tables: Mapping[str, Sequence[Table]]) -> list[str]:
    """Return the table "In short"."""
    first = next(iter(tables.values()))
    told = [f"| method | defence | {' | '.join(f'{each.kind}, {each.hostile} hostile' for each in first)} |"]
    told.append("|---|---|" + "---|" * len(first))
    for method, found in tables.items():
        defence = RECOMMENDED[method]
        cells = []
        for each in found:
            worst, number = each.worst(defence), len(each.scores[NO_ATTACK, defence])
            fails = "" if worst is None or worst.mean >= -ALLOWED else ", **does not hold**"
            cells.append("not measured" if worst is None else f"{worst} ({number}){fails}")
        told.append(f"| {method} | {defence} | {' | '.join(cells)} |")
    return told


def page(tables: Mapping[str, Sequence[Table]]) -> str:
    """Return docs/robustness.md."""
    rates = ", ".join(f"{case.settings['lr']:g} for {method}" for method, case in METHODS.items())
    sections = [line for method, found in tables.items() for line in (f"## {method}", "", *_all_lines(found))]
    return "\n".join(
        [
            "# Robustness, as measured",
            "",
            "Written by `benchmarks/robustness.py`: not by hand. Ten clients share scikit-learn's digits; one or two",
            f"of them are hostile in every round. *Similar clients*: `{PARTITIONS['similar clients']}`; *different",
            f"clients*: `{PARTITIONS['different clients']}`. Numbers are the honest clients' mean test accuracy (%)",
            f"after each of the last {LAST} of {SETTINGS['rounds']} rounds; as many seeds as the column's head says.",
            f"The step size is {rates}.",
            "*No attack*: the hostile clients are honest. *Without them*: they take no part; their data are lost",
            "whatever the defence, so a loss is against this, without a defence and seed by seed, ± its standard",
            "error. **Bold**: at most two points lost. `coterie attack` prints such a table for your own federation,",
            "and `coterie run --robust RULE` defends it. The attacks are described in `coterie.experiment.attack`, the",
            "rules in `coterie.parts.robust`; `cap` and `reject` are options of methods.",
            "",
            "## In short",
            "",
            "For each method, what its worst attack costs with one defence, in points (over so many seeds). Defences",
            "and step sizes were chosen on other seeds. `multi-krum:f` and `nnm:f` need to be told f, and were told 2.",
            "What was not measured is a dash.",
            "",
            *summary(tables),
            "",
            *NOTES,
            "",
            *sections,
        ]
    )


def _worst(table: Table, defence: str) -> Loss | None:
    return table.worst(defence) if defence in table.defences else None


def _all_lines(found: Sequence[Table]) -> list[str]:
    return [line for each in found if any(each.scores.values()) for line in each.lines()]


def main(arguments: Sequence[str] | None = None) -> int:
    asking = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    asking.add_argument("--quick", action="store_true", help="a smoke test: two rounds, one seed; no page is written")
    asking.add_argument("--choose", action="store_true", help="on other seeds: what the defences cost; no page")
    asking.add_argument("--only", nargs="+", choices=[*METHODS], metavar="METHOD", help="measure only these")
    asking.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after so many seconds")
    asking.add_argument("--results", type=Path, metavar="FILE", help="where results are kept")
    asking.add_argument("--out", type=Path, default=ROOT / "docs" / "robustness.md", metavar="FILE")
    asked = asking.parse_args(arguments)
    kept = ROOT / "build" / "robustness.json" if asked.quick or asked.choose else ROOT / "docs" / "robustness.json"
    path = asked.results or kept
    path.parent.mkdir(parents=True, exist_ok=True)
    results = Results(path, asked.quick, time.monotonic() + asked.seconds)
    methods = asked.only or (["fedavg", "fedamp"] if asked.quick else [*METHODS])
    counts, kinds = (HOSTILE[:1], [*PARTITIONS][:1]) if asked.quick else (HOSTILE, [*PARTITIONS])
    tables = {m: [Table(m, kind, n, asked.choose, asked.quick) for kind in kinds for n in counts] for m in methods}
    every = [each for found in tables.values() for each in found]
    for needed in (True, False):
        for seed in every[0].many if needed else every[0].few:
            for each in every:
                each.measure(results, seed, needed)
    results.save()
    missing = sum(len(each.scores[NO_ATTACK, each.best]) < len(each.many) for each in every)
    if asked.quick or asked.choose:
        print("\n".join([*chosen_defences(tables), *_all_lines(every)]))
    elif methods == [*METHODS]:
        files.write_text(asked.out, page(tables))
        print(f"written to {asked.out}")
    print(f"{missing} of {len(every)} tables are not finished: start it again" if missing else "finished")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
