import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

import coterie
from coterie.core.errors import ConfigError, CoterieWarning, DataError
from coterie.data import SOURCES, load
from coterie.data.download.catalogue import DOWNLOADS
from coterie.data.loading import is_known, read, reading_once
from coterie.data.readers import embedded
from coterie.models import MODELS
from tests.places import SHARED

DATA = os.environ.get("COTERIE_DATA", str(SHARED))
needs_data = pytest.mark.skipif(not Path(DATA, "femnist").exists(), reason="FEMNIST was not found: set COTERIE_DATA")
QUICK = {"rounds": 1, "local_steps": 1, "engine": "loop", "compile": False, "workers": 1, "reference": False}
EMBEDDED = [name for name, source in SOURCES.items() if source.files is None]


@pytest.mark.parametrize("name", EMBEDDED)
def test_embedded_sources_need_no_file_and_train(name, monkeypatch, tmp_path):
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    federation = load(name, 0)
    again = load(name, 0)
    assert torch.equal(federation.x, again.x)
    other = load(name, 1)
    assert any(
        not np.array_equal(a.test, b.test) or not torch.equal(federation.x[a.test], other.x[b.test])
        for a, b in zip(federation.clients.values(), other.clients.values(), strict=True)
    )
    if not name.startswith("synthetic") or name == "synthetic-feature-quantity-label-skew":
        result = coterie.run("fedavg", name, **QUICK)
        assert np.isfinite(result.mean())


def sizes_and_shares(name):
    federation = load(name, 0)
    rows = [np.concatenate([split.train, split.validation, split.test]) for split in federation.clients.values()]
    return [len(own) for own in rows], [
        float((federation.y[torch.from_numpy(own)] == 0).float().mean()) for own in rows
    ]


def test_skews_on_their_own_and_together():
    even, few, skew = [2000] * 10, [2000] * 5 + [500] * 5, [0.5] * 5 + [0.85] * 5
    expected = {
        "feature-skew": (even, [0.5] * 10),
        "quantity-skew": (few, [0.5] * 10),
        "label-skew": (even, skew),
        "only-quantity-skew": (few, [0.5] * 10),
        "only-label-skew": (even, skew),
        "quantity-label-skew": ([2000, 500] * 5, skew),
        "feature-quantity-label-skew": ([2000, 500] * 5, skew),
    }
    for name, (sizes, shares) in expected.items():
        found, share = sizes_and_shares(f"synthetic-{name}")
        assert found == sizes
        np.testing.assert_allclose(share, shares, atol=1e-6)


def same_space(name):
    """How much alike two clients' correlations between features are in class 0, from -1 to 1."""
    federation = load(name, 0)
    seen = []
    for i in (0, 1):
        own = torch.from_numpy(federation.split(i).train)
        seen.append(federation.x[own[federation.y[own] == 0]])
    first, second = (torch.corrcoef(x.T)[torch.triu_indices(30, 30, 1).unbind()] for x in seen)
    return float(torch.corrcoef(torch.stack([first, second]))[0, 1])


def test_feature_skew_is_there_or_not():
    assert same_space("synthetic-only-label-skew") > 0.5
    assert abs(same_space("synthetic-label-skew")) < 0.3


def test_linear_regression_a4_is_the_papers():
    federation = load("linear-regression-a4", 0)
    assert [len(split.train) for split in federation.clients.values()] == [60, 1, 2, 3, 50]
    for k, split in enumerate(federation.clients.values()):
        own = torch.from_numpy(np.concatenate([split.train, split.validation, split.test]))
        x, y = federation.x[own, 0], federation.y[own]
        assert abs(float(x.mean()) - k) < 0.5
        noise = y + x - 4 * k
        assert abs(float(noise.mean())) < 0.4
        assert 0.5 < float(noise.var()) < 1.3  # 0.8


def test_the_sine_curve_has_one_piece_a_client():
    for i, (x, y) in enumerate(embedded.sine_pieces()):
        assert (2 * i / 10 - 1 <= x).all()
        assert (x <= 2 * (i + 1) / 10 - 1).all()
        assert float((y - torch.sin(torch.pi * x[:, 0])).std()) < 0.5


def test_breast_cancer_is_scaled_by_each_client():
    federation = load("breast-cancer", 0, partition="iid", clients=3)
    for split in federation.clients.values():
        train = federation.x[torch.from_numpy(split.train)]
        torch.testing.assert_close(train.mean(0), torch.zeros(30), rtol=0, atol=1e-4)
    assert federation.classes == ("malignant", "benign")


def test_a_partition_can_be_given():
    federation = load("digits", 0, partition="iid", clients=7)
    assert len(federation.names) == 7
    assert sum(len(split[p]) for split in federation.clients.values() for p in ("train", "validation", "test")) == 1797
    with pytest.raises(ConfigError, match="synthetic-label-skew is already split"):
        load("synthetic-label-skew", 0, partition="iid")
    with pytest.raises(ConfigError, match=r"partition, clients: synthetic-label-skew is already divided among clients"):
        coterie.run("fedavg", "synthetic-label-skew", partition="iid", clients=3)
    with pytest.raises(ConfigError, match="there is no partition 'nonsense'"):
        load("digits", 0, partition="nonsense")


def own_file(path, owner=True):
    draw = np.random.default_rng(0)
    arrays = {"x": draw.integers(256, size=(60, 6, 6)).astype(np.uint8), "y": draw.integers(3, size=60)}
    np.savez(path, **arrays, **({"owner": np.repeat(["north", "south"], 30)} if owner else {}))
    return str(path)


def test_a_file_of_ones_own_runs_resumes_and_loads(tmp_path):
    path = own_file(tmp_path / "a.npz")
    result = coterie.run("fedavg", path, model="linear", out=tmp_path / "run", scaling="standard", **QUICK)
    assert [row["client"] for row in result.clients] == ["north", "south"]
    again = coterie.resume(tmp_path / "run")
    assert again.mean() == result.mean()
    model = coterie.load(tmp_path / "run", "south")
    pool = read(path)
    decode = result.task.decode
    assert torch.equal(model(decode(pool.x[:4])), result.model("south")(decode(pool.x[:4])))
    assert '"decode"' in (tmp_path / "run/clients/south/model.json").read_text()


def test_sent140_runs_with_its_network(tmp_path):
    rows = [[str(i), "", "", "", f"word{i % 7} is {i}", "training"] for i in range(10)]
    users = {name: {"x": rows[k:] + rows[:k], "y": [i % 2 for i in range(10)]} for k, name in enumerate(["ann", "bob"])}
    folder = tmp_path / "sent140" / "train"
    folder.mkdir(parents=True)
    (folder / "a.json").write_text(json.dumps({"users": [*users], "user_data": users}))
    settings = {**QUICK, "model": "lstm:hidden=4:wide=8:dim=4", "drop_duplicates": True}
    result = coterie.run("fedavg", "sent140", data_dir=str(tmp_path), **{**settings, "partition": "iid", "clients": 2})
    assert np.isfinite(result.mean())


def test_paths_and_names(tmp_path):
    assert is_known("digits")
    assert not is_known(str(tmp_path / "none.npz"))
    assert is_known(own_file(tmp_path / "a.npz"))
    with pytest.raises(ConfigError, match="there is no data set"):
        load(str(tmp_path / "none.npz"), 0)
    np.savez(tmp_path / "r.npz", x=np.zeros((40, 2)), y=np.arange(40.0))
    with pytest.raises(DataError, match="needs classes"):
        load(str(tmp_path / "r.npz"), 0, partition="dirichlet:1", clients=2)


@pytest.mark.parametrize("name", [name for name, source in SOURCES.items() if source.files is not None])
def test_a_missing_data_set_is_answered_with_what_to_do(name, monkeypatch, tmp_path):
    for key in ("COTERIE_DATA", "XDG_DATA_HOME"):
        monkeypatch.setenv(key, str(tmp_path))
    files = SOURCES[name].files
    if any(Path(place).exists() for place in files.installed):
        pytest.skip("a package has installed it")
    with pytest.raises(DataError, match=f"the data set {files.name} was not found: ") as told:
        load(name, 0)
    command = "emnist" if name.startswith("emnist") else files.name
    assert (f"'coterie data get {command}'" in str(told.value)) == (files.name in DOWNLOADS)
    assert str(tmp_path) in str(told.value)


def test_the_data_folder_given_comes_before_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path / "a"))
    for name in "ab":
        (tmp_path / name / "mnist").mkdir(parents=True)
        (tmp_path / name / "mnist" / "train-images-idx3-ubyte").touch()
    assert SOURCES["mnist"].files.find() == tmp_path / "a" / "mnist"
    assert SOURCES["mnist"].files.find(tmp_path / "b") == tmp_path / "b" / "mnist"


@needs_data
def test_femnist_with_its_writers_and_its_repetitions():
    pool = read("femnist", data_dir=DATA)
    first, position = pool.first_equal, np.arange(len(pool.x))
    again = (first != position) & (pool.owner[first] == pool.owner)
    # As counted for the file: 22 test images repeat one of the same writer's training images, 82 within training.
    assert (again & pool.published_test & ~pool.published_test[first]).sum() == 22
    assert (again & ~pool.published_test).sum() == 82
    with pytest.warns(CoterieWarning, match=r"femnist: \d+ of 1685 test examples are identical to a training example"):
        load("femnist", 0, partition="natural", split="published", data_dir=DATA)
    federation = load("femnist", 0, partition="natural", drop_duplicates=True, data_dir=DATA)
    assert len(federation.names) == 105
    assert federation.names[0] == "f1501_00"


@needs_data
def test_fashion_mnist_in_a_hundred_clients_stays_bytes():
    federation = load("fashion-mnist", 0, partition="dirichlet:0.3", clients=100, data_dir=DATA)
    assert federation.x.dtype == torch.uint8
    assert federation.x.nbytes == 70_000 * 784
    used = np.concatenate([np.concatenate([s.train, s.validation, s.test]) for s in federation.clients.values()])
    assert np.array_equal(np.sort(used), np.arange(70_000))


def test_every_source_tells_its_facts_and_has_settings_that_exist():
    for name, source in SOURCES.items():
        facts = source.facts
        assert all((facts.size, facts.classes, facts.licence, facts.origin)), name
        assert source.defaults["model"].partition(":")[0] in MODELS, name
        assert source.load is not None or "partition" in source.defaults, name


def test_runs_side_by_side_read_a_data_set_once(monkeypatch):
    asked, digits = [], embedded.digits_pool

    def counted(name):
        asked.append(name)
        return digits()

    monkeypatch.setitem(SOURCES, "digits", dataclasses.replace(SOURCES["digits"], pool=counted))
    alone = [load("digits", seed, partition="iid", clients=3) for seed in (0, 1)]
    assert len(asked) == 2
    with reading_once():
        together = [load("digits", seed, partition="iid", clients=3) for seed in (0, 1)]
    assert len(asked) == 3
    for here, there in zip(together, alone, strict=True):
        assert torch.equal(here.x, there.x)
        assert all((a == b).all() for a, b in zip(here.train, there.train, strict=True))
    load("digits", 0, partition="iid", clients=3)
    assert len(asked) == 4
