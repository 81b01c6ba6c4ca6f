"""Clients with different models: the same as one run where all models are the same, and each its own where not."""

import itertools

import pytest
import torch
from torch import nn

import coterie
from coterie.compute.compiled import observing, slowest
from coterie.core.errors import ConfigError
from coterie.data import from_clients
from coterie.engine import Engine
from coterie.experiment.mixed import assigned
from coterie.experiment.mixed_simulation import begin
from coterie.experiment.run import run_setup
from coterie.experiment.setup import prepare
from coterie.experiment.several.trials import prepare_trials
from coterie.methods import METHODS
from coterie.storage import files
from coterie.storage.journal import at_once
from coterie.testing.engine_laws import ROUNDING, engines
from coterie.testing.kit import KillAfter, Killed, same, without_times
from tests.marks import compiles

QUICK = {"engine": "stacked", "compile": False, "workers": 1, "report": False, "rounds": 3, "batch_size": 8}
MIXES = [name for name, cls in METHODS.items() if cls.mixes_models]
TWO = ["mlp:hidden=6/4", "mlp:hidden=4"]  # the heads have other names: 5.weight and 3.weight


def data(order=(0, 1, 2, 3, 4)):
    draw = torch.Generator().manual_seed(0)
    named = {}
    for i, size in enumerate((30, 40, 25, 60, 35)):
        x = torch.randn(size, 5, generator=draw)
        named[f"site-{i}"] = (x, (x[:, 0] + 0.5 * x[:, i % 3] > 0).long() + (x[:, 1] > 1).long())
    return from_clients({f"site-{i}": named[f"site-{i}"] for i in order}, num_classes=3)


def run(method, models, clients=None, **settings):
    return coterie.run(method, clients or data(), models=models, **{**QUICK, "lr": 0.2, "reference": False, **settings})


def test_the_methods_that_can_are_these():
    assert sorted(MIXES) == ["fedproto", "lg-fedavg", "local"]


@pytest.mark.parametrize("method", MIXES)
def test_two_groups_of_the_same_architecture_are_the_ordinary_run(method):
    """A name with other words is another name, so there are two objects, and one group; two groups are forced."""
    from coterie.experiment import mixed

    def apart(tasks, models, method):
        first = tuple(i for i in range(len(tasks)) if i % 2 == 0)
        rest = tuple(i for i in range(len(tasks)) if i % 2)
        names = {name: name for name in tasks[0].head_names}
        return mixed.Mixed(
            tuple(mixed.Group("mlp", tasks[0], ids, (tasks[0].init(),) * len(ids), names) for ids in (first, rest))
        )

    how = {**QUICK, "lr": 0.2, "clients_per_round": 3, "model": "mlp:hidden=4"}
    whole = prepare(method, data(), **how)
    setup = prepare(method, data(), **{**how, "model": None}, models=["mlp:hidden=4"])
    assert len(setup.mixed.groups) == 1
    forced = coterie.experiment.setup.dataclasses.replace(setup, mixed=apart([setup.task] * 5, None, None))
    one, two = run_setup(whole, None), run_setup(forced, None)
    assert [row["participants"] for row in one.rounds] == [row["participants"] for row in two.rounds]
    assert [row["bytes_up"] + row["bytes_down"] for row in one.rounds] == [
        row["bytes_up"] + row["bytes_down"] for row in two.rounds
    ]
    for i in range(5):
        same(one.view(i), two.view(i), "one group and two", 1e-5)
    torch.testing.assert_close(one.predictions.outputs, two.predictions.outputs, rtol=1e-4, atol=1e-5)
    assert one.reference is None or one.reference.mean() == pytest.approx(two.reference.mean(), abs=1e-6)


@pytest.mark.parametrize("method", MIXES)
def test_relabelling_the_clients_relabels_the_results(method):
    models = {f"site-{i}": TWO[i % 2] for i in range(5)}
    one, other = run(method, models), run(method, models, data((3, 1, 4, 0, 2)))
    for name in models:
        same(one.view(name), other.view(name), name, 1e-5)


@pytest.mark.parametrize("method", MIXES)
def test_a_resumed_run_is_the_same_bit_for_bit(method, tmp_path):
    setup = prepare(method, data(), models=TWO, lr=0.2, reference=False, clients_per_round=3, **QUICK)
    with at_once():
        whole = run_setup(setup, tmp_path / "whole")
        with pytest.raises(Killed):
            run_setup(setup, tmp_path / "killed", progress=KillAfter(2))
        resumed = run_setup(setup, tmp_path / "killed", resuming=True)
    assert without_times(whole.rounds) == without_times(resumed.rounds)
    for i in range(5):
        same(whole.view(i), resumed.view(i), "a resumed run", 0)


@pytest.mark.parametrize("engine", [Engine("loop"), Engine("stacked", workers=2, chunk=1)])
def test_engines_agree(engine):
    how = {"engine": engine.kind, "workers": engine.workers}
    same(run("fedproto", TWO).predictions, run("fedproto", TWO, **how).predictions, "engines", 1e-4)


def test_what_is_shared_reaches_all_architectures():
    result = run("lg-fedavg", TWO)
    deep, flat = (result.view(i) for i in (0, 1))
    assert torch.equal(deep["5.weight"], flat["3.weight"])  # the head, under each network's own name
    assert deep["1.weight"].shape != flat["1.weight"].shape
    same({"head": deep["5.bias"]}, {"head": result.view(4)["5.bias"]}, "heads", 0)
    prototypes = [run("fedproto", TWO).view(i).prototypes for i in (0, 1)]
    same(*prototypes, "prototypes", 0)


def test_the_run_folder_knows_every_clients_model(tmp_path):
    out = tmp_path / "run"
    result = run("fedproto", TWO, out=out, reference=True, report=True, take_home="best", take_home_folds=0)
    abouts = [files.read_json(out / "clients" / f"site-{i}" / "model.json")["model"] for i in range(5)]
    assert abouts == [TWO[i % 2] for i in range(5)]
    x = torch.randn(4, 5)
    for name in ("site-0", "site-1"):
        torch.testing.assert_close(coterie.load(out, name)(x), result.model(name)(x))
        path = coterie.export(out, name, "torch", tmp_path / f"{name}.pt2")
        torch.testing.assert_close(torch.export.load(path).module()(x), coterie.load(out, name)(x))
    assert "<html" in (out / "report.html").read_text()[:200]
    assert coterie.resume(out, data=data()).mean() == result.mean()
    with pytest.raises(ConfigError, match="clients with different models"):
        coterie.onboard(out, (torch.randn(20, 5), torch.arange(20) % 3), name="new")


def test_models_of_ones_own_by_name_or_function(tmp_path):
    def net(*hidden):
        torch.manual_seed(0)
        widths = [5, *hidden]
        layers = [m for a, b in itertools.pairwise(widths) for m in (nn.Linear(a, b), nn.Tanh())]
        return nn.Sequential(*layers, nn.Linear(widths[-1], 3))

    big, small = net(7, 4), net(4)
    chosen = {f"site-{i}": big if i < 2 else small for i in range(5)}
    by_name = run("fedproto", chosen, out=tmp_path / "run")
    by_function = run("fedproto", lambda client: net(7, 4) if client in ("site-0", "site-1") else net(4))
    for i in range(5):
        same(by_name.view(i), by_function.view(i), "by name and by function", 0)
    assert len(by_function.mixed.groups) == 2
    with pytest.raises(ConfigError, match="models came from Python"):
        coterie.resume(tmp_path / "run", data=data())
    assert coterie.resume(tmp_path / "run", data=data(), models=chosen).mean() == by_name.mean()
    x = torch.randn(2, 5)
    torch.testing.assert_close(coterie.load(tmp_path / "run", "site-4", model=small)(x), by_name.model("site-4")(x))


def test_a_callback_sees_every_clients_own_model():
    seen = {}

    def look(run):
        shown = {client: run.model(client)(run.examples(client)[0]) for client in run.clients}
        seen[run.round] = {client: outputs.argmax(1) for client, outputs in shown.items()}

    for method in MIXES:
        result = run(method, TWO, callbacks=[look], rounds=1)
        for i, client in enumerate(result.names):
            x = data().x[data().split(i)["validation"]]
            assert torch.equal(seen[1][client], result.model(client)(x).argmax(1)), (method, client)


def test_words_name_a_model_for_every_client():
    names = ["north-1", "north-2", "south-1", "south-2"]
    assert assigned(["mlp", "cnn"], names) == ["mlp", "cnn", "mlp", "cnn"]
    assert assigned(["south-*=mlp:hidden=5", "linear", "cnn"], names) == ["linear", "cnn", *["mlp:hidden=5"] * 2]
    with pytest.raises(ConfigError, match=r"no client is called east(.|\n)*nothing is said of north-2"):
        assigned(["north-1=mlp", "east=mlp", "south-*=mlp"], names)


def test_what_cannot_be_is_refused_in_words():
    with pytest.raises(ConfigError, match=r"FedAvg shares more of a model than its head(.|\n)*lg-fedavg"):
        run("fedavg", TWO)
    with pytest.raises(ConfigError, match="mlp:hidden=5 has 5, mlp:hidden=6/4 has 4 features"):
        run("fedproto", ["mlp:hidden=6/4", "mlp:hidden=5"])
    with pytest.raises(ConfigError, match="model or models, not both"):
        run("local", TWO, model="mlp")
    with pytest.raises(ConfigError, match="need a server"):
        run("lg-fedavg", TWO, topology="ring")
    with pytest.raises(ConfigError, match="for a run alone"):
        coterie.attack("sign-flip", 1, "fedproto", data(), models=TWO, rounds=1)
    assert run("local", ["mlp:hidden=6/4", "mlp:hidden=5"]).mean() > 0
    other, quick = {"models": ["mlp:hidden=6/4", "mlp:hidden=5"]}, {key: QUICK[key] for key in ("rounds", "report")}
    with pytest.raises(ConfigError, match="has 5, "):
        prepare_trials(["local", "lg-fedavg"], 1, data(), **other, **quick)
    with pytest.raises(ConfigError, match="FedAvg shares more"):
        prepare_trials(["local", "fedavg"], 1, data(), models=TWO, **quick)
    for search in (coterie.tune, lambda methods, data, **how: coterie.recommend(data, methods, **how)):
        with pytest.raises(ConfigError, match="for a run alone"):
            search(["local", "lg-fedavg"], data(), models=TWO, trials=1, **quick)


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("method", MIXES)
def test_every_engine_agrees(method):
    """Each group has steps of its own, which are compiled and repeated by C++."""
    setup = prepare(method, data(), models=TWO, **{**QUICK, "lr": 0.2, "clients_per_round": 4})

    def outcome(engine):
        sim = begin(setup, None)
        for number in (1, 2):
            sim.train(number, engine)
        return sim.state, [sim.view_of(i, 2, engine) for i in range(5)], sim.predictions(2, engine).outputs

    base = outcome(Engine("loop"))
    with observing() as seen:
        for name, engine in engines():
            same(base, outcome(engine), f"{name} and one client at a time differ", ROUNDING)
    assert slowest(seen).path == "replayed"
