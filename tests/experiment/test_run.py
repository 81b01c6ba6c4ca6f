import csv
import json
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn

import coterie
from coterie.core.errors import CheckpointError, ConfigError, CoterieError, CoterieWarning
from coterie.core.toml import read_toml, to_toml
from coterie.core.units import parse_bytes
from coterie.experiment.config import Config
from coterie.experiment.resolve import default_out, resolve
from coterie.experiment.run import run_setup
from coterie.experiment.setup import prepare
from coterie.methods import FedAvg, FedMAP, FedProx
from coterie.storage import files
from coterie.storage.journal import at_once
from coterie.storage.run_folder import RunFolder, line_of, safe_name

QUICK = {"engine": "loop", "compile": False, "workers": 1, "reference": False, "report": False}


def clients(number=3, size=30):
    draw = torch.Generator().manual_seed(0)
    xs = [torch.randn(size + 7 * i, 5, generator=draw) for i in range(number)]
    return {f"site {i}": (x, (x[:, 0] > 0.3 * i).long()) for i, x in enumerate(xs)}


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))


def run(out=None, **settings):
    own = {"method": "fedavg", "rounds": 4, "lr": 0.3, "batch_size": 8, "select": "balanced_accuracy"}
    settings = {**own, **QUICK, **settings}
    return coterie.run(data=clients(), model=model(), out=out, **settings)


class Stop:
    """A progress that interrupts after a round."""

    def __init__(self, after, error=KeyboardInterrupt):
        self.after, self.error = after, error

    def say(self, text): ...
    def start(self, label, done, rounds): ...
    def stop(self): ...

    def round(self, record, metric):
        if record["round"] == self.after:
            raise self.error


def test_a_run_folder_holds_everything(tmp_path):
    out = tmp_path / "run"
    result = run(out, reference=True)
    assert {path.name for path in out.iterdir()} == {
        *("config.toml", "environment.json", "engine.json", "rounds.jsonl", "clients.csv", "summary.json"),
        *("checkpoints", "clients", "reference", "predictions.safetensors", "benefit.json"),
        *("data.json", "features.safetensors"),
    }
    config = read_toml(out / "config.toml")
    assert config["optimizer"] == {"name": "sgd", "lr": 0.3, "momentum": 0.0, "weight_decay": 0.0}
    rounds = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rounds] == [1, 2, 3, 4]
    for row in rounds:
        for part in ("validation", "test"):
            for metric in ("balanced_accuracy", "accuracy", "macro_f1", "auroc", "ece", "loss"):
                assert len(row[part][metric]) == 3, "every client, every evaluated round"
    with (out / "clients.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["client"] for row in rows] == ["site 0", "site 1", "site 2"]
    for row, kept in zip(rows, result.clients, strict=True):
        gain = float(row["test_balanced_accuracy"]) - float(row["local_test_balanced_accuracy"])
        assert float(row["gain"]) == pytest.approx(gain)
        assert kept["gain"] == float(row["gain"])
    for name in ("site 0", "site 1", "site 2"):
        about = json.loads((out / "clients" / safe_name(name) / "model.json").read_text())
        assert about["client"] == name
        assert about["method"] == "fedavg"
    assert not list(out.rglob("*.tmp")), "nothing half-written stays behind"
    assert not [path for path in out.rglob("*") if path.suffix in (".pkl", ".pt", ".pth")]


def test_the_round_is_selected_on_validation_and_ties_go_to_the_earlier():
    result = run(rounds=6)
    means = [np.mean(row["validation"]["balanced_accuracy"]) for row in result.rounds]
    assert result.selected == int(np.argmax(means)) + 1
    row = result.rounds[result.selected - 1]
    assert [client["test_accuracy"] for client in result.clients] == row["test"]["accuracy"]


def test_models_predict_what_was_evaluated():
    result = run(rounds=5)
    setup = prepare("fedavg", clients(), model=model(), rounds=5, lr=0.3, batch_size=8, **QUICK)
    for i, row in enumerate(result.clients):
        own = torch.from_numpy(setup.federation.split(i).test)
        found = result.model(row["client"])(setup.federation.x[own]).argmax(1)
        accuracy = float((found == setup.federation.y[own]).double().mean())
        assert accuracy == pytest.approx(row["test_accuracy"])


def test_local_reference_takes_the_same_number_of_steps():
    result = run(reference=True, rounds=3)
    assert result.reference.config.method == "local"
    keys = ("rounds", "local_epochs", "local_steps", "batch_size", "seed", "optimizer")
    assert all(getattr(result.config, key) == getattr(result.reference.config, key) for key in keys)
    # Same minibatches too: the first round of FedAvg and of local training see the same losses.
    assert result.rounds[0]["info"]["loss"] == result.reference.rounds[0]["info"]["loss"]


def test_bmta_is_the_best_mean_test_accuracy():
    result = run(rounds=5)
    assert result.bmta() == max(np.mean(row["test"]["accuracy"]) for row in result.rounds)
    assert "bmta" not in json.dumps(result.clients).lower()


def test_interrupted_runs_go_on_to_the_same_result(tmp_path):
    whole = run(tmp_path / "whole", rounds=5)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", rounds=5, checkpoint_every=4, progress=Stop(3))
    assert 3 in RunFolder(tmp_path / "cut").checkpoints(), "the last complete round is kept, whatever checkpoint_every"
    resumed = coterie.resume(tmp_path / "cut", data=clients(), model=model())
    assert [row["validation"] for row in whole.rounds] == [row["validation"] for row in resumed.rounds]
    for name, value in whole.views.items():
        assert torch.equal(value, resumed.views[name])


def test_resuming_a_finished_run_reads_it_back(tmp_path):
    first = run(tmp_path / "run", reference=True)
    again = coterie.resume(tmp_path / "run", data=clients(), model=model())
    assert again.clients == first.clients
    assert again.selected == first.selected


def test_a_run_interrupted_before_its_reference_makes_it_when_resumed(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", rounds=4, reference=True, progress=Stop(2))
    result = coterie.resume(tmp_path / "run", data=clients(), model=model())
    assert result.reference is not None
    assert len(result.reference.rounds) == 4


def test_resume_needs_what_came_from_python(tmp_path):
    run(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"data came from Python.*data="):
        coterie.resume(tmp_path / "run", model=model())
    with pytest.raises(ConfigError, match=r"model came from Python"):
        coterie.resume(tmp_path / "run", data=clients())


def test_old_checkpoints_are_dropped_but_not_the_best(tmp_path):
    with at_once():
        result = run(tmp_path / "run", rounds=8)
    assert set(RunFolder(tmp_path / "run").checkpoints()) == {7, 8, result.selected}


class Slow(Stop):
    """Says what is in the folder after each round, by a clock that the test sets: a round takes 0.7 s."""

    def __init__(self, number, clock, folder):
        super().__init__(number)
        self.clock, self.folder, self.seen = clock, folder, []

    def round(self, record, metric):
        self.clock[0] += 0.7
        log = self.folder / "rounds.jsonl"
        lines = len(log.read_text().splitlines()) if log.exists() else 0
        self.seen.append((record["round"], lines, RunFolder(self.folder).checkpoints()[-1:]))
        super().round(record, metric)


@pytest.mark.parametrize(("every", "stopped"), [(1, 8), (5, 8)])
def test_short_rounds_are_written_together_and_none_is_lost_by_an_interrupt(tmp_path, monkeypatch, every, stopped):
    clock = [0.0]
    monkeypatch.setattr("coterie.storage.journal.time", SimpleNamespace(monotonic=lambda: clock[0]))
    whole = run(tmp_path / "whole", rounds=10)
    slow = Slow(stopped, clock, tmp_path / "cut")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", rounds=10, checkpoint_every=every, progress=slow)
    # The fourth round ends 2.1 seconds after the first began, the seventh as long after that.
    assert [lines for _, lines, _ in slow.seen] == [0, 0, 0, 4, 4, 4, 7, 7]
    if every == 1:
        assert [last for _, _, last in slow.seen] == [[], [], [], [4], [4], [4], [7], [7]]
    folder = RunFolder(tmp_path / "cut")
    assert folder.checkpoints()[-1] == 8
    assert len(folder.read_rounds(99)) == 8
    best = json.loads((tmp_path / "cut/checkpoints/round-00008/state.json").read_text())["best"]
    assert best in folder.checkpoints(), "the best round's state is there, whenever it was"
    resumed = coterie.resume(tmp_path / "cut", data=clients(), model=model())
    assert resumed.selected == whole.selected
    assert [row["validation"] for row in whole.rounds] == [row["validation"] for row in resumed.rounds]
    for name, value in whole.views.items():
        assert torch.equal(value, resumed.views[name])


def test_records_that_cannot_be_written_leave_no_part_of_a_line(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    folder.append_round({"round": 1})
    monkeypatch.setattr("os.fsync", lambda file: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(CheckpointError, match="No space left"):
        folder.append_lines([line_of({"round": number}) for number in (2, 3)])
    assert [row["round"] for row in folder.read_rounds(9)] == [1]
    assert (tmp_path / "rounds.jsonl").read_text().endswith("}\n")


def damage(path: Path, how: str) -> None:
    if how == "truncated":
        path.write_bytes(path.read_bytes()[:-7])
    elif how == "flipped":
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(data)
    else:
        path.unlink()


@pytest.mark.parametrize("how", ["truncated", "flipped", "missing"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(tmp_path, how):
    whole = run(tmp_path / "whole", rounds=6)
    with pytest.raises(KeyboardInterrupt), at_once():
        run(tmp_path / "cut", rounds=6, progress=Stop(4))
    damage(tmp_path / "cut" / "checkpoints" / "round-00004" / "state.safetensors", how)
    with pytest.warns(CoterieWarning, match="round-00004"):
        resumed = coterie.resume(tmp_path / "cut", data=clients(), model=model())
    assert [row["round"] for row in resumed.rounds] == [1, 2, 3, 4, 5, 6]
    for name, value in whole.views.items():
        assert torch.equal(value, resumed.views[name])


def test_no_intact_checkpoint_is_an_error_not_a_fresh_start(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", rounds=6, progress=Stop(1))
    damage(tmp_path / "cut" / "checkpoints" / "round-00001" / "state.safetensors", "flipped")
    with pytest.raises(CheckpointError, match="round-00001"):
        coterie.resume(tmp_path / "cut", data=clients(), model=model())
    assert len((tmp_path / "cut" / "rounds.jsonl").read_text().splitlines()) == 1


def test_a_half_written_line_of_the_log_is_dropped(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", rounds=4, progress=Stop(2))
    with (tmp_path / "cut" / "rounds.jsonl").open("a") as file:
        file.write('{"round": 3, "par')
    resumed = coterie.resume(tmp_path / "cut", data=clients(), model=model())
    assert [row["round"] for row in resumed.rounds] == [1, 2, 3, 4]


def test_names_may_have_ends_of_lines_in_them_and_need_not_be_unicode(tmp_path):
    folder, names = RunFolder(tmp_path), ["clinic\u2028b", "clinic\x85b", "two\nlines", "\udce9"]
    for number, name in enumerate(names, 1):
        folder.append_round({"round": number, "participants": [name], "test": {"auroc": [float("nan")]}})
    assert [record["participants"] for record in folder.read_rounds(9)] == [[name] for name in names]


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path):
    run(tmp_path / "run")
    with pytest.raises(CheckpointError, match="coterie resume"):
        run(tmp_path / "run")


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.raises(CheckpointError, match=r"file/run.*cannot be written"):
        run(blocked / "run")


def test_a_newer_format_is_told(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", progress=Stop(1))
    path = tmp_path / "run" / "checkpoints" / "round-00001" / "state.json"
    told = json.loads(path.read_text())
    told.pop(files.OWN_CHECKSUM)
    path.write_text(json.dumps(told | {"format": 99}))
    with pytest.raises(CheckpointError, match="newer version"):
        coterie.resume(tmp_path / "run", data=clients(), model=model())


def test_what_a_state_has_twice_is_in_a_checkpoint_once(tmp_path):
    """FedAMP's server keeps what the clients sent, which is what they keep."""
    settings = {"method": "fedamp", "engine": "stacked"}
    whole = run(**settings)
    with pytest.raises(KeyboardInterrupt), at_once():
        run(tmp_path / "run", **settings, progress=Stop(2))
    folder = tmp_path / "run" / "checkpoints" / "round-00002"
    same = json.loads((folder / "state.json").read_text())["same"]
    with safe_open(folder / "state.safetensors", "pt") as file:
        there = set(file.keys())
    assert same
    assert set(same.values()) <= there
    assert not there & same.keys()
    again = coterie.resume(tmp_path / "run", data=clients(), model=model())
    assert [{**one, "seconds": 0} for one in again.rounds] == [{**one, "seconds": 0} for one in whole.rounds]


def test_divergence_names_the_client_and_keeps_the_checkpoints(tmp_path):
    with pytest.raises(CoterieError, match=r"diverged: client 'site \d'.*--lr"):
        coterie.run("fedavg", {k: (x * 1e18, x[:, 0]) for k, (x, _) in clients().items()}, model=nn.Linear(5, 1),
                    out=tmp_path / "run", rounds=5, lr=1e9, **QUICK)  # fmt: skip


def test_partial_participation_and_fixed_steps(tmp_path):
    result = run(tmp_path / "run", clients_per_round=2, local_steps=3)
    assert all(len(row["participants"]) == 2 for row in result.rounds)
    assert len({tuple(row["participants"]) for row in result.rounds}) > 1
    again = coterie.resume(tmp_path / "run", data=clients(), model=model())
    assert again.clients == result.clients


def test_evaluation_every_few_rounds_and_the_last():
    result = run(rounds=5, evaluate_every=2)
    assert [row["round"] for row in result.rounds if "test" in row] == [2, 4, 5]


def test_the_engine_chosen_is_written_and_kept(tmp_path):
    run(tmp_path / "run", engine="auto", compile=None, workers=None)
    told = json.loads((tmp_path / "run" / "engine.json").read_text())
    assert told["engine"]["kind"] in ("loop", "stacked")
    assert set(told["microseconds_a_client_step"]) == {"loop", "stacked"}


def test_a_method_object_and_a_name_give_the_same():
    by_name = run(method="fedprox", mu=0.3, momentum=0.5)
    data = clients()
    by_object = coterie.run(
        FedProx(coterie.SGD(0.3, momentum=0.5), mu=0.3),
        data,
        model=model(),
        rounds=4,
        batch_size=8,
        select="balanced_accuracy",
        **QUICK,
    )
    assert by_name.clients == by_object.clients
    assert by_name.config.hyper == by_object.config.hyper == {"mu": 0.3}
    with pytest.raises(ConfigError, match="lr: the method is given as an object"):
        coterie.run(FedAvg(), data, model=model(), lr=0.1)


def test_regression():
    data = {name: (x, x @ torch.ones(5)) for name, (x, _) in clients(size=60).items()}
    result = coterie.run("fedavg", data, model="linear", rounds=15, lr=0.05, **QUICK)
    assert result.metric == "rmse"
    assert result.mean("rmse") < 0.3
    assert result.mean("r2") > 0.9
    with pytest.raises(CoterieError, match="BMTA"):
        result.bmta()


def test_everything_wrong_is_told_at_once():
    wrong = {
        "method": ("fedmapp", "'fedmapp' (did you mean 'fedmap'?)"),
        "data": ("nope", "no data set 'nope'"),
        "rounds": (0, "rounds = 0"),
        "batchsize": (3, "'batchsize' (did you mean 'batch_size'?)"),
        "fraction": (0.5, "fraction or clients_per_round"),
        "clients_per_round": (2, "not both"),
        "local_epochs": (3, "local_epochs or local_steps"),
        "local_steps": (2, "not both"),
        "validation": (0.6, "leave nothing to train on"),
        "test": (0.6, "leave nothing to train on"),
        "memory": ("much", "memory = 'much'"),
        "model": ("vgg", "no model 'vgg'"),
        "optimizer": ({"name": "adma"}, "'adma' (did you mean 'adam'?)"),
        "select": ("luck", "select = 'luck'"),
    }
    with pytest.raises(ConfigError) as caught:
        resolve({key: value for key, (value, _) in wrong.items()})
    told = "\n".join(caught.value.problems)
    for _, part in wrong.values():
        assert part in told, part
    with pytest.raises(ConfigError) as caught:
        resolve({"method": "fedmap", "hyper": {"sigma2": -1, "weighting": "best", "mu": 3}})
    told = "\n".join(caught.value.problems)
    for part in ("sigma2 = -1: method fedmap needs auto | a number > 0", "omega | samples | uniform", "has no 'mu'"):
        assert part in told, part


def test_problems_that_need_the_data_are_told_before_training():
    with pytest.raises(ConfigError) as caught:
        coterie.run("fedavg", clients(), model="cnn", clients_per_round=4, select="rmse", **QUICK)
    told = "\n".join(caught.value.problems)
    for part in ("there are 3 clients", "a classification has", "model 'cnn' cannot be built"):
        assert part in told, part
    with pytest.raises(ConfigError, match="does not accept inputs of shape"):
        coterie.run("fedavg", clients(), model=nn.Linear(9, 2), **QUICK)
    with pytest.raises(ConfigError, match="needs 2 outputs"):
        coterie.run("fedavg", clients(), model=nn.Linear(5, 1), **QUICK)


def test_defaults_come_from_the_data_set_and_flags_win():
    config, method = resolve({})
    assert isinstance(method, FedMAP)
    assert (config.data, config.rounds, config.local_epochs, config.take_home) == ("hospitals", 20, 3, "best")
    assert resolve({"reference": False})[0].take_home == "federated", "there would be nothing to choose from"
    skew = {"data": "synthetic-label-skew"}
    config, method = resolve(skew)
    assert (config.rounds, config.local_epochs, config.batch_size) == (20, 50, 64)
    assert config.optimizer == {"name": "adam", "lr": 1e-4}
    config, method = resolve({**skew, "rounds": 3, "optimizer": {"lr": 0.5}})
    assert config.rounds == 3
    assert method.optimizer == coterie.Adam(lr=0.5)
    _, method = resolve({**skew, "optimizer": {"name": "sgd"}})
    assert method.optimizer == coterie.SGD()


def test_toml_round_trip(tmp_path):
    config, _ = resolve({"method": "fedmap", "hyper": {"sigma2": 1e-3}, "data": "digits", "local_steps": 3})
    path = tmp_path / "a.toml"
    path.write_text(to_toml(config.to_file()))
    assert resolve(read_toml(path))[0] == config
    path.write_text("rounds = ")
    with pytest.raises(ConfigError, match=r"a\.toml"):
        read_toml(path)
    with pytest.raises(ConfigError, match="no file"):
        read_toml(tmp_path / "b.toml")


def test_sizes_in_words():
    assert [parse_bytes(text) for text in ("2GB", "500 mb", "1k", "7", "1.5KB")] == [
        2 * 10**9,
        5 * 10**8,
        1000,
        7,
        1500,
    ]
    for text in ("", "GB", "1..2MB", "two"):
        with pytest.raises(ValueError, match="such as"):
            parse_bytes(text)


def test_default_folders_are_numbered(tmp_path, monkeypatch):
    monkeypatch.setenv("COTERIE_RUNS", str(tmp_path))
    first = default_out(Config())
    first.mkdir(parents=True)
    assert default_out(Config()).name == first.name + "-2"


def test_names_of_clients_are_safe_as_folders():
    names = ["a/b", "..", ".", "", "Ward 3", "São Paulo", "a%2Fb", "CON"]
    folders = [safe_name(name) for name in names]
    assert len(set(folders)) == len(names)
    for folder in folders:
        assert folder == os.path.basename(folder)
        assert folder not in ("", ".", "..")


def test_run_setup_without_a_folder_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_setup(prepare("fedavg", clients(), model=model(), rounds=1, **QUICK), None)
    assert not list(tmp_path.iterdir())


def test_splits_can_stay_the_same_while_the_seed_changes():
    def splits(**seeds):
        found = prepare("fedavg", "digits", **seeds)
        return [
            part.tolist() for own in found.federation.clients.values() for part in (own.train, own.test)
        ], found.task

    (first, model_0), (same, model_1), (other, _) = splits(seed=0), splits(seed=1, split_seed=0), splits(seed=1)
    assert first == same != other
    assert model_0.init().keys() == model_1.init().keys()
    assert any(not torch.equal(a, b) for a, b in zip(model_0.init().values(), model_1.init().values(), strict=True))
