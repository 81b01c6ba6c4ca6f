import csv
import dataclasses

import pytest
import torch

import coterie
from coterie import METHODS
from coterie.core import rng, tree
from coterie.core.errors import CheckpointError, ConfigError, DataError
from coterie.core.task import Task
from coterie.evaluation import score
from coterie.experiment.execute import execute
from coterie.experiment.progress import Silent
from coterie.experiment.setup import prepare
from coterie.experiment.take_home.onboard import Finished, grown, join, onboard, open_run
from coterie.parts.class_moments import centroid_head
from tests.experiment.conftest import QUICK, two_kinds


def parts(method, **settings):
    """(what a newcomer joins, its site) of a run in memory."""
    setup = prepare(method, two_kinds(), holdout=0.2, **{**QUICK, **settings})
    server = execute(setup, None, Silent(), resume=False).server
    finished = Finished(setup.config, setup.method, setup.task, setup.metric, setup.federation.names, server)
    return finished, setup.held_out


def held_out_pair(name):
    return two_kinds()[name]


# Every method


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_a_newcomer_a_model(joined, method):
    result = joined(method)
    (newcomer,) = result.onboarded
    name = newcomer.names[0]
    assert name not in result.names
    assert len(result.names) == 4
    with (result.path / "onboarded.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert row["client"] == name
    site = prepare(method, two_kinds(), holdout=0.2, **QUICK).held_out
    test = site.split(0).test
    with torch.no_grad():
        outputs = coterie.load(result.path, name)(site.x[test])
    found = score(newcomer.task, outputs, site.y[test], torch.zeros(len(test), dtype=torch.long), 1)
    assert float(row["test_accuracy"]) == pytest.approx(found["accuracy"][0])
    assert float(row["test_loss"]) == pytest.approx(found["loss"][0], rel=1e-5)
    if method != "local":
        assert float(row["low"]) <= float(row["gain"]) <= float(row["high"])
        assert row["verdict"] in ("gains", "loses", "undecided")


@pytest.mark.parametrize("method", METHODS)
def test_from_the_folder_it_is_the_same_and_the_others_stay(joined, method):
    """Without any other client's data; a held-out client's own examples are split as the federation split them."""
    result = joined(method)
    (held_out,) = result.onboarded
    name = held_out.names[0]
    before = {path: path.read_bytes() for path in result.path.rglob("*") if path.is_file() and name not in str(path)}
    again = onboard(result.path, held_out_pair(name), name=name)
    for ours, theirs in zip(tree.leaves(again.views), tree.leaves(held_out.views), strict=True):
        assert torch.equal(ours, theirs)
    assert again.clients == held_out.clients
    assert before == {path: path.read_bytes() for path in before}


@pytest.mark.parametrize("method", METHODS)
def test_the_servers_rows_of_the_others_stay(joined, method):
    result = joined(method)
    old, new = tree.pack(result.server), tree.pack(result.onboarded[0].server)
    rows = {"fedamp": ["w"], "heurfedamp": ["w"], "federico": ["models"], "fedep-ft": ["damping"]}.get(method)
    if method == "fedfomo":  # it counts its rounds
        rows = [name for name in result.server._fields if name != "round"]
    for name, leaf in new.items():
        if rows is None or name.split("/")[0] in rows:
            assert torch.equal(leaf[tuple(map(slice, old[name].shape))] if leaf.ndim else leaf, old[name]), name


def test_the_finished_server_is_not_modified():
    finished, site = parts("federico")
    kept = tree.clone(finished.server)
    join(finished, site, Silent())
    for before, after in zip(tree.leaves(kept), tree.leaves(finished.server), strict=True):
        assert torch.equal(before, after)


# What each does, where it is known


def view(result):
    return tree.rows(result.views, 0)


def test_local_is_local_training():
    finished, site = parts("local")
    newcomer = join(finished, site, Silent())
    alone = coterie.run("local", site, **QUICK)
    assert all(torch.equal(view(newcomer)[key], value) for key, value in view(alone).items())
    assert newcomer.reference is None


@pytest.mark.parametrize("method", ["fedavg", "fedprox"])
def test_the_average_is_used_as_it_is(method):
    finished, site = parts(method)
    assert all(torch.equal(view(join(finished, site, Silent()))[k], v) for k, v in finished.server.items())


def test_a_map_fit_from_the_prior():
    """With a wide prior, training from its centre; with a narrow one, the centre."""
    finished, site = parts("fedmap", sigma2=1e12)
    gamma = finished.server.gamma
    method = {"optimizer": "adam", "lr": finished.config.optimizer["lr"]}
    begun = finished.task.module(gamma)
    settings = {**QUICK, "model": begun, "reference": False, **method}
    settings["optimizer"] = finished.config.optimizer["name"]
    free = coterie.run("local", site, **settings)
    newcomer = join(finished, site, Silent())
    assert newcomer.selected == free.selected
    assert all(torch.allclose(view(newcomer)[k], v, atol=1e-6) for k, v in view(free).items())
    assert not all(torch.allclose(view(newcomer)[k], v, atol=1e-4) for k, v in gamma.items())
    tight = dataclasses.replace(finished, method=dataclasses.replace(finished.method, sigma2=0.06))
    near = view(join(tight, site, Silent()))
    assert tree.sqdist(near, gamma) < 0.5 * tree.sqdist(view(newcomer), gamma)


@pytest.mark.parametrize("method", ["fedper", "fedrep", "pfedvmp"])
def test_a_new_head_on_the_shared_body(method):
    finished, site = parts(method)
    body = finished.server.body if method == "pfedvmp" else finished.server
    found = view(join(finished, site, Silent()))
    assert all(torch.equal(found[name], value) for name, value in body.items())
    assert not torch.equal(found["5.weight"], finished.task.init()["5.weight"])


def test_batch_norm_begins_as_the_initial_models_and_alone_is_trained():
    """Nobody ever sent theirs, so that there is no mean of the others' to begin at."""

    def model():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))

    finished, site = parts("fedbn", model=model())
    found, initial = view(join(finished, site, Silent())), finished.task.init()
    assert finished.server.keys() == initial.keys() - finished.task.norm_names
    assert all(torch.equal(found[name], value) for name, value in finished.server.items())
    assert not torch.allclose(found["1.weight"], initial["1.weight"], atol=1e-6)
    frozen = dataclasses.replace(finished, method=dataclasses.replace(finished.method, optimizer=coterie.SGD(1e-12)))
    idle = view(join(frozen, site, Silent()))
    assert torch.allclose(idle["1.weight"], initial["1.weight"], atol=1e-6)
    assert not torch.allclose(idle["1.running_mean"], initial["1.running_mean"], atol=1e-3)  # those of its own data


@pytest.mark.parametrize("method", ["fedamp", "heurfedamp", "federico"])
def test_it_learns_from_its_own_kind(method):
    """The newcomer's labels are opposite to those of half of the others."""
    options = {"neighbours": 4} if method == "federico" else {"contrast": 6.0}
    finished, site = parts(method, rounds=6, local_steps=6, lr=0.2, optimizer="sgd", **options)
    newcomer = join(finished, site, Silent())
    weight = torch.tensor(newcomer.rounds[-1]["server"]["collaboration"])[-1]
    kind = [int(name.removeprefix("site-")) % 2 for name in (*finished.names, *site.names)]
    same = sum(weight[j] for j in range(4) if kind[j] == kind[4]) / sum(kind[j] == kind[4] for j in range(4))
    other = sum(weight[j] for j in range(4) if kind[j] != kind[4]) / sum(kind[j] != kind[4] for j in range(4))
    assert weight.sum() == pytest.approx(1, abs=1e-5)
    assert same > 1.2 * other


def test_the_head_of_the_nearest_centroid():
    torch.manual_seed(0)
    task = Task(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 3)), num_classes=3)
    centroid, known = torch.randn(3, 3), torch.tensor([1.0, 1.0, 0.0])
    params = {**task.init(), **centroid_head(task, centroid, known, 5.0)}
    z = torch.randn(7, 3)
    distance = ((z[:, None] - centroid) ** 2).mean(-1)
    logits = task.head(params, z)
    assert torch.allclose(logits[:, 0] - logits[:, 1], 5.0 * (distance[:, 1] - distance[:, 0]), atol=1e-4)
    assert bool((logits.softmax(1)[:, 2] < 0.05).all())
    assert centroid_head(task, torch.randn(3, 5), known, 5.0) == {}


def test_a_grown_server_has_one_more_client():
    finished, site = parts("federico")
    names = [*finished.names, *site.names]
    server = grown(finished.method, finished.task, finished.server, names)
    assert torch.equal(server.keys, rng.keys_of(names))
    assert torch.equal(server.losses.tracked[:4, :4], finished.server.losses.tracked)
    assert not server.heard[4]
    assert not server.losses.visited[4].any()
    assert server.models["1.weight"].shape[0] == 5


# The comparison, and what is held out


def test_alone_is_local_training_from_the_runs_initial_model():
    finished, site = parts("fedper")
    alone = coterie.run("local", site, **QUICK)
    reference = join(finished, site, Silent()).reference
    assert all(torch.equal(view(reference)[key], value) for key, value in view(alone).items())


def test_who_is_held_out():
    whole = prepare("fedavg", two_kinds(10), **QUICK).federation.names
    first, again, other = (prepare("fedavg", two_kinds(10), holdout=0.3, seed=s, **QUICK) for s in (0, 0, 3))
    assert first.held_out.names == again.held_out.names != other.held_out.names
    assert len(first.held_out.names) == 3
    assert sorted([*first.federation.names, *first.held_out.names]) == sorted(whole)
    with pytest.raises(ConfigError, match="of 5 clients, nobody is left to take part"):
        prepare("fedavg", two_kinds(5), holdout=0.95, **QUICK)
    with pytest.raises(ConfigError, match="a newcomer joins through a server"):
        prepare("fedavg", two_kinds(5), holdout=0.2, topology="ring", **QUICK)


def test_held_out_clients_take_no_part(joined):
    result = joined("fedavg")
    name = result.onboarded[0].names[0]
    assert all(name not in record["participants"] for record in result.rounds)
    without = {key: pair for key, pair in two_kinds().items() if key != name}
    same = coterie.run("fedavg", without, reference=False, **QUICK)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(same.views), tree.leaves(result.views), strict=True))


def test_resuming_onboards_again(joined):
    result = joined("fedmap")
    again = coterie.resume(result.path, data=two_kinds())
    assert again.onboarded[0].clients == result.onboarded[0].clients


# What is wrong is told


def test_bad_input(joined, tmp_path):
    result = joined("fedmap")
    pair = held_out_pair("site-1")
    with pytest.raises(ConfigError, match="took part in this run: give the newcomer another name"):
        onboard(result.path, pair, name=result.names[0])
    with pytest.raises(DataError, match=r"'new': inputs of shape \(3,\); this run has \(4,\)"):
        onboard(result.path, (pair[0][:, :3], pair[1]), name="new")
    with pytest.raises(CheckpointError, match="is not a run folder"):
        onboard(tmp_path, pair)
    peers = tmp_path / "peers"
    coterie.run("fedavg", two_kinds(), out=peers, topology="ring", reference=False, **{**QUICK, "rounds": 1})
    with pytest.raises(ConfigError, match="has no server to join: its clients are peers"):
        onboard(peers, pair)


def test_a_run_without_its_checkpoint_is_named(tmp_path):
    out = tmp_path / "run"
    coterie.run("fedavg", two_kinds(), out=out, reference=False, **{**QUICK, "rounds": 1})
    (out / "checkpoints" / "round-00001" / "state.json").write_text('{"format": 99}')
    with pytest.raises(CheckpointError, match="newer version of Coterie"):
        open_run(out)
    (out / "checkpoints" / "round-00001").rename(out / "elsewhere")
    with pytest.raises(CheckpointError, match="has no checkpoint of round 1, the selected one"):
        open_run(out)


def test_a_server_keeps_its_number_of_clients():
    """SCAFFOLD's N stays that of the run: the newcomer is not averaged."""
    finished, site = parts("scaffold")
    server = grown(finished.method, finished.task, finished.server, [*finished.names, *site.names])
    assert float(server.size) == 4.0
