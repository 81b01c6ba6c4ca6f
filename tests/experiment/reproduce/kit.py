"""Small tables and results made by hand."""

from coterie.experiment.reproduce.tables import Entry, Protocol, Table

PLAIN = {"engine": "loop", "compile": False, "workers": 1}
BALANCED = Protocol("balanced accuracy after the last round", "balanced_accuracy", "last")


def small_table(**others):
    """A table of two methods and local training on the digits, so small that it runs in a second."""
    values = {
        "title": "A paper, table 1: digits",
        "protocol": BALANCED,
        "settings": {"data": "digits", "rounds": 2, **PLAIN},
        "entries": (
            Entry("Alone, 1 round", "local", 40.0, {"rounds": 1}),
            Entry("Alone, as long", "local", 50.0, sd=0.5, clients=tuple(range(10))),
            Entry("FedProx", "fedprox", None, {"mu": 0.1}),
            Entry("FedAvg", "fedavg", 60.0),
            Entry("FedAvg again", "fedavg", 61.0),
        ),
        "seeds": 2,
        "minutes": 1.0,
    }
    return Table(**{**values, **others})


def record(rounds, *, sizes=(10, 30), selected=1, part="test", **others):
    """A result: {round: the clients' accuracies}."""
    rows = [
        {"round": k, "validation": 0.0, part: {"accuracy": list(row), "balanced_accuracy": list(row)}}
        for k, row in rounds.items()
    ]
    if part != "test":
        rows = [
            {**row, "test": {"accuracy": [0.0] * len(sizes), "balanced_accuracy": [0.0] * len(sizes)}} for row in rows
        ]
    clients = [{"client": str(i), "train": 1, "validation": 1, "test": size} for i, size in enumerate(sizes)]
    common = {"key": "k", "date": "2026-01-01", "seconds": 1.0, "bytes": [1e6, 3e6], "collaboration": {}}
    return {**common, "clients": clients, "rounds": rows, "selected": selected, **others}
