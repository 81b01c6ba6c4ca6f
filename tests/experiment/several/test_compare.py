import csv
import json
import math
import sys

import numpy as np
import pytest
import torch
from torch import nn

import coterie
from coterie.core.errors import CheckpointError, ConfigError, CoterieError, DataError
from coterie.core.optimizers import SGD
from coterie.core.toml import read_toml
from coterie.experiment.several.comparison import Comparison
from coterie.experiment.several.trials import prepare_trials
from coterie.methods import FedMAP, FedProx

QUICK = {"engine": "loop", "compile": False, "workers": 1, "rounds": 2, "local_steps": 1, "report": False}


def clients(number=3, size=30):
    draw = torch.Generator().manual_seed(0)
    xs = [torch.randn(size + 7 * i, 5, generator=draw) for i in range(number)]
    return {f"site {i}": (x, (x[:, 0] > 0.3 * i).long()) for i, x in enumerate(xs)}


def factory(shape, outputs):
    return nn.Linear(shape[0], outputs)


def compare(methods=("local", "fedavg"), seeds=2, **settings):
    return coterie.compare(methods, seeds, clients(), model=factory, **{"lr": 0.3, **QUICK, **settings})


class Heard:
    """A progress that remembers what it was told, and interrupts a run after a round."""

    def __init__(self, stop_in=None, after=1):
        self.stop_in, self.after = stop_in, after
        self.said, self.rounds = [], []

    def say(self, text):
        self.said.append(text)

    def start(self, label, done, rounds):
        self.label = label

    def round(self, record, metric):
        self.rounds.append((self.label, record["round"]))
        if self.label == self.stop_in and record["round"] == self.after:
            raise KeyboardInterrupt

    def stop(self): ...


@coterie.metric(better=min, low=0.0)
def brier(p, y):
    return ((p[:, 1] - y) ** 2).mean()


def doubled(outputs, y):
    return 2 * torch.nn.functional.cross_entropy(outputs, y, reduction="none")


def test_objects_from_python_reach_every_run():
    target = coterie.core.targets.Classes(2)
    own = {"loss": doubled, "metric": brier, "select": "brier", "target": target}
    found = compare(("local", "fedavg"), [1], **own)
    alone = coterie.run("fedavg", clients(), model=factory, seed=1, lr=0.3, reference=False, **QUICK, **own)
    assert found.metric == "brier"
    assert found.mean("fedavg") == pytest.approx(alone.mean())
    mixed = {"models": {f"site {i}": f"mlp:hidden={4 + i}" for i in range(3)}, "lr": 0.3, **QUICK}
    assert coterie.compare(["local"], 1, clients(), **mixed).metric == "auroc"
    made = prepare_trials(["fedavg"], 1, clients(), model=factory, augment=lambda x, key: x)
    assert made.first.task.augment is not None


def test_each_run_equals_the_run_alone():
    found = compare(("local", "fedavg"), [4, 1])
    alone = coterie.run("fedavg", clients(), model=factory, seed=1, lr=0.3, reference=False, **QUICK)
    rows = [row for row in found.rows if row["method"] == "fedavg" and row["seed"] == 1]
    assert [{k: v for k, v in row.items() if k not in ("method", "seed")} for row in rows] == alone.clients
    assert found.means("fedavg")[1] == pytest.approx(alone.mean())


def test_means_spread_and_gains():
    scores = {"local": [[0.5, 0.7], [0.6, 0.6]], "fedavg": [[0.9, 0.7], [0.6, 0.4]]}
    rows = [
        {
            **{"method": method, "seed": seed, "client": client, "train": 10 * (i + 1) + seed},
            **{"test": 1 + 2 * i, "test_accuracy": by[s][i]},
        }
        for method, by in scores.items()
        for s, seed in enumerate((0, 1))
        for i, client in enumerate(("a", "b"))
    ]
    found = Comparison("accuracy", ("local", "fedavg"), (0, 1), rows)
    assert found.mean("fedavg") == pytest.approx(0.65)
    assert found.std("fedavg") == pytest.approx(np.std([0.8, 0.5], ddof=1))
    assert found.per_client("fedavg").tolist() == pytest.approx([0.75, 0.55])
    assert found.gains("fedavg").tolist() == pytest.approx([0.2, -0.1])
    assert found.client_gains("fedavg").tolist() == pytest.approx([0.2, -0.1])
    assert found.train_sizes.tolist() == [10.5, 20.5]
    assert found.best() == "fedavg"
    assert found.weighted_means("fedavg").tolist() == pytest.approx([0.75, 0.45])  # test examples 1 : 3
    assert found.fairness("fedavg")["std"] == pytest.approx(0.1)
    assert found.fairness("fedavg")["worst_decile"] == pytest.approx((0.7 + 0.4) / 2)
    worse = Comparison(
        "loss", ("local", "fedavg"), (0, 1), [{**row, "test_loss": row["test_accuracy"]} for row in rows]
    )
    assert worse.best() == "local"
    assert worse.gains("fedavg").tolist() == pytest.approx([-0.2, 0.1])  # positive is better
    with pytest.raises(ConfigError, match="'fedmap' was not compared; there are local, fedavg"):
        found.mean("fedmap")


def test_one_seed_has_no_spread():
    found = compare(("fedavg",), 1, rounds=1)
    assert math.isnan(found.std("fedavg"))
    assert not found.has_local


def test_folders_and_summary(tmp_path):
    found = compare(("local", "fedprox"), 2, out=tmp_path, mu=0.2, seed=5)
    assert {path.name for path in tmp_path.iterdir()} == {
        *("local-seed5", "local-seed6", "fedprox-seed5", "fedprox-seed6", "comparison.json"),
    }
    config = read_toml(tmp_path / "fedprox-seed6" / "config.toml")
    assert (config["method"], config["seed"], config["hyper"], config["reference"]) == (
        "fedprox",
        6,
        {"mu": 0.2},
        False,
    )
    assert read_toml(tmp_path / "local-seed6" / "config.toml")["optimizer"]["lr"] == 0.3
    told = json.loads((tmp_path / "comparison.json").read_text())
    assert told["seeds"] == [5, 6]
    assert told["metric"] == "test_auroc"
    assert told["methods"]["fedprox"]["mean"] == pytest.approx(found.mean("fedprox"))
    assert told["methods"]["fedprox"]["gain_over_local"] == pytest.approx(found.gains("fedprox").tolist())
    assert told["rows"] == found.rows


def test_complete_runs_are_read_and_stopped_ones_gone_on_with(tmp_path):
    whole = compare(("local", "fedavg", "fedmap"), 2, rounds=3)
    with pytest.raises(KeyboardInterrupt):
        compare(("local", "fedavg", "fedmap"), 2, rounds=3, out=tmp_path, progress=Heard("fedavg seed 1", after=2))
    assert not (tmp_path / "comparison.json").exists()
    before = (tmp_path / "local-seed0" / "summary.json").stat().st_mtime_ns
    heard = Heard()
    found = compare(("local", "fedavg", "fedmap"), 2, rounds=3, out=tmp_path, progress=heard)
    assert heard.rounds == [("fedavg seed 1", 3), *(("fedmap seed 1", i) for i in (1, 2, 3))]
    assert "local seed 0: already complete" in heard.said
    assert (tmp_path / "local-seed0" / "summary.json").stat().st_mtime_ns == before
    assert found.rows == whole.rows
    again = Heard()
    assert compare(("local", "fedavg", "fedmap"), 2, rounds=3, out=tmp_path, progress=again).rows == whole.rows
    assert again.rounds == []


def test_seeds_can_be_added(tmp_path):
    compare(("fedavg",), 1, out=tmp_path)
    heard = Heard()
    found = compare(("local", "fedavg"), 2, out=tmp_path, progress=heard, engine="stacked")  # how it runs may change
    assert {label for label, _ in heard.rounds} == {"local seeds 0, 1", "fedavg seed 1"}
    assert found.scores("fedavg").shape == (2, 3)


def test_a_folder_with_other_settings_is_refused(tmp_path):
    compare(("fedavg",), 1, out=tmp_path)
    heard = Heard()
    with pytest.raises(CheckpointError, match=r"fedavg-seed0' holds a run with other settings \(rounds = 2, not 3\)"):
        compare(("local", "fedavg"), 1, rounds=3, out=tmp_path, progress=heard)
    assert heard.rounds == []


def test_a_folder_of_other_data_is_refused(tmp_path):
    compare(("local", "fedavg"), 1, out=tmp_path)
    other = {name: (x, 1 - y) for name, (x, y) in clients().items()}  # under the same name, own-data
    with pytest.raises(DataError, match=r"local-seed0' and the data given now do not use the same data: the labels"):
        coterie.compare(("local", "fedavg"), 1, other, model=factory, lr=0.3, out=tmp_path, **QUICK)
    renamed = {f"ward {i}": pair for i, pair in enumerate(clients().values())}
    with pytest.raises(DataError, match="the clients differ"):
        coterie.compare(("local", "fedavg"), 1, renamed, model=factory, lr=0.3, out=tmp_path, **QUICK)


def test_who_gains_over_seeds(tmp_path):
    found = compare(("local", "fedavg"), 2, out=tmp_path, local_steps=5)
    assert found.verdict().keys() == {"fedavg"}
    names = [name for those in found.verdict()["fedavg"].values() for name in those]
    assert sorted(names) == ["site 0", "site 1", "site 2"]
    rows = found.benefit("fedavg").clients
    np.testing.assert_allclose([row["gain"] for row in rows], found.client_gains("fedavg"))
    assert all(row["low"] <= row["gain"] <= row["high"] for row in rows)
    told = json.loads((tmp_path / "comparison.json").read_text())["methods"]["fedavg"]["benefit"]
    assert [row["verdict"] for row in told["clients"]] == [row["verdict"] for row in rows]
    with pytest.raises(CoterieError, match="local is what the others are compared with"):
        found.benefit("local")
    with pytest.raises(ConfigError, match="'fedmap' was not compared"):
        found.benefit("fedmap")


def test_one_seeds_benefit_is_that_of_the_run():
    compared = compare(("local", "fedavg"), [3])
    run = coterie.run("fedavg", clients(), model=factory, seed=3, lr=0.3, **QUICK)
    assert compared.benefit("fedavg").clients == run.benefit().clients


def test_without_local_nobody_can_say_who_gains():
    with pytest.raises(CoterieError, match="add local to its methods"):
        compare(("fedavg",), 1).verdict()


def test_a_complete_run_of_an_earlier_version_is_completed(tmp_path):
    first = compare(("local", "fedavg"), 1, out=tmp_path)
    (tmp_path / "fedavg-seed0" / "predictions.safetensors").unlink()
    heard = Heard()
    assert compare(("local", "fedavg"), 1, out=tmp_path, progress=heard).rows == first.rows
    assert heard.rounds == []  # nothing is trained again
    assert (tmp_path / "fedavg-seed0" / "predictions.safetensors").exists()


def test_a_task_is_shared_by_the_methods_of_a_seed():
    trials = prepare_trials(("local", "fedmap"), 2, clients(), model=factory, **QUICK)
    setups = [trials.first.with_method(method) for method in trials.methods.values()]
    assert len({id(setup.task) for setup in setups}) == 1
    assert len({id(setup.federation) for setup in setups}) == 1
    second = trials.prepare(1)
    assert any(
        not np.array_equal(second.federation.split(i).train, trials.first.federation.split(i).train) for i in range(3)
    )


def test_methods_keep_their_own_optimizer_unless_told(tmp_path):
    compare(("fedavg", "fedmap"), 1, lr=None, rounds=1, out=tmp_path)
    assert read_toml(tmp_path / "fedavg-seed0" / "config.toml")["optimizer"]["name"] == "sgd"
    assert read_toml(tmp_path / "fedmap-seed0" / "config.toml")["optimizer"]["name"] == "adam"


def test_instances_and_labels(tmp_path):
    weak, strong = (FedMAP(SGD(lr=0.3), sigma2=sigma2) for sigma2 in (100.0, 0.001))
    found = compare({"weak": weak, "strong": strong, "fedprox": "fedprox"}, 1, mu=0.0, out=tmp_path)
    assert found.methods == ("weak", "strong", "fedprox")
    assert read_toml(tmp_path / "strong-seed0" / "config.toml")["hyper"]["sigma2"] == 0.001
    with (tmp_path / "weak-seed0" / "clients.csv").open() as file:
        weak_rows = list(csv.DictReader(file))
    assert [float(row["last_test_loss"]) for row in weak_rows] != [
        row["last_test_loss"] for row in found.rows if row["method"] == "strong"
    ]


def test_all_errors_at_once():
    with pytest.raises(ConfigError) as caught:
        compare(("local", "fedavgg", "fedmap", "local"), [1, 1], rounds=0, sigma2=-1, mu=2, nonsense=3)
    told = str(caught.value)
    for words in (
        "local more than once",
        "none negative, none twice",
        "none has a setting 'mu'",
        "none has a setting 'nonsense'",
        "there is no method 'fedavgg' (did you mean 'fedavg'?)",
        "rounds = 0",
        "sigma2 = -1: method fedmap needs auto | a number > 0",
    ):
        assert words in told, words
    assert told.count("rounds = 0") == 1


@pytest.mark.parametrize(
    ("methods", "seeds", "settings", "words"),
    [
        ((), 1, {}, "name at least one"),
        (("fedavg",), 0, {}, "give at least one"),
        (("fedavg",), 1, {"seed": "x"}, "give whole numbers"),
        ((FedProx(),), 1, {"lr": 0.3}, "none has a setting 'lr'"),
        (("fedavg",), 1, {"method": "fedmap"}, "none has a setting 'method'"),
        (("fedavg",), 1, {"hyper": 3}, "none has a setting 'hyper'"),
        (("fedavg",), 1, {"clients_per_round": 9}, "there are 3 clients"),
    ],
)
def test_bad_comparisons_are_told_in_words(methods, seeds, settings, words):
    with pytest.raises(ConfigError, match=words):
        compare(methods, seeds, **{"lr": None, **settings})


def test_training_alone_runs_once_a_seed():
    heard = Heard()
    compare(("local", "fedavg", "fedprox"), 2, progress=heard)
    assert [label for label, round in heard.rounds if round == 1 and "local" in label] == [
        "local seed 0",
        "local seed 1",
    ]


def test_an_engine_is_chosen_once_a_method(monkeypatch):
    module = sys.modules["coterie.experiment.pick_engine"]
    usual, asked = module.choose, []

    def choose(*args, **options):
        asked.append(options["client_steps"])
        return usual(*args, **options)

    monkeypatch.setattr(module, "choose", choose)
    monkeypatch.setattr("coterie.experiment.several.compare.seeds_at_once", lambda *_: 1)
    heard = Heard()
    compare(("local", "fedavg"), 3, engine="auto", progress=heard)
    assert len(asked) == 2
    assert len([text for text in heard.said if text.startswith(("local: ", "fedavg: "))]) == 6
    steps = asked[0]
    asked.clear()
    compare(("local",), 1, engine="auto")
    assert steps == 3 * asked[0]  # whether compiling pays is asked of all seeds
