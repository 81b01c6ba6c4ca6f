"""All figures by name: what each shows, and where its data come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from coterie.experiment.reproduce.cache import Cache
from coterie.experiment.reproduce.figures import experiments, from_results, regression
from coterie.experiment.reproduce.figures.panels import Drawing
from coterie.experiment.reproduce.tables import Size

FromResults = Callable[[Cache, Size], Drawing | None]  # None: the results are not there
Experiment = Callable[[Size], Drawing]


@dataclass(frozen=True)
class Figure:
    """Describe a figure of a paper.

    Attributes:
        title: what it is.
        drawn: makes it from the results of `tables`.
        experiment: makes it by an experiment of its own.
        tables: whose results are needed.
        minutes: an estimate of the processor time of the experiment, by size.
        note: what a reader of the figure should know.
    """

    title: str
    drawn: FromResults | None = None
    experiment: Experiment | None = None
    tables: tuple[str, ...] = ()
    minutes: Mapping[Size, float] = field(default_factory=dict)
    note: str = ""


def _federico(name: str, seeds: tuple[int, ...], title: str) -> FromResults:
    return lambda cache, size: from_results.weights_over_rounds(cache, size, "federico-1-cifar10-4", name, seeds, title)


FIGURES: dict[str, Figure] = {
    "fedmap-figure-1": Figure(
        "FedMAP, figure 1: each client's accuracy over rounds",
        drawn=from_results.client_curves,
        tables=("fedmap-5", "fedmap-6", "fedmap-1"),
    ),
    "fedmap-figure-2": Figure(
        "FedMAP, figures 2 and 3: one line for all, and each client's, by F (Ditto) and by M (FedMAP)",
        experiment=regression.figure,
        minutes={"full": 0.1},
        note="Both problems are solved as well as a general minimiser can; nothing is federated here.",
    ),
    "fedmap-figure-4": Figure(
        "FedMAP, figures 4 and 5: the clients' inputs in two dimensions",
        experiment=experiments.inputs,
        minutes={"full": 0.5},
        note="t-SNE of 60 examples a client, as its network sees them: standardised by each client.",
    ),
    "fedamp-figure-2": Figure(
        "FedAMP, figure 2: the clients' accuracies in the practical setting",
        drawn=from_results.client_strips,
        tables=("fedamp-3-mnist", "fedamp-3-fmnist"),
    ),
    "fedamp-figure-3": Figure(
        "FedAMP, figure 3: who learns from whom in the practical setting",
        drawn=from_results.attention,
        tables=("fedamp-3-mnist", "fedamp-3-fmnist"),
        note="Weights on others; those on oneself, on the diagonal, are left out so that the others can be seen.",
    ),
    "pfedvmp-figure-2": Figure(
        "pFedVMP, figure 2: the clients' features in two dimensions, by class",
        experiment=experiments.features,
        minutes={"full": 500, "small": 4},
        note="At the small size on Fashion-MNIST with an MLP; the paper has CIFAR-10.",
    ),
    "pfedvmp-figure-4": Figure(
        "pFedVMP, figure 4: how the classes are divided among clients",
        experiment=experiments.divisions,
        minutes={"full": 0.3},
    ),
    "federico-figure-1": Figure(
        "FedeRiCo, figure 1: lines for pieces of a sine curve, and whose lines are used",
        experiment=experiments.sine,
        minutes={"full": 0.3},
    ),
    "federico-figure-3": Figure(
        "FedeRiCo, figure 3: each client's weights over rounds",
        drawn=_federico("FedeRiCo", (0,), "FedeRiCo, figure 3: each client's weights over rounds"),
        tables=("federico-1-cifar10-4",),
        note="On CIFAR-10 with 4 groups; the paper has CIFAR-100.",
    ),
    "federico-figure-4": Figure(
        "FedeRiCo, figure 4: FedEM's weights of its 4 components over rounds",
        experiment=experiments.components,
        minutes={"full": 600, "small": 2},
        note="On CIFAR-10 with 4 groups; the paper has CIFAR-100.",
    ),
    "federico-figure-5": Figure(
        "FedeRiCo, figure 5: weights by accumulated losses and by a moving average",
        experiment=experiments.tracking,
        minutes={"full": 1400, "small": 3},
    ),
    "federico-figure-6": Figure(
        "FedeRiCo, figure 6: accuracy over rounds by epsilon, M and beta",
        drawn=from_results.hyper_curves,
        tables=("federico-6a", "federico-6b", "federico-6c"),
    ),
    "federico-figure-7": Figure(
        "FedeRiCo, figure 7: client 0's weights over rounds by beta",
        drawn=from_results.weights_by_beta,
        tables=("federico-6c",),
    ),
    "federico-figure-8": Figure(
        "FedeRiCo, figure 8: the same as figure 3 for other splits",
        drawn=_federico("FedeRiCo", (1, 2), "FedeRiCo, figure 8: each client's weights, for two other splits"),
        tables=("federico-1-cifar10-4",),
    ),
    "pfedbred-figure-2": Figure(
        "pFedBreD, figure 2: how coherent the clients' steps are (GCE)",
        experiment=experiments.coherence,
        minutes={"full": 25, "small": 4},
        note=(
            "1 - det of the Gram matrix of the clients' normalised steps of a round, as a share of its range over "
            "20 clients drawn anew: the paper does not define it for 100. Smaller is more diverse."
        ),
    ),
    "pfedbred-figure-3": Figure(
        "pFedBreD, figure 3: the first client's loss of each class against the mean over clients",
        experiment=experiments.loss_deviation,
        minutes={"full": 25, "small": 4},
    ),
}
