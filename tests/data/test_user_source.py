"""Data sources by import path: what they may return, what they are given, and what is said of mistakes."""

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import coterie
from coterie.core.errors import ConfigError, DataError
from coterie.core.extensions import GROUPS
from coterie.data import Pool, load
from coterie.data.loading import is_known
from coterie.experiment.resolve import resolve
from coterie.experiment.setup import prepare

QUICK = {"engine": "loop", "compile": False, "workers": 1, "reference": False, "report": False}


def pairs(number=3, size=20, seed=0, dtype=torch.float64):
    draw = torch.Generator().manual_seed(seed)
    xs = [torch.randn(size + i, 4, generator=draw, dtype=dtype) for i in range(number)]
    return {f"site {i}": (x, (x[:, 0] > 0).long()) for i, x in enumerate(xs)}


def clients(number: int = 3, *, size=20, seed):
    """Clients by name."""
    return pairs(number, size, seed)


clients.defaults = {"model": "linear", "rounds": 2, "batch_size": 7}


def listed():
    return [TensorDataset(x.float(), y) for x, y in pairs().values()]


def pool(*, owned=True):
    x = np.random.default_rng(0).normal(size=(90, 4))
    owner = np.arange(90) % 3 if owned else None
    return Pool("mine", torch.from_numpy(x), torch.from_numpy((x[:, 0] > 0).astype(np.int32)), 2, owner=owner)


def one_pair():
    x = np.random.default_rng(0).normal(size=(90, 4))
    return x, x[:, 0]


def federation(validation, test, seed):
    return coterie.from_clients(pairs(2), name="its own", validation=validation, test=test, seed=seed)


def raises():
    raise KeyError("ward")


def refuses():
    raise DataError("client 'b' has no scans")


def nothing(): ...


def times():
    return {
        name: (x, torch.stack([x[:, 0].abs() + 0.1, (x[:, 1] < 1).float()], 1))
        for name, (x, _) in pairs().items()
        for x in [torch.as_tensor(x)]
    }


def labels():
    x = torch.cat([torch.as_tensor(x) for x, _ in pairs().values()])
    return x, (x[:, :2] > 0).float()


def odd():
    return [pairs()["site 0"], 3]


calls = []


def recorded(data_dir, *, seed=5):
    calls.append((data_dir, seed))
    return pairs()


NAME = __name__


def test_a_source_returns_clients_a_pool_or_a_federation():
    made = load(f"{NAME}:clients:4:size=30", 1)
    assert made.names == ("site 0", "site 1", "site 2", "site 3")
    assert made.name == f"{NAME}:clients:4:size=30"
    assert made.x.dtype == torch.float32
    assert len(made.x) == 30 + 31 + 32 + 33
    assert torch.equal(made.x, torch.cat([x.float() for x, _ in pairs(4, 30, 1).values()])), "the run's seed"
    assert load(f"{NAME}:listed", 0).names == ("client-1", "client-2", "client-3")
    own = load(f"{NAME}:federation", 2, 0.2, 0.3)
    expected = coterie.from_clients(pairs(2), validation=0.2, test=0.3, seed=2)
    assert own.name == "its own"
    assert np.array_equal(own.split(0).test, expected.split(0).test)


def test_a_pool_is_divided_by_a_partition():
    by_owner = load(f"{NAME}:pool", 0)
    assert len(by_owner.names) == 3
    assert by_owner.y.dtype == torch.int64
    assert by_owner.x.dtype == torch.float32
    assert len(load(f"{NAME}:pool", 0, partition="iid", clients=6).names) == 6
    assert len(load(f"{NAME}:pool:owned=false", 0, partition="iid:share=0.5", clients=2).names) == 2
    numbers = load(f"{NAME}:one_pair", 0, partition="iid", clients=3)
    assert numbers.num_classes is None
    assert numbers.y.dtype == torch.float32


def test_targets_of_every_kind_come_from_a_source():
    with_ends = prepare("fedavg", f"{NAME}:times", task="survival", horizons=[0.5, 1.0], model="linear")
    assert with_ends.task.target == coterie.targets.Survival((0.5, 1.0))
    labels = prepare("fedavg", f"{NAME}:labels", task="multilabel", partition="iid", clients=3, model="linear")
    assert labels.task.kind == "multilabel"
    with pytest.raises(ConfigError, match="horizons are for task = 'survival'"):
        prepare("fedavg", f"{NAME}:times", task="cox", horizons=[0.5, 1.0], model="linear")


def test_settings_of_a_division_apply_to_pools_only():
    for name, what in (("clients", "the data of each client"), ("federation", "a Federation")):
        with pytest.raises(ConfigError, match=f"partition, clients: data source .* returned {what}, already divided"):
            prepare("fedavg", f"{NAME}:{name}", partition="iid", clients=2)
    with pytest.raises(ConfigError, match=r"image_size: .* reads its images itself"):
        prepare("fedavg", f"{NAME}:pool", image_size=32)


def test_settings_are_filled_in():
    prepare("fedavg", f"{NAME}:recorded", seed=3, data_dir="there", model="linear")
    prepare("fedavg", f"{NAME}:recorded", seed=3, split_seed=4, model="linear")
    assert calls == [("there", 3), (None, 4)]
    with pytest.raises(ConfigError, match="has no option 'seed'"):
        resolve({"data": f"{NAME}:recorded:seed=8"})


def test_a_source_has_default_settings_that_the_user_overrides():
    config, _ = resolve({"data": f"{NAME}:clients", "batch_size": 9})
    assert (config.model, config.rounds, config.batch_size) == ("linear", 2, 9)


def test_a_source_that_fails_names_the_users_line():
    with pytest.raises(
        DataError, match=r"data source '.*:raises' failed: KeyError: 'ward' \(.*line \d+, in raises: `rais"
    ):
        load(f"{NAME}:raises", 0)
    with pytest.raises(DataError, match=r"^client 'b' has no scans$"):
        load(f"{NAME}:refuses", 0)
    with pytest.raises(DataError, match="returned nothing; it must return a Federation, a Pool, one"):
        load(f"{NAME}:nothing", 0)
    with pytest.raises(DataError, match="returned a int for a client"):
        load(f"{NAME}:odd", 0)


def test_all_mistakes_are_reported_before_anything_is_loaded():
    with pytest.raises(ConfigError) as found:
        resolve({"data": f"{NAME}:clients:x:syze=3", "model": "non", "rounds": 0})
    text = str(found.value)
    assert all(word in text for word in ("number = 'x'", "no option 'syze' (did you mean 'size'?)", "'non'", "rounds"))
    assert "write" in text
    assert "[:number=3][:size=20]" in text
    with pytest.raises(ConfigError, match=f"data source '{NAME}:absent' cannot be imported"):
        resolve({"data": f"{NAME}:absent"})
    with pytest.raises(
        ConfigError, match=r"there is no data set 'hospital' .*did you mean 'hospitals'.*package.module:f"
    ):
        resolve({"data": "hospital"})


def test_runs_are_resumed_and_compared(tmp_path):
    out = tmp_path / "run"
    whole = coterie.run("fedavg", f"{NAME}:clients", out=out, lr=0.1, **QUICK)
    again = coterie.resume(out)
    assert again.clients == whole.clients
    assert again.config.data == f"{NAME}:clients"
    how = {key: value for key, value in QUICK.items() if key != "reference"}
    found = coterie.compare(("local", "fedavg"), 2, f"{NAME}:clients", lr=0.1, **how)
    assert len(found.rows) == 2 * 2 * 3


def test_names_of_packages_are_known(monkeypatch, package_of):
    assert GROUPS["data source"] == "coterie.data_sources"
    package_of("data source", wards=f"{NAME}:clients", hospitals=f"{NAME}:clients")
    assert is_known("wards")
    assert is_known("wards:2")
    assert load("wards:2", 0).names == ("site 0", "site 1")
    assert len(load("hospitals", 0).names) == 8, "ours come first"
    assert not is_known("ward")


def test_newcomers_join_a_run_on_data_that_were_divided(tmp_path):
    out = tmp_path / "run"
    how = {**QUICK, "partition": "iid", "clients": 3, "model": "linear", "rounds": 2, "lr": 0.1}
    coterie.run("fedavg", f"{NAME}:pool", out=out, **how)
    assert coterie.onboard(out, pairs(1, 30, 5, torch.float32)["site 0"], name="late").names == ["late"]
