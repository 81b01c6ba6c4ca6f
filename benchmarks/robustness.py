"""What hostile clients do to the honest ones, and what the defences are worth: writes docs/robustness.md.

    python benchmarks/robustness.py [--quick] [--cache FOLDER] [--out FILE]

Ten clients with scikit-learn's digits, of whom one or two are hostile, under every attack of `coterie.attack` and every
defence, with two seeds. A result is kept under --cache (by default build/robustness), named by its settings: started
again, the script runs what is missing. Delete the folder after a change of code that changes results. It is no part of
`make bench`, since it measures no time.
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
from coterie.experiment.attack import ATTACKS
from coterie.storage import files

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = 0.02  # what honest clients may lose with the right defence
SEEDS = (0, 1)
HOSTILE = (1, 2)
SETTINGS: Mapping[str, Any] = {
    **{"data": "digits", "clients": 10, "partition": "dirichlet:1:min=60", "rounds": 30, "lr": 0.1, "local_epochs": 2},
    "select": "accuracy",
}
NO_ATTACK = "no attack"
RULES: tuple[dict[str, Any], ...] = (
    {},
    *({"robust": rule} for rule in ("median", "trimmed:0.2", "krum:2", "geometric-median", "clip:auto")),
)
CAPS: tuple[dict[str, Any], ...] = ({}, {"cap": 0.1}, {"cap": 0.02})
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


def measure(method: str, attack: str, hostile: int, defence: Mapping[str, Any], cache: Path, quick: bool) -> float:
    """Return the mean accuracy of the honest clients over seeds, from the cache if it is there."""
    settings = {**SETTINGS, **METHODS[method][1], **defence, **({"rounds": 1, "local_epochs": 1} if quick else {})}
    name = hashlib.sha256(json.dumps([method, attack, hostile, settings, quick], sort_keys=True).encode()).hexdigest()
    kept = cache / f"{name[:16]}.json"
    if not kept.exists():
        which = None if attack == NO_ATTACK else attack
        scores = []
        for seed in SEEDS[: 1 if quick else None]:
            try:
                scores.append(coterie.attack(which, hostile, method, seed=seed, **settings).mean)
            except coterie.CoterieError:  # it diverged: nobody has a model that is worth anything
                scores.append(0.0)
        print(method, attack, hostile, named(defence), scores, file=sys.stderr, flush=True)
        files.write_json(kept, {"method": method, "attack": attack, "hostile": hostile, "scores": scores})
    kept_scores: list[float] = json.loads(kept.read_text(encoding="utf-8"))["scores"]
    return statistics.mean(kept_scores)


def section(method: str, cache: Path, quick: bool) -> list[str]:
    """Return a method's part of the page."""
    defences = METHODS[method][0]
    attacks = (NO_ATTACK, "sign-flip") if quick else (NO_ATTACK, *ATTACKS)
    told = [f"## {method}", ""]
    for hostile in HOSTILE[: 1 if quick else None]:
        found = {
            attack: [measure(method, attack, hostile, defence, cache, quick) for defence in defences]
            for attack in attacks
        }
        honest = found[NO_ATTACK][0]
        worst = [min(found[attack][k] for attack in attacks) - honest for k in range(len(defences))]
        told += [f"{hostile} of 10 hostile:", "", f"| attack | {' | '.join(map(named, defences))} |"]
        told += ["|---|" + "---|" * len(defences)]
        told += [
            f"| {attack} | "
            + " | ".join(f"**{100 * v:.1f}**" if v >= honest - ALLOWED else f"{100 * v:.1f}" for v in values)
            + " |"
            for attack, values in found.items()
        ]
        told += ["| worst difference | " + " | ".join(f"{100 * each:+.1f}" for each in worst) + " |", ""]
        left = [a for a in attacks if all(v < honest - ALLOWED for v in found[a])]
        told += [f"No defence holds against: {', '.join(left)}." if left else "Some defence holds against each attack."]
        told += [""]
    return told


def page(cache: Path, quick: bool) -> str:
    told = [
        "# Robustness, as measured",
        "",
        "Written by `benchmarks/robustness.py`: not by hand. Ten clients share scikit-learn's digits by Dirichlet(1);",
        "one or two of them are hostile in every round. Numbers are the honest clients' mean test accuracy (%) after",
        f"the last of {SETTINGS['rounds']} rounds, over {len(SEEDS)} seeds. **Bold**: at most two points below what",
        "the same clients reach without attack and without defence. `coterie attack` prints such a table for your own",
        "federation, and `coterie run --robust RULE` defends it. The attacks are described in",
        "`coterie.experiment.attack`, the rules in `coterie.parts.robust`; `cap` is an option of FedAMP, HeurFedAMP",
        "and FedeRiCo.",
        "",
        "What these tables do not say: hostile clients that adapt to the defence can do more than these; `robust` acts",
        "on models only, so pFedVMP's class means are not protected; and no rule helps where most clients are hostile.",
        "",
    ]
    for method in METHODS if not quick else ("fedavg", "fedamp"):
        told += section(method, cache, quick)
    return "\n".join(told)


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
