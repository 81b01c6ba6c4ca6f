import xml.etree.ElementTree as ET

import numpy as np
import pytest
import torch

from coterie.experiment.reproduce.cache import Cache
from coterie.experiment.reproduce.figures import experiments, from_results, panels, regression
from coterie.experiment.reproduce.figures.catalogue import FIGURES
from coterie.experiment.reproduce.figures.making import made_file, make, sizes_of
from coterie.experiment.reproduce.figures.svg import draw
from coterie.experiment.reproduce.figures.watching import watch_rounds
from coterie.experiment.reproduce.papers import TABLES

from .kit import PLAIN, record

QUICK = {"data": "digits", "rounds": 2, **PLAIN}


def test_every_kind_of_panel_is_drawn():
    curve = {"a < b": ([1, 2], [0.5, float("nan")]), "c": ([1, 2], [0.1, 0.2])}
    each = [
        panels.lines("l", "x", "y", curve),
        panels.points("p", "x", "y", curve, curve, legend=True),
        panels.strips("s", "x", {"a": [1.0, 2.0], "b": [3.0]}),
        panels.heatmap("h", "x", "y", [[0.0, 1.0], [0.5, 0.2]]),
        panels.bubbles("b", "x", "y", [[0.0, 4.0]]),
    ]
    root = ET.fromstring(draw(panels.drawing("A & B", each, 2)))
    kinds = [element.tag.split("}")[1] for element in root.iter()]
    assert kinds.count("g") == 5
    assert "nan" not in ET.tostring(root, encoding="unicode")
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert {"A & B", "a < b", "l", "p", "s", "h", "b"} <= set(texts)


def test_the_minima_of_fedmaps_regression():
    """F's line is that of all points together; the gradient of M vanishes; its slope is near -1, as the paper's is."""
    train, test = regression.clients()
    x, y = (np.concatenate(part) for part in zip(*train, strict=True))
    a, b = regression.minimise_f(train)
    assert [a, b] == pytest.approx(np.polyfit(x, y, 1))
    assert a > 0
    prior = regression.minimise_m(train)
    assert prior.mu[0] == pytest.approx(-1, abs=0.3)
    assert prior.strength[0] > 5 * prior.strength[1]
    weight = np.array([len(each.x) for each in train]) / len(x)

    def value(mu):
        at = np.concatenate([mu, 1 / prior.strength - 1])
        each = [regression.envelope(client, regression.Prior(mu, prior.strength)) for client in train]
        return weight @ each + regression.EPSILON * np.sum(at**2)

    for step in (np.array([1e-3, 0]), np.array([0, 1e-3])):
        assert abs(value(prior.mu + step) - value(prior.mu - step)) / 2e-3 < 1e-2
    own = regression.own_line(train[1], prior)  # of one point: the pull decides
    objective = lambda line: (  # noqa: E731
        np.mean((line[0] * train[1].x + line[1] - train[1].y) ** 2)
        + 0.5 * np.sum(prior.strength * (line - prior.mu) ** 2)
    )
    assert all(objective(own) <= objective(own + step) for step in np.eye(2) * 0.01)
    assert np.mean([regression.rmse(regression.own_line(c, prior), t) for c, t in zip(train, test, strict=True)]) < 1.5


def test_coherence_is_0_for_orthogonal_steps_and_1_for_equal_ones():
    assert experiments.gce(3 * torch.eye(5)) == pytest.approx(0, abs=1e-9)
    assert experiments.gce(torch.ones(5, 7)) > 0.99
    pair = torch.tensor([[1.0, 0.0], [0.6, 0.8]])  # det = 1 - 0.36
    assert experiments.gce(pair) == pytest.approx(1 - np.sqrt(0.64))


def test_rounds_are_watched():
    heard, seen = [], []
    setup, sim, _ = watch_rounds(
        "pfedme", QUICK, seen=lambda k, sim: seen.append(k), heard=lambda k, down, ups: heard.append((k, down, ups))
    )
    assert seen == [1, 2] == [k for k, *_ in heard]
    steps = experiments._steps(heard[0][1], heard[0][2].trained)
    assert steps.shape == (10, sum(leaf.numel() for leaf in setup.task.init().values()))
    losses = experiments.class_losses(sim, "local")
    own = {int(v) for v in sim.federation.y[torch.from_numpy(sim.federation.split(0).test)]}
    assert {int(k) for k in np.flatnonzero(losses[0])} == own  # 0 for classes that it has not
    assert (experiments.class_losses(sim, "global") > 0).all()


def test_figures_from_results_are_drawn_of_what_is_there(tmp_path, monkeypatch):
    cache = Cache(tmp_path)
    assert make("fedmap-figure-1", "full", cache) is None
    weights = {"1": [[0.5, 0.5], [0.2, 0.8]], "2": [[0.9, 0.1], [0.1, 0.9]]}
    found = record({1: (0.2, 0.4), 2: (0.5, 0.7)}, collaboration=weights)
    monkeypatch.setattr(from_results, "results", lambda *_: Always(dict.fromkeys(range(3), found)))
    for name, figure in FIGURES.items():
        if figure.drawn is not None:
            made = make(name, "full", cache)
            assert made is not None, name
            ET.parse(made_file(cache, name, "full").with_suffix(".svg"))


class Always(dict):
    """The same results for every row."""

    def __init__(self, of):
        super().__init__({"FedAMP": of, "FedeRiCo, beta = 0.1": of})
        self.of = of

    def __missing__(self, label):
        return self.of


def test_figures_name_tables_that_there_are():
    for name, figure in FIGURES.items():
        assert set(figure.tables) <= set(TABLES), name
        assert (figure.drawn is None) != (figure.experiment is None), name
        assert bool(figure.minutes) == (figure.experiment is not None), name
        assert sizes_of(figure)


def test_an_experiment_is_made_once(tmp_path, monkeypatch):
    cache = Cache(tmp_path)
    first = make("fedmap-figure-2", "full", cache)
    monkeypatch.setattr(regression, "clients", lambda *_: pytest.fail("made it again"))
    assert make("fedmap-figure-2", "full", cache)["drawing"] == first["drawing"]


@pytest.mark.slow
def test_experiments_make_their_figures(monkeypatch):
    """Every experiment, as small as it can be; those on images are made of digits."""
    small = {**QUICK, "evaluate_every": 1}
    rows = {("federico-1-cifar10-4", "FedEM, 4 components"): ("fedem", {"components": 4})}
    rows |= {("federico-1-cifar10-2", "FedeRiCo"): ("federico", {"hyper": {"neighbours": 2}})}
    rows |= {("pfedbred-fmnist-mclr", label): ("pfedbred", {}) for label in ("mh -P", "pFedMe -P")}
    rows |= {
        ("pfedvmp-1-fmnist-dir0.3", label): (label.lower(), {}) for label in ("FedPer", "GPFL", "FedPAC", "pFedVMP")
    }

    def settings_of(table, label, size):
        method, more = rows[table, label]
        return method, {**small, **more, "seed": 0}

    monkeypatch.setattr(experiments, "settings_of", settings_of)
    for made in (
        *(
            experiments.inputs("full"),
            experiments.sine("full"),
            experiments.features("small"),
            experiments.components("small"),
        ),
        *(experiments.tracking("small"), experiments.coherence("small"), experiments.loss_deviation("small")),
    ):
        ET.fromstring(draw(made))
        assert made["panels"]
