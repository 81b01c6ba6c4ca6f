"""What privacy costs in accuracy, and what an attacker can still prove: renews the two tables of docs/privacy.md.

    python benchmarks/privacy.py [--quick] [--cache FOLDER] [--out FILE]

Four clients with scikit-learn's digits and a linear model, 20 rounds, at several epsilons for single examples, with
three methods and three seeds; and the audit of `coterie.experiment.privacy.audit`. It takes a few minutes. A result is
kept under --cache (by default build/privacy): started again, the script runs what is missing. Delete the folder after a
change of code that changes results.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import coterie
from coterie.experiment.privacy.audit import audit
from coterie.storage import files

ROOT = Path(__file__).resolve().parents[1]
METHODS = ("fedavg", "fedmap", "ditto")
EPSILONS = (math.inf, 8.0, 4.0, 1.0)
AUDITED = (math.inf, 30.0, 8.0, 4.0, 1.0)
SEEDS = (0, 1, 2)
SETTINGS: dict[str, Any] = {
    **{"data": "digits", "clients": 4, "partition": "dirichlet:1:min=100", "model": "linear", "rounds": 20},
    **{"batch_size": 64, "optimizer": "sgd", "lr": 0.5, "engine": "stacked", "compile": False, "workers": 1},
    "evaluate_every": 20,
}


def kept(cache: Path, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what was measured, from the cache if it is there."""
    path = cache / f"{name}.json"
    if not path.exists():
        files.write_json(path, measure())
    found: dict[str, Any] = files.read_json(path)
    return found


def accuracy(method: str, epsilon: float, seed: int, quick: bool) -> dict[str, Any]:
    """Return the mean test accuracy over clients, that of training alone, and the noise."""
    asked: dict[str, Any] = {} if math.isinf(epsilon) else {"epsilon": epsilon}
    result = coterie.run(method, **{**SETTINGS, **({"rounds": 2} if quick else {})}, **asked, seed=seed)
    assert result.reference is not None
    noise = result.budget.noise if result.budget else 0.0
    return {"ours": 100 * result.mean("accuracy"), "alone": 100 * result.reference.mean("accuracy"), "noise": noise}


def accuracy_table(cache: Path, quick: bool) -> list[str]:
    lines = ["| epsilon | noise | " + " | ".join(METHODS) + " | alone, without privacy |", "|---|---|" + "---|" * 4]
    for epsilon in EPSILONS:
        found = {
            method: [
                kept(cache, f"{method}-{epsilon:g}-{seed}", partial(accuracy, method, epsilon, seed, quick))
                for seed in (SEEDS[:1] if quick else SEEDS)
            ]
            for method in METHODS
        }
        noise = max(each["noise"] for some in found.values() for each in some)
        cells = [spread([each["ours"] for each in some]) for some in found.values()]
        alone = spread([each["alone"] for each in found[METHODS[0]]])
        lines.append(f"| {named(epsilon)} | {noise:.2f} | {' | '.join(cells)} | {alone} |")
        print(lines[-1], flush=True)
    return lines


def audit_table(cache: Path, quick: bool) -> list[str]:
    lines = ["| epsilon claimed | epsilon proven | AUC | advantage | right guesses |", "|---|---|---|---|---|"]
    for epsilon in AUDITED:
        found = [
            kept(cache, f"audit-{epsilon:g}-{seed}", partial(audited, epsilon, seed, 2 if quick else 20))
            for seed in (SEEDS[:1] if quick else SEEDS)
        ]
        proven, auc, advantage = (
            statistics.mean(each[key] for each in found) for key in ("proven", "auc", "advantage")
        )
        right = f"{sum(each['right'] for each in found)} of {sum(each['guesses'] for each in found)}"
        most = max(each["proven"] for each in found)
        lines.append(
            f"| {named(epsilon)} | {proven:.2f} (at most {most:.2f}) | {auc:.3f} | {advantage:.2f} | {right} |"
        )
        print(lines[-1], flush=True)
    return lines


def audited(epsilon: float, seed: int, epochs: int) -> dict[str, Any]:
    """Return what an attacker found in one training."""
    found = audit(epsilon, seed=seed, epochs=epochs)._asdict()
    return found | {"claimed": None if math.isinf(epsilon) else epsilon}


def spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def named(epsilon: float) -> str:
    return "none" if math.isinf(epsilon) else f"{epsilon:g}"


def renewed(text: str, name: str, lines: list[str]) -> str:
    """Return `text` with other lines between the marks of this name."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, rest = text.split(begin)
    return before + begin + "\n".join(lines) + "\n" + end + rest.split(end)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, two rounds: only to see that it works")
    parser.add_argument("--cache", type=Path, default=ROOT / "build/privacy")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/privacy.md")
    given = parser.parse_args()
    text = given.out.read_text(encoding="utf-8")
    for name, table in (("accuracy", accuracy_table), ("audit", audit_table)):
        text = renewed(text, name, table(given.cache / ("quick" if given.quick else "whole"), given.quick))
    files.write_text(given.out, text)


if __name__ == "__main__":
    main()
