import dataclasses

import pytest

import coterie
from coterie.core import extensions
from coterie.core.errors import ConfigError
from coterie.core.optimizers import SGD, Adam
from coterie.core.schedules import Cosine, Warmup
from coterie.core.toml import read_toml
from coterie.core.wrapped import Clipped, Paced
from coterie.engine.samplers import BySize
from coterie.experiment.execute import local_like
from coterie.experiment.resolve import resolve
from coterie.experiment.setup import prepare
from coterie.methods import FedAMP, FedAvg
from coterie.parts.server_optimizers import FedAdam
from coterie.testing.kit import KillAfter, Killed, without_times
from tests.experiment.conftest import QUICK, two_kinds

ALL = {
    "schedule": "warmup:rounds=1:then=cosine:least=0.1",
    "clip_gradient": 1.5,
    "clip_gradient_value": 0.5,
    "sampler": "by-size",
    "server_optimizer": "fedadam:lr=0.05",
}


def by_thirds(clients, number, round, seed):
    return [name for i, name in enumerate(clients) if i % 3 == round % 3][:number]


def test_the_configuration_holds_things_and_a_file_their_text():
    how = {"method": "fedavg", "optimizer": {"lr": 0.1}}
    config, method = resolve({**how, "rounds": 4, **ALL})
    assert config.schedule == Warmup(1.0, then=Cosine(0.1))
    assert config.sampler == BySize()
    assert config.server_optimizer == FedAdam(0.05)
    assert method.optimizer == Paced(Clipped(SGD(0.1), 1.5, 0.5))
    written = config.to_file()
    assert written["schedule"] == "warmup:rounds=1.0:start=0.1:per=round:then=cosine:least=0.1:per=round"
    assert written["server_optimizer"] == "fedadam:lr=0.05:beta1=0.9:beta2=0.99:tau=0.001"
    again, same = resolve({key: value for key, value in written.items() if value is not None and key != "fraction"})
    assert (again.schedule, again.sampler, again.server_optimizer) == (
        config.schedule,
        config.sampler,
        config.server_optimizer,
    )
    assert same.optimizer == method.optimizer
    assert resolve(how)[1].optimizer == SGD(0.1), "nothing is wrapped around what has no such settings"


def test_all_problems_at_once():
    wrong = {
        "schedule": "cosin",
        "sampler": "by-sise",
        "server_optimizer": "fedadam:lr=-1:gamma=2",
        "clip_gradient": -1,
        "optimizer": {"name": "adamm"},
        "rounds": 0,
    }
    with pytest.raises(ConfigError) as error:
        resolve(wrong)
    said = str(error.value)
    for words in (
        "schedule = 'cosin': there is no schedule 'cosin' (did you mean 'cosine'?)",
        "(did you mean 'by-size'?)",
        "server optimizer fedadam needs a number > 0",
        "server optimizer fedadam has no 'gamma'",
        "clip_gradient = -1",
        "there is no optimizer 'adamm' (did you mean 'adam'?)",
        "rounds = 0",
    ):
        assert words in said, words


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"schedule": lambda t, rounds: 1 - t}, "at t = 2 of 4 rounds it returns -1"),
        ({"method": "fedamp", "server_optimizer": "fedadam"}, "FedAMP cannot have one, since its server does not only"),
        ({"clip_gradient": 1.0, "epsilon": 4}, "the gradient of each example is clipped already, by clip"),
    ],
)
def test_what_cannot_be_is_said_before_the_run(settings, words):
    with pytest.raises(ConfigError, match=words):
        resolve({"method": "fedavg", "rounds": 4, **settings})


def test_a_sampler_is_asked_before_the_run():
    with pytest.raises(ConfigError, match=r"it fails in round 1: ZeroDivisionError.*test_training_settings.py"):
        prepare("fedavg", two_kinds(4), sampler=lambda clients, number, round, seed: 1 / 0, fraction=0.5, **QUICK)


def test_the_local_reference_has_the_same_schedule_and_clipping():
    setup = prepare("fedavg", two_kinds(4), **ALL, **QUICK)
    alone = setup.with_method(local_like(setup.method))
    assert alone.method.optimizer == setup.method.optimizer == Paced(Clipped(SGD(0.05), 1.5, 0.5))
    assert alone.config.plan() == setup.config.plan()
    other = setup.with_method(FedAvg(Adam(0.1)))
    assert other.method.optimizer == Paced(Clipped(Adam(0.1), 1.5, 0.5))
    assert other.config.optimizer["name"] == "adam"


def test_clipping_around_the_optimiser_of_an_instance_is_kept():
    quick = {key: value for key, value in QUICK.items() if key != "lr"}
    setup = prepare(FedAvg(Clipped(SGD(0.3), 2.0)), two_kinds(4), schedule="cosine", **quick)
    assert setup.method.optimizer == Paced(Clipped(SGD(0.3), 2.0))
    assert (setup.config.clip_gradient, setup.config.optimizer["lr"]) == (2.0, 0.3)
    with pytest.raises(ConfigError, match="clipped already"):
        prepare(FedAvg(Clipped(SGD(0.3), 2.0)), two_kinds(4), epsilon=4, **quick)


def test_a_resumed_run_is_the_same_bits(tmp_path):
    """Schedule, sampler, the server's memory: all is in the checkpoint, or a function of the round."""
    how = {**QUICK, "rounds": 4, "fraction": 0.5, **ALL, "schedule": "cosine:per=step", "reference": False}
    whole = coterie.run("fedavg", two_kinds(6), out=tmp_path / "whole", **how)
    with pytest.raises(Killed):
        coterie.run("fedavg", two_kinds(6), out=tmp_path / "killed", progress=KillAfter(2), **how)
    resumed = coterie.resume(tmp_path / "killed", data=two_kinds(6))
    assert without_times(resumed.rounds) == without_times(whole.rounds)
    assert {len(row["participants"]) for row in whole.rounds} == {3}
    assert read_toml(tmp_path / "whole" / "config.toml")["sampler"] == "by-size"
    card = (tmp_path / "whole" / "clients" / whole.names[0] / "card.md").read_text()
    assert "| schedule | cosine:least=0.0:per=step |" in card
    assert "| sampler | by-size |" in card


def test_what_came_from_python_is_given_again(tmp_path):
    def inverse(t, rounds):
        return 1 / (1 + t)

    @dataclasses.dataclass(frozen=True)
    class Slow(SGD):
        pass

    how = {**QUICK, "lr": None, "fraction": 0.7, "reference": False}
    coterie.run(
        "fedavg", two_kinds(4), out=tmp_path / "run", schedule=inverse, optimizer=Slow(0.1), sampler=by_thirds, **how
    )
    written = read_toml(tmp_path / "run" / "config.toml")
    assert (written["schedule"], written["optimizer"]["name"]) == ("own-schedule", "own-optimizer")
    assert written["sampler"] == "tests.experiment.test_training_settings:by_thirds"
    with pytest.raises(ConfigError) as error:
        coterie.resume(tmp_path / "run", data=two_kinds(4))
    assert "give it again, as schedule=" in str(error.value)
    assert "as optimizer=" in str(error.value)
    with pytest.raises(ConfigError, match="sampler: a run is resumed as it began"):
        coterie.resume(tmp_path / "run", data=two_kinds(4), schedule=inverse, sampler="uniform")
    again = coterie.resume(tmp_path / "run", data=two_kinds(4), schedule=inverse, optimizer=Slow(0.1))
    assert again.config.schedule is inverse


def test_budgets_follow_the_sampler():
    """In turns, each of 4 clients takes part in 2 of 4 rounds: half as many as with everybody, and nobody more."""
    how = {**QUICK, "rounds": 4, "noise": 1.0, "reference": False}
    turns = prepare("fedavg", two_kinds(4), sampler="round-robin", fraction=0.5, **how)
    everyone = prepare("fedavg", two_kinds(4), **how)
    assert len({round(value, 6) for value in turns.budget.epsilons.values()}) <= len(set(turns.federation.sizes))
    assert turns.budget.epsilon < everyone.budget.epsilon
    parts = {"privacy": "site-central", "fraction": 0.125, "noise": 2.0, "rounds": 40}
    uniform, by_size = (
        prepare("fedavg", two_kinds(8), sampler=who, **(how | parts)).budget.epsilon for who in (None, "by-size")
    )
    assert uniform < by_size, "only a uniform sample makes the budget smaller"


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_a_schedule_does_not_change_what_privacy_costs(method):
    how = {**QUICK, "noise": 1.0, "reference": False}
    plain, paced = (
        coterie.run(method, two_kinds(4), schedule=schedule, **how) for schedule in (None, "warmup:rounds=9:per=step")
    )
    assert plain.budget == paced.budget
    assert plain.rounds[1]["info"]["loss"] != paced.rounds[1]["info"]["loss"]


def test_with_privacy_of_sites_the_server_steps_after_the_noise():
    how = {**QUICK, "rounds": 1, "noise": 0.5, "privacy": "site-central", "reference": False, "clip_gradient": 1.0}
    plain = coterie.run("fedavg", two_kinds(4), **how)
    stepped = coterie.run("fedavg", two_kinds(4), server_optimizer="fedavgm:momentum=0", **how)
    losses = [result.rounds[0]["validation"]["loss"] for result in (plain, stepped)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_newcomer_has_its_own_copy_of_the_server_and_its_memory():
    """Whoever is sampled by name, it joins a server that has an optimiser."""
    how = {**QUICK, **ALL, "reference": False, "holdout": 0.2, "fraction": 0.5}
    for method in ("fedavg", "scaffold"):
        result = coterie.run(method, two_kinds(5), **(how | {"sampler": by_thirds}))
        (joined,) = result.onboarded
        assert len(joined.clients) == 1


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package with a schedule, an optimiser, a sampler and an optimiser of the server."""
    (tmp_path / "adding.py").write_text(
        "from dataclasses import dataclass\n"
        "from coterie import SGD, Sampler, Schedule\n"
        "@dataclass(frozen=True)\n"
        "class Restarts(Schedule):\n"
        "    period: int = 2\n"
        "    def __call__(self, t, rounds):\n"
        "        return 1 / (1 + t % self.period)\n"
        "@dataclass(frozen=True)\n"
        "class Plain(SGD):\n"
        "    spare: float = 1.0\n"
        "def first(clients, number, round, seed):\n"
        "    return list(clients)[:number]\n"
    )
    facts = tmp_path / "adding-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: adding\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(
        "[coterie.schedules]\nwarm-restarts = adding:Restarts\n[coterie.optimizers]\nplain = adding:Plain\n"
        "[coterie.samplers]\nfirst = adding:first\n[coterie.server_optimizers]\nplain = adding:Plain\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    extensions.added.cache_clear()
    yield
    extensions.added.cache_clear()


def test_a_package_adds_each_kind(package):
    how = {"sampler": "first", "server_optimizer": "plain:lr=0.5", "fraction": 0.5}
    setup = prepare(
        "fedavg", two_kinds(4), schedule="warm-restarts:period=3", optimizer="plain", spare=2, **how, **QUICK
    )
    assert setup.config.schedule(4, 8) == 0.5
    assert setup.config.optimizer == {**setup.config.optimizer, "name": "adding:Plain", "spare": 2.0}
    assert setup.config.server_optimizer.lr == 0.5
    assert setup.config.to_file()["sampler"] == "adding:first"
    assert FedAMP().stepped is None
