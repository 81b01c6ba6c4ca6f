"""Hold what a comparison found: every method's test metric for every seed and client, and averages of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from coterie.core.errors import ConfigError, CoterieError
from coterie.evaluation import Benefit
from coterie.evaluation.benefit import VERDICTS, sign_of
from coterie.evaluation.fairness import spread
from coterie.evaluation.metrics import mean
from coterie.experiment import show
from coterie.experiment.references import References
from coterie.storage.run_folder import FORMAT

Array = NDArray[np.float64]


@dataclass(frozen=True, repr=False)
class Comparison:
    """Hold the results of a comparison.

    `rows` are plain dicts: one for each method, seed and client, at the round that validation selected.
    """

    metric: str
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    rows: list[dict[str, Any]]
    path: Path | None = None
    benefits: Mapping[str, Benefit] = field(default_factory=dict)  # by method, except local; {} without local
    taken: Mapping[str, Benefit] = field(default_factory=dict)  # the same of what the clients take home, if they choose
    references: Sequence[References] = ()  # what usual models of tables reach, one per seed

    @property
    def clients(self) -> list[str]:
        """Return the clients' names."""
        return list(dict.fromkeys(row["client"] for row in self.rows))

    @property
    def train_sizes(self) -> Array:
        """Return each client's number of training examples [clients], on average over the seeds."""
        sizes: Array = self._table(self.methods[0], "train").mean(0)
        return sizes

    @property
    def has_local(self) -> bool:
        """Return whether local training was one of the methods."""
        return "local" in self.methods

    def scores(self, method: str) -> Array:
        """Return the test metric [seeds, clients]."""
        return self._table(method, f"test_{self.metric}")

    def means(self, method: str) -> Array:
        """Return the average over clients [seeds], each counting the same."""
        return np.array([mean(scores) for scores in self.scores(method)])

    def weighted_means(self, method: str) -> Array:
        """Return the average over clients [seeds], weighted by their number of test examples."""
        pairs = zip(self.scores(method), self._table(method, "test"), strict=True)
        return np.array([mean(scores, sizes) for scores, sizes in pairs])

    def fairness(self, method: str) -> dict[str, float]:
        """Measure how evenly clients share the metric, averaged over seeds: see `coterie.evaluation.fairness`."""
        pairs = zip(self.scores(method), self._table(method, "test"), strict=True)
        each = [spread(scores, sizes, self.metric) for scores, sizes in pairs]
        return {name: mean([one[name] for one in each]) for name in each[0]}

    def mean(self, method: str) -> float:
        """Return the average over clients and seeds."""
        return mean(self.means(method))

    def std(self, method: str) -> float:
        """Return the standard deviation over seeds, with n - 1 in the denominator; NaN for one seed."""
        return float(self.means(method).std(ddof=1)) if len(self.seeds) > 1 else float("nan")

    def per_client(self, method: str) -> Array:
        """Return each client's average over seeds [clients]."""
        return np.array([mean(scores) for scores in self.scores(method).T])

    def gains(self, method: str) -> Array:
        """Return the gain over local training [seeds], on average over clients; positive is better."""
        return sign_of(self.metric) * (self.means(method) - self.means("local"))

    def kept_gains(self, method: str) -> Array:
        """Return the same for what the clients take home [seeds]."""
        kept = self._table(method, f"kept_test_{self.metric}")
        return sign_of(self.metric) * (np.array([mean(scores) for scores in kept]) - self.means("local"))

    def client_gains(self, method: str) -> Array:
        """Return each client's gain over local training [clients], on average over seeds; positive is better."""
        return sign_of(self.metric) * (self.per_client(method) - self.per_client("local"))

    def benefit(self, method: str) -> Benefit:
        """Judge a method against training alone, over all seeds: see `coterie.evaluation.benefit.judge`.

        Raises:
            CoterieError: the comparison has no local training, or `method` is local.
            ConfigError: the method was not compared.
        """
        if method not in self.benefits:
            self._table(method, "train")  # raises an error for a method that was not compared
            raise CoterieError(
                "local is what the others are compared with"
                if method == "local"
                else "this comparison has no local training, so it cannot tell who gains: add local to its methods"
            )
        return self.benefits[method]

    def verdict(self) -> dict[str, dict[str, list[str]]]:
        """Return {method: {"gains": clients, "loses": clients, "undecided": clients}}, for every method but local."""
        others = [method for method in self.methods if method != "local"]
        return {method: {each: self.benefit(method).who(each) for each in VERDICTS} for method in others}

    def best(self, among: Sequence[str] | None = None) -> str:
        """Return the method with the best average, of all or of those in `among`."""
        return max(among or self.methods, key=lambda method: sign_of(self.metric) * self.mean(method))

    def __repr__(self) -> str:
        means = ", ".join(f"{method} {self.mean(method):.4g}" for method in self.methods)
        return f"<Comparison of {len(self.clients)} clients, {len(self.seeds)} seeds: test {self.metric} {means}>"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: a table of the methods and, if local was compared, a chart of gains."""
        return show.comparison_html(self)

    def plot(self, what: Literal["gain", "clients"] | None = None) -> Any:
        """Return one of the report's pictures as a plotly figure.

        Args:
            what: "gain" (each client's gain over training alone, by method) or "clients" (the spread over clients, by
                method). By default "gain" or, without local, "clients".

        Raises:
            CoterieError: local was not compared, or there is no such picture.
        """
        return show.comparison_figure(self, what)

    def to_pandas(self) -> Any:
        """Return a data frame with a row per method, seed and client.

        Raises:
            CoterieError: pandas is not installed.
        """
        return show.frame(self.rows)

    def summary(self) -> dict[str, Any]:
        """Return the content of comparison.json."""
        by_method: dict[str, Any] = {}
        for method in self.methods:
            means = self.means(method)
            by_method[method] = {"mean": self.mean(method), "std": self.std(method), "seeds": means.tolist()}
            by_method[method] |= {"weighted": self.weighted_means(method).tolist(), "fairness": self.fairness(method)}
            if self.has_local:
                by_method[method]["gain_over_local"] = self.gains(method).tolist()
            if method in self.benefits:
                by_method[method]["benefit"] = self.benefits[method].to_json()
            if method in self.taken:
                by_method[method]["take_home"] = self.taken[method].to_json()
        usual = {"references": [each.to_json() for each in self.references]} if self.references else {}
        return {
            **usual,
            "format": FORMAT,
            "metric": f"test_{self.metric}",
            "seeds": list(self.seeds),
            "methods": by_method,
            "rows": self.rows,
        }

    def _table(self, method: str, column: str) -> Array:
        if method not in self.methods:
            raise ConfigError([f"'{method}' was not compared; there are {', '.join(self.methods)}"])
        found = {(row["seed"], row["client"]): row[column] for row in self.rows if row["method"] == method}
        return np.array([[found[seed, client] for client in self.clients] for seed in self.seeds], dtype=float)
