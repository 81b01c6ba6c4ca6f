"""Figures with an experiment of their own, since they need models, messages or inputs."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.core.tree import Params, Tree
from coterie.data.readers.embedded import SINE_NOISE, sine_pieces
from coterie.experiment.reproduce.figures.from_results import weight_panels
from coterie.experiment.reproduce.figures.panels import Drawing, Panel, bubbles, drawing, heatmap, lines, points
from coterie.experiment.reproduce.figures.watching import watch_rounds
from coterie.experiment.reproduce.names import find_table
from coterie.experiment.reproduce.tables import Size
from coterie.experiment.run import run_setup
from coterie.experiment.setup import prepare
from coterie.experiment.simulation import Simulation
from coterie.report.tsne import tsne
from coterie.storage import files

INPUTS_EACH = 60
FEATURES_MOST = 600
COHERENT = 20  # clients whose steps a coherence is of
STRATEGIES = {"none (pFedMe)": "none", "lg": "lg", "meg": "meg", "mh": "mh"}


def settings_of(table: str, label: str, size: Size) -> tuple[str, dict[str, Any]]:
    """Return the method and the settings of a table's row, with the first seed."""
    found = find_table(table)
    entry = next(each for each in found.entries if each.label == label)
    return entry.method, {**found.settings_of(entry, size if size in found.sizes() else "full"), "seed": 0}


def inputs(size: Size) -> Drawing:
    """FedMAP's figures 4 and 5: inputs by client, and by class."""
    panels = []
    for data in (
        "synthetic-only-label-skew",
        "synthetic-feature-skew",
        "synthetic-quantity-skew",
        "synthetic-label-skew",
    ):
        federation = prepare("local", data, seed=0, reference=False).federation
        chosen = [federation.split(i).train[:INPUTS_EACH] for i in range(len(federation.names))]
        index = torch.from_numpy(np.concatenate(chosen))
        at = tsne(federation.x[index].numpy())
        client = np.repeat(np.arange(len(chosen)), [len(each) for each in chosen])
        title = data.removeprefix("synthetic-").replace("only-label-skew", "one feature space")
        panels.append(_groups(f"{title}, by client", at, client, [f"client {i + 1}" for i in range(len(chosen))]))
        if data == "synthetic-label-skew":
            panels.append(_groups(f"{title}, by class", at, federation.y[index].numpy(), ["class 0", "class 1"]))
    return drawing("FedMAP, figures 4 and 5: inputs in two dimensions", panels)


def _groups(title: str, at: np.ndarray, group: np.ndarray, names: Sequence[str]) -> Panel:
    each = {name: (at[group == k, 0].tolist(), at[group == k, 1].tolist()) for k, name in enumerate(names)}
    return points(title, "", "", {name: pair for name, pair in each.items() if pair[0]})


def features(size: Size) -> Drawing:
    """pFedVMP's figure 2: features of test examples before the head, by class."""
    panels = []
    table = "pfedvmp-1-fmnist-dir0.3" if size == "small" else "pfedvmp-1-cifar10-dir0.3"
    for label in ("FedPer", "GPFL", "FedPAC", "pFedVMP"):
        method, settings = settings_of(table, label, size)
        with tempfile.TemporaryDirectory(prefix="coterie-figure-") as folder:
            setup = prepare(method, **{**settings, "reference": False, "report": False})
            result = run_setup(setup, Path(folder) / "run", report=False)
            kept = files.read_tensors(Path(folder) / "run" / "features.safetensors")
        z, y = kept["features"].numpy()[:FEATURES_MOST], kept["label"].numpy()[:FEATURES_MOST]
        accuracy = 100 * result.mean("accuracy", weighted=True)
        panels.append(_groups(f"{label}: {accuracy:.1f} %", tsne(z), y, [str(k) for k in range(int(y.max()) + 1)]))
    return drawing("pFedVMP, figure 2: features in two dimensions, by class", panels, 4)


def divisions(size: Size) -> Drawing:
    """pFedVMP's figure 4: how many examples of each class the clients have."""
    panels = []
    for partition in ("dirichlet:0.1:share=0.5", "dirichlet:0.3:share=0.25"):
        how: dict[str, Any] = {"partition": partition, "clients": 50, "reference": False}
        federation = prepare("local", "fashion-mnist", seed=0, model="linear", **how).federation
        counts = np.zeros((10, len(federation.names)))
        for i in range(len(federation.names)):
            split = federation.split(i)
            own = np.concatenate([split.train, split.validation, split.test])
            counts[:, i] = np.bincount(federation.y[torch.from_numpy(own)].numpy(), minlength=10)
        panels.append(bubbles(f"Fashion-MNIST, {partition.split(':share')[0]}", "client", "class", counts.tolist()))
    return drawing("pFedVMP, figure 4: how classes are divided among clients", panels, 2)


def sine(size: Size) -> Drawing:
    """FedeRiCo's figure 1: points, lines of FedAvg and FedeRiCo, and the weights of who uses whose line."""
    schedule: dict[str, Any] = {"model": "linear", "rounds": 8, "local_epochs": 40, "batch_size": 24, "test": 0.5}
    schedule |= {"optimizer": "sgd", "lr": 0.3, "momentum": 0.9, "validation": 0.2, "reference": False}
    seven = 7  # of a client's 24 points are for training; a mean squared error counts so much in the true likelihood
    own: dict[str, Any] = {"mode": "all-to-all", "local_work": "epochs", "temperature": seven / (2 * SINE_NOISE**2)}
    federico = run_setup(prepare("federico", sine_pieces(), **own, **schedule), None)
    fedavg = run_setup(prepare("fedavg", sine_pieces(), **schedule), None)
    dots, curves = {}, {}
    for i, (x, y) in enumerate(sine_pieces()):
        ends = torch.stack([x.min(), x.max()])[:, None]
        dots[f"client {i}"] = (x[:, 0].tolist(), y.tolist())
        curves[f"client {i}"] = (ends[:, 0].tolist(), federico.model(i)(ends).detach()[:, 0].tolist())
    ends = torch.tensor([[-1.0], [1.0]])
    shared = {"FedAvg": (ends[:, 0].tolist(), fedavg.model(0)(ends).detach()[:, 0].tolist())}
    weights = federico.rounds[-1]["server"]["collaboration"]
    panels = [
        points(f"FedeRiCo, RMSE {federico.mean():.3f}", "x", "y", dots, curves),
        points(f"FedAvg, RMSE {fedavg.mean():.3f}", "x", "y", {"all": _joined(dots)}, shared),
        heatmap("whose lines client i uses", "j", "client i", weights),
    ]
    return drawing("FedeRiCo, figure 1: a sine curve in pieces", panels)


def _joined(dots: dict[str, tuple[list[float], list[float]]]) -> tuple[list[float], list[float]]:
    return [v for x, _ in dots.values() for v in x], [v for _, y in dots.values() for v in y]


def components(size: Size) -> Drawing:
    """FedeRiCo's figure 4: each client's weights of FedEM's components over rounds."""
    method, settings = settings_of("federico-1-cifar10-4", "FedEM, 4 components", size)
    found: dict[int, list[list[float]]] = {}

    def seen(round: int, sim: Simulation) -> None:
        found[round] = _rows(sim.state.clients).tolist()

    watch_rounds(method, settings, seen=seen)
    values = np.array(list(found.values()))
    panels = [
        lines(
            *(f"client {i}", "round", "weight"),
            {f"component {m}": (list(map(float, found)), values[:, i, m].tolist()) for m in range(values.shape[2])},
            legend=i == 0,
        )
        for i in range(values.shape[1])
    ]
    return drawing("FedeRiCo, figure 4: FedEM's weights of its components", panels, 4)


def _rows(clients: Any) -> Tensor:
    assert isinstance(clients, Tensor)
    return clients


def tracking(size: Size) -> Drawing:
    """FedeRiCo's figure 5: weights of the first two clients with accumulated losses (epsilon = 1) and the average."""
    panels: list[Panel] = []
    ways: dict[str, dict[str, Any]] = {
        "accumulated": {"loss_tracking": "sum", "epsilon": 1.0},
        "moving average": {"loss_tracking": "ema"},
    }
    for words, hyper in ways.items():
        method, settings = settings_of("federico-1-cifar10-2", "FedeRiCo", size)
        settings = {**settings, "hyper": {**settings["hyper"], **hyper}}
        found: dict[str, list[list[float]]] = {}

        def seen(round: int, sim: Simulation, found: dict[str, list[list[float]]] = found) -> None:
            found[str(round)] = sim.method.server_info(sim.state.server)["collaboration"].tolist()

        watch_rounds(method, settings, seen=seen)
        panels += weight_panels(found, f"{words}, ")[:4]
    return drawing("FedeRiCo, figure 5: weights by accumulated losses and by a moving average", panels, 4)


def coherence(size: Size) -> Drawing:
    """pFedBreD's figure 2: the coherence of the clients' steps, for each strategy."""
    curves = {}
    for words, strategy in STRATEGIES.items():
        method, settings = settings_of("pfedbred-fmnist-mclr", "mh -P", size)
        found: dict[float, float] = {}

        def heard(round: int, down: Tree, ups: Any, found: dict[float, float] = found) -> None:
            found[float(round)] = gce(_steps(down, ups.trained))

        watch_rounds(method, {**settings, "strategy": strategy}, heard=heard)
        curves[words] = (list(found), _smooth(list(found.values())))
    panel = lines("Fashion-MNIST, MCLR", "round", "GCE of 20 clients", curves)
    return drawing("pFedBreD, figure 2: coherence of the clients' steps", [panel])


def _steps(down: Params, trained: Params) -> Tensor:
    """Return how far each client's w went in the round, [clients, parameters]."""
    return torch.cat([(trained[name] - down[name]).flatten(1) for name in trained], 1)


def gce(vectors: Tensor, number: int = COHERENT) -> float:
    """Return 1 - det(G)^(1/n) for the Gram matrix G of n normalised vectors, evenly taken from all.

    1 - det(G) itself is 1 to rounding for many vectors. The n-th root, of the mean eigenvalue in a geometric sense, is
    in the same order: 0 if all are orthogonal, 1 if they are linearly dependent.
    """
    some = vectors[torch.linspace(0, len(vectors) - 1, min(number, len(vectors))).long()].double()
    unit = some / some.norm(dim=1, keepdim=True).clamp_min(1e-30)
    values = torch.linalg.eigvalsh(unit @ unit.T).clamp_min(1e-12)
    return float(1 - values.log().mean().exp())


def _smooth(values: list[float]) -> list[float]:
    """Smooth as the paper does, by Savitzky and Golay's filter."""
    from scipy.signal import savgol_filter  # here, since importing it takes a while

    wide = min(11, len(values) - 1 + len(values) % 2)
    return savgol_filter(values, wide, 3).tolist() if wide > 3 else values


def loss_deviation(size: Size) -> Drawing:
    """pFedBreD's figure 3: the first client's loss of each class less the mean over clients, over rounds.

    Locally, a client's loss is over its own test examples, and 0 for classes that it has not; globally, over those of
    all clients.
    """
    panels = []
    for words, where in (("global test", "global"), ("local test", "local")):
        curves = {}
        for label in ("pFedMe -P", "mh -P"):
            method, settings = settings_of("pfedbred-fmnist-mclr", label, size)
            found = _deviations(method, settings, where)
            for k in (0, 1, 5):
                name = f"{label.split()[0]}, class {k}{'' if k < 2 else ' (not its own)'}"
                curves[name] = (list(found), [row[k] for row in found.values()])
        panels.append(lines(words, "round", "loss less the mean", curves))
    return drawing("pFedBreD, figure 3: the first client's loss of each class", panels)


def _deviations(method: str, settings: dict[str, Any], where: str) -> dict[float, list[float]]:
    found: dict[float, list[float]] = {}
    every = int(settings["rounds"]) // 20

    def seen(round: int, sim: Simulation) -> None:
        if round % max(1, every) == 0:
            losses = class_losses(sim, where)
            found[float(round)] = (losses[0] - losses.mean(0)).tolist()

    watch_rounds(method, settings, seen=seen)
    return found


def class_losses(sim: Simulation, where: str) -> np.ndarray:
    """Return each client's loss of each class, [clients, classes]: over its own or over all clients' test examples."""
    federation, classes = sim.federation, sim.federation.num_classes or 0
    tests = [torch.from_numpy(federation.split(i).test) for i in range(len(federation.names))]
    pool = torch.cat(tests)[:: max(1, sum(map(len, tests)) // 2000)]
    losses = np.zeros((len(tests), classes))
    for i, view in enumerate(sim.views_at_hand(1)):
        index = pool if where == "global" else tests[i]
        y = federation.y[index]
        with torch.no_grad():
            each = sim.task.output_losses(sim.method.predict(sim.task, view, federation.x[index]), y).double()
        total = torch.bincount(y, each, minlength=classes)
        count = torch.bincount(y, minlength=classes) if where == "global" else torch.tensor(len(y))
        losses[i] = (total / count.clamp_min(1)).numpy()
    return losses
