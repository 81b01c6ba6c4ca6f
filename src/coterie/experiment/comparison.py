"""What a comparison found: every method's test metric for every seed and client, and the averages of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError
from coterie.evaluation import BETTER
from coterie.experiment.folder import FORMAT

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Comparison:
    """`rows` are plain: one for each method, seed and client, at the round that validation selected."""

    metric: str
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    rows: list[dict[str, Any]]
    path: Path | None = None

    @property
    def clients(self) -> list[str]:
        return list(dict.fromkeys(row["client"] for row in self.rows))

    @property
    def train_sizes(self) -> Array:
        """[clients]: training examples, on average over the seeds."""
        sizes: Array = self._table(self.methods[0], "train").mean(0)
        return sizes

    @property
    def has_local(self) -> bool:
        return "local" in self.methods

    def scores(self, method: str) -> Array:
        """[seeds, clients]: the test metric."""
        return self._table(method, f"test_{self.metric}")

    def means(self, method: str) -> Array:
        """[seeds]: the average over clients, each counting alike."""
        means: Array = self.scores(method).mean(1)
        return means

    def mean(self, method: str) -> float:
        return float(self.means(method).mean())

    def std(self, method: str) -> float:
        """Over the seeds, with n - 1 in the denominator; NaN for one seed."""
        return float(self.means(method).std(ddof=1)) if len(self.seeds) > 1 else float("nan")

    def per_client(self, method: str) -> Array:
        """[clients]: the average over seeds."""
        means: Array = self.scores(method).mean(0)
        return means

    def gains(self, method: str) -> Array:
        """[seeds]: how much better than local training (positive is better), on average over clients."""
        return self._sign * (self.means(method) - self.means("local"))

    def client_gains(self, method: str) -> Array:
        """[clients]: the same on average over seeds."""
        return self._sign * (self.per_client(method) - self.per_client("local"))

    def best(self, among: Sequence[str] | None = None) -> str:
        return max(among or self.methods, key=lambda method: self._sign * self.mean(method))

    def summary(self) -> dict[str, Any]:
        """What comparison.json holds."""
        told: dict[str, Any] = {}
        for method in self.methods:
            means = self.means(method)
            std = self.std(method) if len(self.seeds) > 1 else None  # JSON has no NaN
            told[method] = {"mean": self.mean(method), "std": std, "seeds": means.tolist()}
            if self.has_local:
                told[method]["gain_over_local"] = self.gains(method).tolist()
        return {
            "format": FORMAT,
            "metric": f"test_{self.metric}",
            "seeds": list(self.seeds),
            "methods": told,
            "rows": self.rows,
        }

    @property
    def _sign(self) -> int:
        return 1 if BETTER[self.metric] is max else -1

    def _table(self, method: str, column: str) -> Array:
        if method not in self.methods:
            raise ConfigError([f"'{method}' was not compared; there are {', '.join(self.methods)}"])
        found = {(row["seed"], row["client"]): row[column] for row in self.rows if row["method"] == method}
        return np.array([[found[seed, client] for client in self.clients] for seed in self.seeds], dtype=float)
