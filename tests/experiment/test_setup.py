"""Runs of every kind of target: federation helps where it should, and what follows a run works or refuses in words."""

import csv
import io

import numpy as np
import pytest
import torch

import coterie
from coterie.core.errors import ConfigError, CoterieError, DataError
from coterie.core.targets import Cox, Labels, Ordered, Survival
from coterie.data.federation import from_clients
from coterie.data.sources import SOURCES
from coterie.experiment.take_home.predict import predict
from coterie.methods import METHODS
from tests.experiment.conftest import QUICK

WARDS = ("complications", "severity", "survival-times", "wards")
PLAIN = {"engine": "stacked", "compile": False, "workers": 1}
NEED_CLASSES = ("pfedvmp", "fedproto", "fedpac", "fedrod", "gpfl", "pfedgp")


@pytest.fixture(scope="module")
def ward(tmp_path_factory):
    """ward(data): a run of FedAvg on one of the generated federations, in a folder."""
    runs = {}

    def make(data):
        if data not in runs:
            out = tmp_path_factory.mktemp(data) / "run"
            runs[data] = coterie.run(
                "fedavg", data, rounds=6, lr=0.03, out=out, report=False, evaluate_every=3, **PLAIN
            )
        return runs[data]

    return make


@pytest.mark.parametrize("data", WARDS)
def test_federation_helps_wards_that_are_too_small_alone(ward, data):
    result = ward(data)
    benefit = result.benefit()
    assert benefit.overall["low"] > 0, "they share the truth"
    assert benefit.overall["loses"] == 0
    smallest = benefit.clients[0]
    assert smallest["client"] == "north"
    assert smallest["verdict"] == "gains"


def test_the_truth_is_what_the_generators_say():
    """A model that knows the directions finds what there is to find."""
    made = SOURCES["survival-times"].load("survival-times", 0, 0.1, 0.3)
    from coterie.data.readers.wards import directions
    from coterie.evaluation.kinds.survival import concordance

    z = made.x.double().numpy() @ directions("survival-times", 0)
    assert concordance(z[:, 0], made.y.numpy()) > 0.8
    assert 0.4 < concordance(z[:, 1] - z[:, 0] * (z[:, 1] @ z[:, 0]) / (z[:, 0] @ z[:, 0]), made.y.numpy()) < 0.6
    several = SOURCES["wards"].load("wards", 0, 0.1, 0.3).y.numpy()
    missing = np.isnan(several)
    assert 0.25 < missing.mean() < 0.32
    assert not missing.all(1).any()
    days = ~missing[:, 1]
    z = SOURCES["wards"].load("wards", 0, 0.1, 0.3).x.double().numpy() @ directions("wards", 0)
    assert np.std(several[days, 1] - 2 - z[days, 1]) == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize("data", WARDS)
def test_what_a_run_wrote_predicts_as_it_measured(ward, data, tmp_path):
    result = ward(data)
    federation = SOURCES[data].load(data, 0, 0.1, 0.3)
    own = federation.split(0).test[:20]
    np.save(tmp_path / "x.npy", federation.x[own].numpy())
    name, text = predict(result.path, "north", tmp_path / "x.npy")
    header, *rows = list(csv.reader(io.StringIO(text)))
    outputs = result.predictions.of(0).outputs[:20]
    loaded = coterie.load(result.path, "north")(federation.x[own])
    torch.testing.assert_close(loaded, outputs, atol=1e-5, rtol=1e-4)
    expected = federation.target.table(outputs, list(federation.classes))
    assert (name, header, len(rows)) == ("north", expected[0], 20)
    numeric = [k for k, cell in enumerate(rows[0]) if cell.replace(".", "").replace("e-", "").isdigit()]
    assert numeric
    for k in numeric:
        values, known = ([float(row[k]) for row in table] for table in (rows, expected[1]))
        np.testing.assert_allclose(values, known, rtol=1e-3, atol=1e-5)


def test_exported_models_give_probabilities_of_labels(ward, tmp_path):
    result = ward("complications")
    path = coterie.export(result.path, "east", "torch", tmp_path / "east.pt2", probabilities=True)
    x = torch.randn(3, 10)
    found = torch.export.load(path).module()(x)
    torch.testing.assert_close(found, torch.sigmoid(result.model("east")(x)), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("data", ["complications", "survival-times"])
def test_a_newcomer_joins_with_targets_of_the_runs_kind(ward, data, tmp_path):
    federation = SOURCES[data].load(data, 1, 0.1, 0.3)
    own = federation.split(2)
    x, y = federation.x[own.train], federation.y[own.train]
    np.savez(tmp_path / "new.npz", x=x.numpy(), y=y.numpy())
    joined = coterie.onboard(ward(data).path, tmp_path / "new.npz")
    assert joined.clients[0]["verdict"] in ("gains", "loses", "undecided")
    np.savez(tmp_path / "bad.npz", x=x.numpy(), y=y[:, 0].numpy())
    with pytest.raises(DataError, match=r"y has the shape \(rows, "):
        coterie.onboard(ward(data).path, tmp_path / "bad.npz")


@pytest.mark.parametrize(
    "method", ["ditto", "fedmap", "fedamp", "pfedme", "apfl", "federico", "fedem", "per-fedavg", "fedrep"]
)
def test_generic_methods_train_several_targets(method):
    how = {**PLAIN, "rounds": 1, "local_steps": 2, "reference": False, "report": False}
    result = coterie.run(method, "wards", **how)
    values = [row["test_loss"] for row in result.clients]
    assert np.isfinite(values).all()
    assert np.isfinite(result.mean("severity.mae"))


@pytest.mark.parametrize("method", NEED_CLASSES)
def test_methods_that_need_classes_say_so(method):
    with pytest.raises(CoterieError, match=r"with several targets.*needs a classification"):
        coterie.run(method, "wards", rounds=1, **PLAIN)
    assert method in METHODS


@pytest.mark.parametrize(
    ("data", "settings", "words"),
    [
        ("survival-times", {"class_weights": "balanced"}, "a survival task, which has no classes to weight"),
        ("complications", {"references": True}, "one class or one number, and this is a task with several labels"),
        ("severity", {"threshold": "accuracy"}, "threshold: it is for a classification"),
        ("severity", {"calibrate": True, "reference": True}, "calibrate: it is for a classification"),
        ("survival-times", {"task": "cox", "take_home": "best"}, "losses of single examples"),
        ("survival-times", {"task": "cox", "privacy": "record", "noise": 1.0}, "no gradient of its own to clip"),
        ("survival-times", {"select": "auroc"}, "a survival task has concordance, loss"),
        ("severity", {"loss": "focal"}, "it has only its own"),
        ("severity", {"horizons": [1.0, 2.0]}, "horizons are for task = 'survival'"),
        ("digits", {"task": "survival"}, "a time and an event for each example"),
        ("hospitals", {"task": "multitask"}, "target=coterie.targets.Several"),
        ("wards", {"task": "regression"}, "wards is a task with several targets"),
    ],
)
def test_what_does_not_suit_a_task_is_refused_in_words(data, settings, words):
    with pytest.raises(ConfigError, match=words):
        coterie.prepare("fedavg", data, **settings)


def test_targets_of_another_shape_than_declared_are_refused():
    federation = from_clients({f"site-{i}": (torch.randn(20, 3), torch.rand(20, 3)) for i in range(2)})
    for target in (coterie.targets.Survival((0.5,)), Labels(("a", "b")), Cox()):
        with pytest.raises(DataError, match=r"needs targets of shape \(2,\) for each example, not \(3,\)"):
            coterie.run("fedavg", federation, target=target, rounds=1)


def test_fedem_needs_losses_of_single_examples():
    with pytest.raises(CoterieError, match="FedEM asks which model fits an example best"):
        coterie.run("fedem", "survival-times", task="cox", rounds=1, **PLAIN)


def test_data_are_read_as_the_task_says():
    assert coterie.prepare("fedavg", "digits", task="ordinal").federation.target == Ordered(10)
    times = coterie.prepare("fedavg", "survival-times", horizons="0.5,1,2").federation.target
    assert times == Survival((0.5, 1.0, 2.0))
    assert coterie.prepare("fedavg", "survival-times", task="cox").federation.target == Cox()
    assert coterie.prepare("fedavg", "hospitals", task="regression").federation.kind == "regression"


def test_a_kind_by_its_name_and_by_an_object_are_the_same_federation():
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    sites = {"a": (x, (x[:, :2] > 0).long()), "b": (x[:30], (x[:30, :2] < 0).long())}
    by_name = coterie.prepare("fedavg", sites, task="multilabel").federation
    target = Labels(("label-1", "label-2"))
    by_object = coterie.prepare("fedavg", sites, target=target).federation
    assert by_name.target == by_object.target == from_clients(sites, target=target).target
    torch.testing.assert_close(by_name.y, by_object.y)
    assert [len(split.train) for split in by_name.clients.values()] == [24, 18]
    with pytest.raises(ConfigError, match="task = 'ordinal', but the target is a task with several labels"):
        coterie.prepare("fedavg", sites, target=target, task="ordinal")
    with pytest.raises(DataError, match="a target has the shape"):
        coterie.prepare("fedavg", sites, target=Labels(("one",)))


def test_who_takes_home_the_best_may_average_survival_curves():
    sites = {name: (torch.randn(40, 3), torch.stack([torch.rand(40) + 0.1, torch.ones(40)], 1)) for name in ("a", "b")}
    result = coterie.run("fedavg", sites, task="survival", take_home="best", take_home_folds=0, **QUICK)
    assert {choice.kept for choice in result.take_home.choices} <= {"local", "federated", "average"}


def tilted(outputs, y, slope=2.0):
    above = y - outputs[:, 0]
    return torch.maximum(slope * above, -above)


def test_a_loss_by_path_and_by_object_train_the_same():
    x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
    sites = {"a": (x, x[:, 0]), "b": (x + 1, x[:, 1])}
    path = "tests.experiment.test_setup:tilted"
    one, other = (coterie.run("fedavg", sites, loss=loss, **QUICK) for loss in (path, tilted))
    assert one.mean("loss") == other.mean("loss")
    assert one.mean("loss") != coterie.run("fedavg", sites, **QUICK).mean("loss")
    assert one.config.loss == path


def test_what_came_from_python_is_asked_for_when_a_run_is_resumed(tmp_path):
    x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
    sites = {"a": (x, x[:, 0]), "b": (x + 1, x[:, 1])}
    run = tmp_path / "run"
    made = coterie.run("fedavg", sites, loss=lambda out, y: tilted(out, y), out=run, **QUICK)
    for file in ("clients.csv", "summary.json"):
        (run / file).unlink()  # as if it had been stopped
    with pytest.raises(ConfigError, match="this run's loss came from Python"):
        coterie.resume(run, data=sites)
    again = coterie.resume(run, data=sites, loss=tilted)
    assert again.mean("loss") == made.mean("loss")
    importable = coterie.prepare("fedavg", sites, loss=tilted).config
    assert importable.loss == "tests.experiment.test_setup:tilted"


@pytest.mark.xdist_group("several targets compiled")
def test_several_targets_are_the_same_compiled(compiled_once):
    """Every kind in one step: labels, levels, hazards and Cox's comparisons."""
    from tests.core.targets.test_target import SEVERAL, examples

    target = coterie.targets.Several((*SEVERAL.parts, coterie.targets.Part("cox", Cox())))
    sites = {}
    for i, name in enumerate(("a", "b")):
        _, y = examples("multitask", 40 + 10 * i, seed=i)
        _, time = examples("cox", 40 + 10 * i, seed=i)
        sites[name] = (torch.randn(len(y), 4, generator=torch.Generator().manual_seed(i)), torch.cat([y, time], 1))
    how = {"model": "linear", "rounds": 2, "local_steps": 3, "lr": 0.05, "reference": False, "workers": 1}
    plain = coterie.run("fedavg", sites, target=target, engine="loop", compile=False, **how)
    for engine in ("stacked", "loop"):
        fast = coterie.run("fedavg", sites, target=target, engine=engine, compile=True, **how)
        for name in ("a", "b"):
            for key, value in plain.view(name).items():
                torch.testing.assert_close(fast.view(name)[key], value, atol=1e-5, rtol=1e-4)


def test_mistakes_in_settings_of_every_kind_are_told_together():
    wrong = {"loss": "focl", "metric": "nowhere", "schedule": "cosin:least=1", "adapter": "lor", "augment": "flp"}
    wrong |= {"sampler": "unifrm:x=1", "partition": ".:c", "model": "mlpp", "callbacks": ["never"]}
    with pytest.raises(ConfigError) as found:
        coterie.run("fedavg", "digits", **wrong)
    text = str(found.value)
    told = ["no loss 'focl'", "metric = 'nowhere'", "did you mean 'cosine'", "no adapter 'lor'", "did you mean 'flip'"]
    told += ["did you mean 'uniform'", "give the whole path", "no model 'mlpp'", "no callback 'never'"]
    assert [words for words in told if words not in text] == []
