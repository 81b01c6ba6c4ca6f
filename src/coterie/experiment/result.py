"""What a run gives back: every client's metrics and model, and the comparison with training alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from coterie import tree
from coterie.errors import CoterieError
from coterie.evaluation import Benefit, Predictions
from coterie.evaluation.benefit import judge, measure, sign_of
from coterie.evaluation.metrics import METRICS, mean
from coterie.experiment.config import Config
from coterie.hyper import AnyMethod
from coterie.spans import Profile
from coterie.task import Task
from coterie.tree import Tree

NO_REFERENCE = (
    "this run has no local reference, so it cannot say who gains: run it again with reference=True "
    "(on the command line, without --no-reference)"
)


@dataclass
class Result:
    """`clients` and `rounds` are lists of plain rows: `pandas.DataFrame(result.clients)` is a frame of them."""

    config: Config
    path: Path | None  # the run folder, if there is one
    clients: list[dict[str, Any]]  # one row a client, at the selected round
    rounds: list[dict[str, Any]]  # one row a round, with every client's metrics
    selected: int  # the round that validation selected
    metric: str  # what it selected by
    reference: Result | None  # local training at the same number of gradient steps
    task: Task
    method: AnyMethod
    views: Tree  # rows
    predictions: Predictions  # of the test examples, at the selected round
    g_and_p: dict[str, Any]  # global and local tests of both models at both rounds; {} without a global model
    server: Tree = ()  # at the selected round
    onboarded: list[Result] = field(default_factory=list)  # one a client that was held out, at the end
    profile: Profile | None = field(default=None, repr=False, compare=False)  # where the time went, if it was asked
    _benefits: dict[str, Benefit] = field(default_factory=dict, repr=False, compare=False)

    @property
    def names(self) -> list[str]:
        return [row["client"] for row in self.clients]

    def mean(self, metric: str | None = None, split: str = "test", *, weighted: bool = False) -> float:
        """The average over clients at the selected round, each counting alike or, `weighted`, by its examples there.

        `split` is "test", "validation", or "last_test" (the last round). Clients without a value are left out.
        """
        sizes = [row[split.removeprefix("last_")] for row in self.clients] if weighted else None
        return mean([row[f"{split}_{metric or self.metric}"] for row in self.clients], sizes)

    def gains(self, metric: str | None = None) -> np.ndarray:
        """[clients]: how much better than training alone (positive is better), at the selected rounds of both."""
        name = f"test_{self._named(metric)}"
        ours, alone = ([row[name] for row in result.clients] for result in (self, self._alone()))
        gains: np.ndarray = sign_of(self._named(metric)) * (np.array(ours) - np.array(alone))
        return gains

    def benefit(self, metric: str | None = None) -> Benefit:
        """Who gains by taking part, who loses, and who cannot tell: see `coterie.evaluation.benefit`."""
        name, alone = self._named(metric), self._alone()
        if name not in self._benefits:
            trial = measure(self.task, name, self.predictions, alone.predictions, self.names, seed=self.config.seed)
            self._benefits[name] = judge(name, self.names, [trial], seed=self.config.seed)
        return self._benefits[name]

    def _alone(self) -> Result:
        if self.reference is None:
            raise CoterieError(NO_REFERENCE)
        return self.reference

    def _named(self, metric: str | None) -> str:
        if metric is not None and metric not in METRICS[self.task.kind]:
            raise CoterieError(f"there is no metric '{metric}'; there are {', '.join(METRICS[self.task.kind])}")
        return metric or self.metric

    def bmta(self) -> float:
        """FedAMP's best mean test accuracy: the maximum over rounds of the mean *test* accuracy.

        It selects the round on test data, so it is optimistic; it is never shown unless asked for by this name.
        """
        if self.task.kind != "classification":
            raise CoterieError("BMTA is an accuracy: a regression has none")
        return max(mean(row["test"]["accuracy"]) for row in self.rounds if "test" in row)

    def view(self, client: str | int) -> Tree:
        if isinstance(client, str) and client not in self.names:
            raise CoterieError(f"there is no client '{client}'; there are {', '.join(self.names)}")
        return tree.rows(self.views, self.names.index(client) if isinstance(client, str) else client)

    def model(self, client: str | int) -> nn.Module:
        """A client's personalised model, as a module in evaluation mode: your own class where the view is one model."""
        return as_module(self.task, self.method, self.view(client))


def as_module(task: Task, method: AnyMethod, view: Tree) -> nn.Module:
    if isinstance(view, dict) and view.keys() == task.init().keys():
        return task.module(view)
    return Deployed(task, method, view).eval()


class Deployed(nn.Module):
    """A view that is more than one model: predicts as the method says."""

    def __init__(self, task: Task, method: AnyMethod, view: Tree) -> None:
        super().__init__()
        self.task, self.method, self._like = task, method, view
        for i, leaf in enumerate(tree.leaves(view)):
            self.register_buffer(f"leaf_{i}", leaf)

    def forward(self, x: Tensor) -> Tensor:
        leaves = iter(self.buffers())
        return self.method.predict(self.task, tree.map(lambda _: next(leaves), self._like), x)
