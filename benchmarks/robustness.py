"""What hostile clients do to the honest ones, and what the defences are worth: writes docs/robustness.md.

    python benchmarks/robustness.py [--quick] [--cache FOLDER] [--out FILE]

Ten clients with scikit-learn's digits, of whom one or two are hostile, under every attack of `coterie.attack` and every
defence, with two seeds; once with similar clients, once with different ones. A result is kept under --cache (by default
build/robustness), named by its settings: started again, the script runs what is missing. Delete the folder after a
change of code that changes results. It is no part of `make bench`, since it measures no time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import coterie
from coterie.experiment.attack import ABSENT, ATTACKS
from coterie.storage import files

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = 0.02  # what honest clients may lose with the right defence
SEEDS = (0, 1)
HOSTILE = (1, 2)
SETTINGS: Mapping[str, Any] = {
    **{"data": "digits", "clients": 10, "rounds": 30, "lr": 0.1, "local_epochs": 2},
    "select": "accuracy",
}
PARTITIONS = {"similar clients": "dirichlet:10:min=60", "different clients": "dirichlet:1:min=60"}
NO_ATTACK, WITHOUT_THEM = "no attack", "without them"
RULES: tuple[dict[str, Any], ...] = (
    {},
    *(
        {"robust": rule}
        for rule in ("median", "trimmed:0.2", "krum:2", "multi-krum:2", "geometric-median", "clip:auto")
    ),
)
CAPS: tuple[dict[str, Any], ...] = ({}, {"cap": 0.3}, {"cap": 0.1})
METHODS: Mapping[str, tuple[Sequence[dict[str, Any]], dict[str, Any]]] = {
    "fedavg": (RULES, {}),
    "fedmap": (RULES, {}),
    "pfedbred": (RULES, {}),
    "pfedvmp": (RULES, {}),
    "fedamp": (CAPS, {}),
    "federico": (CAPS, {"optimizer": "sgd"}),
}


def named(defence: Mapping[str, Any]) -> str:
    return ", ".join(str(value) if key == "robust" else f"{key} {value}" for key, value in defence.items()) or "none"


def measure(
    method: str, attack: str, hostile: int, clients: str, defence: Mapping[str, Any], cache: Path, quick: bool
) -> float:
    """Return the mean accuracy of the honest clients over seeds, from the cache if it is there."""
    small = {"rounds": 1, "local_epochs": 1} if quick else {}
    settings = {**SETTINGS, "partition": PARTITIONS[clients], **METHODS[method][1], **defence, **small}
    name = hashlib.sha256(json.dumps([method, attack, hostile, settings, quick], sort_keys=True).encode()).hexdigest()
    kept = cache / f"{name[:16]}.json"
    if not kept.exists():
        which = {NO_ATTACK: None, WITHOUT_THEM: ABSENT}.get(attack, attack)
        scores = []
        for seed in SEEDS[: 1 if quick else None]:
            try:
                scores.append(coterie.attack(which, hostile, method, seed=seed, **settings).mean)
            except coterie.CoterieError:  # it diverged: nobody has a model that is worth anything
                scores.append(0.0)
        print(method, clients, attack, hostile, named(defence), scores, file=sys.stderr, flush=True)
        files.write_json(kept, {"method": method, "attack": attack, "hostile": hostile, "scores": scores})
    kept_scores: list[float] = json.loads(kept.read_text(encoding="utf-8"))["scores"]
    return statistics.mean(kept_scores)


def table(method: str, clients: str, hostile: int, cache: Path, quick: bool) -> tuple[list[str], dict[str, float]]:
    """Return a table, and by defence what its worst attack costs."""
    defences = METHODS[method][0][: 2 if quick else None]
    rows = (NO_ATTACK, WITHOUT_THEM, *(ATTACKS[1:2] if quick else ATTACKS))
    found = {
        row: [measure(method, row, hostile, clients, defence, cache, quick) for defence in defences] for row in rows
    }
    best = max(found[NO_ATTACK][0], found[WITHOUT_THEM][0])
    needed = found[WITHOUT_THEM][0] - ALLOWED
    worst = {named(each): min(found[row][k] for row in rows[2:]) - best for k, each in enumerate(defences)}
    alone = {
        named(each): min(found[row][k] for row in rows[2:]) - found[WITHOUT_THEM][0] for k, each in enumerate(defences)
    }
    told = [f"{clients}, {hostile} of 10 hostile:", "", f"| attack | {' | '.join(map(named, defences))} |"]
    told += ["|---|" + "---|" * len(defences)]
    told += [
        f"| {row} | " + " | ".join(f"**{100 * v:.1f}**" if v >= needed else f"{100 * v:.1f}" for v in values) + " |"
        for row, values in found.items()
    ]
    told += ["| worst, less *without them* | " + " | ".join(f"{100 * each:+.1f}" for each in alone.values()) + " |"]
    told += ["| worst, less the best undefended | " + " | ".join(f"{100 * v:+.1f}" for v in worst.values()) + " |", ""]
    return told, alone


def page(cache: Path, quick: bool) -> str:
    """Return docs/robustness.md."""
    chosen = tuple(METHODS) if not quick else ("fedavg", "fedamp")
    counts, kinds = (HOSTILE[:1], tuple(PARTITIONS)[:1]) if quick else (HOSTILE, tuple(PARTITIONS))
    sections: list[str] = []
    summary = [f"| method | {' | '.join(f'{kind}, {n} hostile' for kind in kinds for n in counts)} |"]
    summary += ["|---|" + "---|" * (len(kinds) * len(counts))]
    for method in chosen:
        sections += [f"## {method}", ""]
        cells = []
        for kind in kinds:
            for hostile in counts:
                told, alone = table(method, kind, hostile, cache, quick)
                sections += told
                choice = max(alone, key=lambda name: alone[name])
                holds = "" if alone[choice] >= -ALLOWED else ", **does not hold**"
                cells.append(f"{choice} {100 * alone[choice]:+.1f}{holds}")
        summary += [f"| {method} | " + " | ".join(cells) + " |"]
    return "\n".join(
        [
            "# Robustness, as measured",
            "",
            "Written by `benchmarks/robustness.py`: not by hand. Ten clients share scikit-learn's digits; one or two",
            f"of them are hostile in every round. *Similar clients*: `{PARTITIONS['similar clients']}`; *different",
            f"clients*: `{PARTITIONS['different clients']}`. Numbers are the honest clients' mean test accuracy (%)",
            f"after the last of {SETTINGS['rounds']} rounds, over {len(SEEDS)} seeds: differences of a point are",
            "chance. *No attack*: the hostile clients are honest. *Without them*: they take no part; their data are",
            "lost whatever the defence, so this is what a defence is measured against. **Bold**: at most two points",
            "below that, without a defence. `coterie attack` prints such a table for your own federation, and",
            "`coterie run --robust RULE` defends it. The attacks are described in `coterie.experiment.attack`, the",
            "rules in `coterie.parts.robust`; `cap` is an option of FedAMP, HeurFedAMP and FedeRiCo.",
            "",
            "## In short",
            "",
            "For each method, the defence whose worst attack costs least, and that cost in points against *without",
            "them*. `multi-krum:f` and `krum:f` need to be told f, and were told 2.",
            "",
            *summary,
            "",
            "What these tables do not say: hostile clients that adapt to the defence can do more than these; `robust`",
            "acts on models only, so pFedVMP's class means are not protected; and no rule helps where most clients are",
            "hostile. The more clients differ, the less a rule can tell a hostile one from one that is different.",
            "",
            *sections,
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    asking = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    asking.add_argument("--quick", action="store_true", help="a smoke test: one round, one seed; no page is written")
    asking.add_argument("--cache", type=Path, default=ROOT / "build" / "robustness", metavar="FOLDER")
    asking.add_argument("--out", type=Path, default=ROOT / "docs" / "robustness.md", metavar="FILE")
    asked = asking.parse_args(arguments)
    asked.cache.mkdir(parents=True, exist_ok=True)
    text = page(asked.cache, asked.quick)
    if not asked.quick:
        files.write_text(asked.out, text)
    print(text if asked.quick else f"written to {asked.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
