"""Hold what a run returns: every client's metrics and model, and the comparison with training alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor, nn

from coterie.core import client_rows, tree
from coterie.core.errors import CoterieError
from coterie.core.task import Task
from coterie.core.tree import Tree
from coterie.evaluation import Benefit, Predictions
from coterie.evaluation.benefit import judge, measure, measure_each, sign_of
from coterie.evaluation.metrics import average, mean
from coterie.evaluation.scoring import metrics_of
from coterie.experiment import show
from coterie.experiment.config import Config
from coterie.experiment.mixed import Mixed
from coterie.experiment.privacy.budget import Budget
from coterie.experiment.references import References
from coterie.experiment.stopping import Stop
from coterie.experiment.take_home.adopt import Adoption
from coterie.experiment.take_home.kept import kept_module
from coterie.methods.fields import AnyMethod
from coterie.models.adapters import merge
from coterie.profiling import Profile

NO_REFERENCE = (
    "this run has no local reference, so it cannot tell who gains: run it again with reference=True "
    "(on the command line, without --no-reference)"
)


@dataclass(repr=False)
class Result:
    """Hold the results of a run.

    `clients` and `rounds` are lists of plain dicts; `to_pandas()` makes a data frame of them. A notebook shows a result
    as a table with a chart of gains; `plot()` gives plotly figures.
    """

    config: Config
    path: Path | None  # the run folder, if there is one
    clients: list[dict[str, Any]]  # one row per client, at the selected round
    rounds: list[dict[str, Any]]  # one row per round, with every client's metrics
    selected: int  # the round that validation selected
    metric: str  # the metric that selected it
    reference: Result | None  # local training at the same number of gradient steps
    task: Task
    method: AnyMethod
    views: Any  # what each client deploys, as rows; `Paged` if there are many clients
    predictions: Predictions  # for the test examples, at the selected round
    g_and_p: dict[str, Any]  # global and local tests of both models at both rounds; {} without a global model
    server: Tree = ()  # at the selected round
    validation: Predictions | None = None  # for the validation examples, at the selected round
    held_out: Predictions | None = None  # for more examples, where those for validation are few (take_home.held_out)
    take_home: Adoption | None = None  # what each client keeps, if it may choose
    budget: Budget | None = None  # what its privacy costs; None: it has none
    stopped: Stop | None = None  # after which round it stopped, and why; None: it had all planned rounds
    references: References | None = None  # what usual models reach on the same tables
    onboarded: list[Result] = field(default_factory=list)  # one per client that was held out, after the last round
    mixed: Mixed | None = None  # who has which model; None: all have the same
    profile: Profile | None = field(default=None, repr=False, compare=False)  # where the time went, if it was recorded
    _benefits: dict[str, Benefit] = field(default_factory=dict, repr=False, compare=False)

    @property
    def names(self) -> list[str]:
        """Return the clients' names, in the order of the rows."""
        return [row["client"] for row in self.clients]

    def mean(self, metric: str | None = None, split: str = "test", *, weighted: bool = False) -> float:
        """Return the average of a metric over clients at the selected round; which average is up to the configuration.

        Args:
            metric: by default the one that selected the round.
            split: "test", "validation", or "last_test" (the test metric after the last round).
            weighted: clients count by their number of examples in the split, not all the same.

        Returns:
            The average over the clients that have a value.
        """
        sizes = [row[split.removeprefix("last_")] for row in self.clients] if weighted else None
        return average([row[f"{split}_{metric or self.metric}"] for row in self.clients], self.config.average, sizes)

    def gains(self, metric: str | None = None) -> np.ndarray:
        """Return how much better each client is than alone, at the selected rounds of both; positive is better.

        Raises:
            CoterieError: there is no local reference, or no such metric.
        """
        name = f"test_{self._named(metric)}"
        ours, alone = ([row[name] for row in result.clients] for result in (self, self._alone()))
        gains: np.ndarray = sign_of(self._named(metric)) * (np.array(ours) - np.array(alone))
        return gains

    def benefit(self, metric: str | None = None) -> Benefit:
        """Judge who gains by taking part, who loses, and who is undecided: see `coterie.evaluation.benefit`.

        Raises:
            CoterieError: there is no local reference, or no such metric.

        Examples:
            >>> import coterie
            >>> result = coterie.run("fedavg", "hospitals", model="linear", rounds=2)
            >>> found = result.benefit()  # in the metric that selected the round; or result.benefit("accuracy")
            >>> sorted(found.clients[0])
            ['client', 'federated', 'gain', 'high', 'local', 'low', 'test', 'verdict']
        """
        name, alone = self._named(metric), self._alone()
        if name not in self._benefits:
            trial = measure(self.task, name, self.predictions, alone.predictions, self.names, seed=self.config.seed)
            self._benefits[name] = judge(name, self.names, [trial], seed=self.config.seed)
        return self._benefits[name]

    def benefits(self, kept: Predictions) -> tuple[Benefit, Benefit]:
        """Return `benefit()`, and the same of the models that are kept: less work than one after the other.

        Raises:
            CoterieError: there is no local reference.
        """
        several, seed = {"ours": self.predictions, "kept": kept}, self.config.seed
        found = measure_each(self.task, self.metric, several, self._alone().predictions, self.names, seed=seed)
        ours, taken = (judge(self.metric, self.names, [found[label]], seed=seed) for label in several)
        self._benefits[self.metric] = ours
        return ours, taken

    def __repr__(self) -> str:
        config = self.config
        rounds = f"round {self.selected} of {self.rounds[-1]['round']}"
        where = f"{config.method} on {config.data}, {len(self.clients)} clients, {rounds}"
        return f"<Result of {where}: test {self.metric} {self.mean():.4g}>"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: a table of the clients and, if there is a local reference, a chart of gains."""
        return show.result_html(self)

    def plot(self, what: show.What | None = None) -> Any:
        """Return one of the report's pictures as a plotly figure.

        Args:
            what: "gain" (each client's gain over training alone), "rounds" (metrics round by round) or "clients" (the
                spread over clients). By default "gain" or, without a local reference, "rounds".

        Raises:
            CoterieError: there is no local reference, or no such picture.
        """
        return show.result_figure(self, what)

    def to_pandas(self, what: Literal["clients", "rounds"] = "clients") -> Any:
        """Return a data frame: a row per client at the selected round, or per round and client.

        Raises:
            CoterieError: pandas is not installed.
        """
        if what not in ("clients", "rounds"):
            raise CoterieError(f"there is no data frame of '{what}'; there are clients, rounds")
        return show.frame(self.clients if what == "clients" else show.round_rows(self))

    def _alone(self) -> Result:
        if self.reference is None:
            raise CoterieError(NO_REFERENCE)
        return self.reference

    def _named(self, metric: str | None) -> str:
        if metric is not None and metric not in metrics_of(self.task):
            raise CoterieError(f"there is no metric '{metric}'; there are {', '.join(metrics_of(self.task))}")
        return metric or self.metric

    def bmta(self) -> float:
        """Return FedAMP's best mean test accuracy: the maximum over rounds of the mean *test* accuracy.

        It selects the round on test data, so it is optimistic; it is never shown unless asked for by this name.
        """
        if self.task.kind != "classification":
            raise CoterieError(f"BMTA is the accuracy of a classification: {self.task.target.words} has none")
        return max(mean(row["test"]["accuracy"]) for row in self.rounds if "test" in row)

    def view(self, client: str | int) -> Tree:
        """Return what a client deploys, by its name or its number from 0; raise `CoterieError` for unknown names."""
        if isinstance(client, str) and client not in self.names:
            raise CoterieError(f"there is no client '{client}'; there are {', '.join(self.names)}")
        return client_rows.take(self.views, self.names.index(client) if isinstance(client, str) else client)

    def task_of(self, client: int) -> Task:
        """Return the task of a client, by its number: clients may have different models."""
        return self.task if self.mixed is None else self.mixed.task(client % len(self.names))

    def model(self, client: str | int) -> nn.Module:
        """Return the model that a client takes home, in evaluation mode.

        It is an instance of your own class if the client deploys one model, and otherwise a `Deployed`.
        """
        i = self.names.index(client) if isinstance(client, str) and client in self.names else client
        view = self.view(client)  # which complains of an unknown name
        assert isinstance(i, int)
        module = as_module(self.task_of(i), self.method, view)
        if self.take_home is None:
            return module
        local = None if self.reference is None else self.reference.model(i)
        kept, temperature = self.take_home.choices[i].kept, self.take_home.temperatures[i]
        return kept_module(self.task.target, module, local, kept, temperature)


def as_module(task: Task, method: AnyMethod, view: Tree) -> nn.Module:
    """Return a module in evaluation mode that predicts as a client with this view does."""
    if isinstance(view, dict) and view.keys() == task.init().keys():
        return merge(task.module(view))
    return Deployed(task, method, view).eval()


class Deployed(nn.Module):
    """Wrap a view that is more than one model; it predicts as the method does."""

    def __init__(self, task: Task, method: AnyMethod, view: Tree) -> None:
        super().__init__()
        self.task, self.method, self._like = task, method, view
        for i, leaf in enumerate(tree.leaves(view)):
            # A copy of its own: products of matrices round differently where a file has put them at odd places.
            self.register_buffer(f"leaf_{i}", leaf.clone())

    def forward(self, x: Tensor) -> Tensor:
        leaves = iter(self.buffers())
        return self.method.predict(self.task, tree.map(lambda _: next(leaves), self._like), x)
