"""pFedVMP: tables 1 to 3 and 5 to 7 on Fashion-MNIST and CIFAR-10."""

from __future__ import annotations

from typing import Any

from coterie.experiment.reproduce.tables import Entry, Protocol, Table

EXAMPLES = Protocol("correct over all examples, best round on test data", "accuracy", "best", "examples")
VARIATION = Protocol("coefficient of variation over clients (x 0.01), best round on test data", over="variation")
# (label, method, settings) in the order of table 1.
METHODS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("FedAvg-FT", "fedavg-ft", {}),
    ("FedPer", "fedper", {}),
    ("FedRep", "fedrep", {}),
    ("FedROD", "fedrod", {}),
    ("FedProto", "fedproto", {}),
    ("MOON", "moon", {}),
    ("FedCP", "fedcp", {}),
    ("GPFL", "gpfl", {}),
    ("FedPAC", "fedpac", {}),
    ("FedPA-FT", "fedpa-ft", {}),
    ("FedEP-FT", "fedep-ft", {}),
    ("QLSD-FT", "qlsd-ft", {}),
    ("pFedGP", "pfedgp", {}),
    ("pFedBreD", "pfedbred", {}),
    ("pFedVMP", "pfedvmp", {"xi1": 50.0, "alpha": 1.0}),
)
OF = {label: (method, settings) for label, method, settings in METHODS}
OF["pFedVMP-avg"] = ("pfedvmp", {"xi1": 50.0, "alpha": 1.0, "precision": "none"})
COLUMNS = {  # of table 1, in the order of METHODS
    "fmnist-50c-dir0.1": (
        *(96.99, 96.43, 96.62, 96.68, 96.06, 96.57, 96.87, 96.65, 96.59, 96.91, 96.88, 93.80, 96.11, 96.64, 97.23),
    ),
    "fmnist-50c-dir0.3": (
        *(94.93, 92.99, 93.30, 94.38, 92.19, 94.80, 93.87, 95.09, 94.57, 94.97, 94.95, 89.30, 94.15, 94.21, 95.60),
    ),
    "cifar10-50c-dir0.1": (
        *(87.93, 85.05, 85.98, 86.35, 83.05, 87.88, 86.97, 84.80, 87.34, 87.88, 87.87, 79.49, 85.88, 86.39, 88.12),
    ),
    "cifar10-50c-dir0.3": (
        *(77.70, 70.56, 70.85, 74.61, 66.71, 77.76, 72.96, 77.75, 78.12, 78.23, 78.36, 65.35, 75.88, 74.42, 80.81),
    ),
}
DEGRADED = {"dir0.1": (88.12, 87.29, 85.05), "dir0.3": (80.81, 76.97, 70.56)}  # pFedVMP, -avg, FedPer
FAIR = ("FedAvg-FT", "FedPer", "FedROD", "FedProto", "GPFL", "FedPAC", "pFedVMP")
FAIRNESS = {
    "fmnist-50c-dir0.3": (4.46, 6.73, 4.79, 6.91, 4.26, 5.15, 4.14),
    "cifar10-50c-dir0.3": (12.73, 19.05, 15.99, 23.58, 13.84, 14.07, 11.81),
}
PATHOLOGICAL = (83.47, 74.80, 79.07, 71.83, 82.63, 81.17, 84.73)  # in the order of FAIR
WIDTHS = {128: 79.46, 256: 80.14, 384: 80.10, 512: 79.93, 640: 79.82}
STRENGTHS = {1: 75.15, 5: 78.66, 10: 79.22, 20: 80.08, 50: 80.81, 70: 80.25, 100: 79.43}
LOCAL = Entry("local at equal steps", "local")
NAMES = {"fmnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}
SMALL_MODEL = {"fmnist": "mlp:hidden=128", "cifar10": "lenet"}
PARTITIONS = {"dir0.1": "dirichlet:0.1", "dir0.3": "dirichlet:0.3"}


def _small(column: str) -> dict[str, Any]:
    data, _, how = column.split("-")
    share = 0.06 if data == "fmnist" else 0.08
    settings: dict[str, Any] = {"rounds": 60, "clients": 20, "evaluate_every": 5, "model": SMALL_MODEL[data]}
    if how in PARTITIONS:
        settings["partition"] = f"{PARTITIONS[how]}:share={share}"
    return settings


def _words(column: str) -> str:
    network = {"fmnist": "an MLP (784-128-10)", "cifar10": "LeNet"}[column.split("-")[0]]
    images = "4,200" if column.startswith("fmnist") else "4,800"
    return f"{network} instead of the CNN, 20 clients with {images} images in all, 60 rounds instead of 1,000"


def _entries(labels: tuple[str, ...], papers: tuple[float, ...]) -> tuple[Entry, ...]:
    rows = [Entry(label, OF[label][0], paper, OF[label][1]) for label, paper in zip(labels, papers, strict=True)]
    return (*rows, LOCAL)


def _table(
    number: int,
    column: str,
    entries: tuple[Entry, ...],
    *,
    minutes: float,
    small_minutes: float,
    words: str | None = None,
    protocol: Protocol = EXAMPLES,
    small: dict[str, Any] | None = None,
    small_words: str | None = None,
    note: str = "",
) -> Table:
    data, _, how = column.split("-")
    return Table(
        title=f"pFedVMP, table {number}: {NAMES[data]}, {how if words is None else words}",
        protocol=protocol,
        settings={"setting": f"pfedvmp/{column}", "validation": 0.05, "evaluate_every": 5},
        entries=entries,
        minutes=minutes,
        small=_small(column) if small is None else small,
        small_words=_words(column) if small_words is None else small_words,
        small_minutes=small_minutes,
        note=note,
    )


# With the paper's CNN, a step of one client takes about 4 ms on Fashion-MNIST, 6 on CIFAR-10, and a method has
# 1,000 rounds of as many steps as a tenth of the training images. Three seeds.
FULL_MINUTES = {
    **{"fmnist-50c-dir0.1": 560, "fmnist-50c-dir0.3": 280},
    **{"cifar10-50c-dir0.1": 720, "cifar10-50c-dir0.3": 360, "cifar10-50c-pathological": 360},
}
AS_PRINTED = "The baselines have their defaults here; the paper says that theirs are those of the original papers."


def _ablation(data: str, how: str) -> Table:
    vmp, average, per = DEGRADED[how] if data == "cifar10" else (None, None, None)
    entries = (
        Entry("pFedVMP", "pfedvmp", vmp, OF["pFedVMP"][1]),
        Entry("pFedVMP-avg", "pfedvmp", average, OF["pFedVMP-avg"][1]),
        Entry("FedPer", "fedper", per),
        LOCAL,
        Entry("FedAvg-FT", "fedavg-ft"),
    )
    column = f"{data}-50c-{how}"
    ours = "The paper has this table for CIFAR-10 only." if data == "fmnist" else ""
    minutes = 5 * FULL_MINUTES[column]
    words = f"{how}, the ablation"
    return _table(2, column, entries, minutes=minutes, small_minutes=6, words=words, note=ours)


def _widths() -> Table:
    column = "cifar10-50c-dir0.3"
    entries = tuple(
        Entry(f"pFedVMP, {width} features", "pfedvmp", paper, {**OF["pFedVMP"][1], "model": f"cnn:features={width}"})
        for width, paper in WIDTHS.items()
    )
    return _table(
        6,
        column,
        (*entries, LOCAL),
        minutes=6 * FULL_MINUTES[column],
        small_minutes=60,
        words="dir0.3, width of the features",
        small=_without_model(column),
        small_words="20 clients with 4,800 images in all, 60 rounds instead of 1,000",
    )


def _widths_of_mlp() -> Table:
    """Return the width of features where it is cheap: an MLP's hidden layer, at one size only."""
    entries = tuple(
        Entry(f"pFedVMP, {width} features", "pfedvmp", settings={**OF["pFedVMP"][1], "model": f"mlp:hidden={width}"})
        for width in (32, 64, 128, 256)
    )
    settings = {**_without_model("fmnist-50c-dir0.3"), "model": "mlp:hidden=128"}
    return Table(
        title="pFedVMP, table 6: Fashion-MNIST, width of an MLP's features",
        protocol=EXAMPLES,
        settings={"setting": "pfedvmp/fmnist-50c-dir0.3", "validation": 0.05, **settings},
        entries=(*entries, LOCAL),
        minutes=4,
        note="Ours; the paper varies the CNN's features (`pfedvmp-6-cifar10`). 20 clients, 4,200 images, 60 rounds.",
    )


def _without_model(column: str) -> dict[str, Any]:
    return {key: value for key, value in _small(column).items() if key != "model"}


def _strengths(data: str) -> Table:
    column = f"{data}-50c-dir0.3"
    entries = tuple(
        Entry(
            f"pFedVMP, xi1 = {xi1}",
            "pfedvmp",
            paper if data == "cifar10" else None,
            {"xi1": float(xi1), "alpha": 1.0},
        )
        for xi1, paper in STRENGTHS.items()
    )
    minutes, words = 8 * FULL_MINUTES[column], "dir0.3, strength of the penalty"
    return _table(
        7, column, (*entries, LOCAL), minutes=minutes, small_minutes=3 if data == "fmnist" else 10, words=words
    )


def _first(column: str, papers: tuple[float, ...]) -> Table:
    entries = _entries(tuple(label for label, *_ in METHODS), papers)
    minutes, small_minutes = 16 * FULL_MINUTES[column], 10 if column.startswith("fmnist") else 30
    return _table(1, column, entries, minutes=minutes, small_minutes=small_minutes, note=AS_PRINTED)


def _fairness(column: str, papers: tuple[float, ...]) -> Table:
    entries, minutes = _entries(FAIR, papers), 8 * FULL_MINUTES[column]
    return _table(3, column, entries, minutes=minutes, small_minutes=8, words="dir0.3, fairness", protocol=VARIATION)


TABLES: dict[str, Table] = {
    **{f"pfedvmp-1-{column.replace('-50c', '')}": _first(column, papers) for column, papers in COLUMNS.items()},
    "pfedvmp-2-cifar10-dir0.1": _ablation("cifar10", "dir0.1"),
    "pfedvmp-2-cifar10-dir0.3": _ablation("cifar10", "dir0.3"),
    "pfedvmp-2-fmnist": _ablation("fmnist", "dir0.3"),
    **{f"pfedvmp-3-{column.split('-')[0]}": _fairness(column, papers) for column, papers in FAIRNESS.items()},
    "pfedvmp-5": _table(
        5,
        "cifar10-50c-pathological",
        _entries(FAIR, PATHOLOGICAL),
        minutes=8 * FULL_MINUTES["cifar10-50c-pathological"],
        small_minutes=20,
        words="3 classes a client, 100 images of each",
        small={"rounds": 60, "evaluate_every": 5, "model": "lenet", "clients": 20},
        small_words="LeNet instead of the CNN, 20 clients instead of 50, 60 rounds instead of 1,000",
    ),
    "pfedvmp-6-cifar10": _widths(),
    "pfedvmp-6-fmnist-mlp": _widths_of_mlp(),
    "pfedvmp-7-cifar10": _strengths("cifar10"),
    "pfedvmp-7-fmnist": _strengths("fmnist"),
}
