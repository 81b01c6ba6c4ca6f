import numpy as np
import pytest
import torch

import coterie
from coterie import ConfigError
from coterie.experiment import attack as attacks
from coterie.experiment.attack import attack, attack_setup, copied, flip_labels, hostile_clients, little, tampering
from coterie.testing import kit

HOSTILE = torch.tensor([True, False, False, False])
W = torch.tensor([[9.0, 9.0], [1.0, 0.0], [3.0, 0.0], [2.0, 3.0]])
SENT = torch.zeros(4, 2)


def draw():
    return torch.Generator().manual_seed(0)


def test_sign_flip_and_scaling_go_the_other_way():
    sent = torch.full((4, 2), 8.0)
    assert attacks.sign_flip(W, sent, HOSTILE, draw()).tolist() == [[7.0, 7.0]]
    assert attacks.scaled(W, sent, HOSTILE, draw()).tolist() == [[-2.0, -2.0]]


def test_little_is_the_mean_of_the_honest_less_one_and_a_half_standard_deviations():
    mean, std = np.mean([[1, 0], [3, 0], [2, 3]], 0), np.std([[1, 0], [3, 0], [2, 3]], 0)
    np.testing.assert_allclose(little(W, SENT, HOSTILE, draw())[0], mean - 1.5 * std, rtol=1e-6)


def test_a_copy_is_nearer_to_its_victim_than_any_honest_client():
    found = copied(W, SENT, HOSTILE, draw())
    # The victim is (1, 0), its nearest (3, 0), two away; half of that against its step, which is (1, 0).
    torch.testing.assert_close(found, torch.tensor([[0.0, 0.0]]))


def test_what_is_sent_is_no_longer_than_a_server_accepts():
    w = torch.tensor([[3e6, 4e6], [3.0, 4.0]])
    torch.testing.assert_close(attacks._bounded(w), torch.tensor([[6e5, 8e5], [3.0, 4.0]]))


@pytest.mark.parametrize("name", attacks.MESSAGES)
@pytest.mark.parametrize("method", ["fedavg", "fedmap", "fedamp", "federico", "pfedvmp"])
def test_only_messages_of_hostile_clients_change(method, name):
    seen = []
    sim = kit.simulate(coterie.METHODS[method](), rounds=1)
    false = tampering(name, [1], seed=0)
    sim.tamper = lambda *args: seen.append((args[-1], false(*args))) or args[-1]
    sim.train(2, kit.LOOP)
    before, after = (coterie.tree.pack(each) for each in seen[0])
    honest = torch.tensor([0, 2, 3])
    assert all(torch.equal(before[path][honest], after[path][honest]) for path in before)
    assert any(not torch.equal(before[path][1], after[path][1]) for path in before)


def test_flipped_labels_are_those_of_hostile_training_examples():
    data = kit.federation()
    flipped = flip_labels(data, [2])
    train = torch.from_numpy(data.split(2).train)
    assert torch.equal(flipped.y[train], 2 - data.y[train])
    rest = torch.ones(len(data.y), dtype=torch.bool).index_fill(0, train, False)
    assert torch.equal(flipped.y[rest], data.y[rest])


def alike(clients=7, examples=40):
    """Clients with the same two classes, of which an honest federation gets nearly all right."""
    draw = torch.Generator().manual_seed(0)
    y = torch.arange(examples) % 2
    return [(torch.randn(examples, 5, generator=draw) + 2 * y[:, None] - 1, y) for _ in range(clients)]


def test_an_attack_harms_and_the_median_helps():
    setting = {"data": alike(), "model": "linear", "rounds": 5, "lr": 0.2, "compile": False, "select": "accuracy"}
    honest, attacked, defended = (
        attack(name, 1, "fedavg", **setting, robust=rule)
        for name, rule in ((None, None), ("scaled", None), ("scaled", "median"))
    )
    assert honest.honest == attacked.honest
    assert len(attacked.hostile) == 1
    assert honest.mean > 0.9
    assert attacked.mean < honest.mean - 0.2
    assert defended.mean > honest.mean - 0.02


def test_without_them_is_a_federation_of_the_honest_clients(tmp_path):
    setting = {"model": "linear", "rounds": 3, "lr": 0.2, "compile": False, "engine": "stacked", "select": "accuracy"}
    data = {f"site-{i}": each for i, each in enumerate(alike())}
    found = attack("absent", 2, "fedavg", data, **setting)
    assert set(found.honest) | set(found.hostile) == set(data)
    honest = {name: data[name] for name in found.honest}
    ran = coterie.run("fedavg", honest, **setting, reference=False, report=False, out=tmp_path / "run")
    np.testing.assert_allclose(found.scores, ran.rounds[-1]["test"]["accuracy"], rtol=1e-6)


def test_a_hostile_client_that_diverges_stops_nobody_and_sends_what_is_finite():
    """Its own values are not looked at, but an honest client's are."""
    sim = kit.simulate(coterie.METHODS["fedavg"](), rounds=1)
    seen = []
    false = tampering("sign-flip", [1], seed=0)

    def broken(round, ids, down, ups):
        broke = coterie.tree.map(lambda leaf: leaf.index_fill(0, torch.tensor([1]), torch.nan), ups)
        seen.append(false(round, ids, down, broke))
        return seen[0]

    sim.tamper, sim.hostile = broken, frozenset([1])
    sim.train(2, kit.LOOP)
    assert all(bool(leaf.isfinite().all()) for leaf in coterie.tree.leaves(seen[0]))
    sim.tamper = lambda round, ids, down, ups: coterie.tree.map(lambda leaf: leaf * torch.nan, ups)
    with pytest.raises(coterie.CoterieError, match="client 'site-0' has NaN"):
        sim.train(3, kit.LOOP)


def test_who_is_hostile_depends_on_names_and_seed_only():
    setup = coterie.prepare("fedavg", kit.federation(), rounds=1)
    other = coterie.prepare("fedamp", kit.federation(), rounds=3)
    assert hostile_clients(setup, 2) == hostile_clients(other, 2)
    assert set(hostile_clients(setup, 1)) < set(hostile_clients(setup, 2))


def test_nobody_or_everybody_hostile_and_unknown_attacks_are_refused():
    with pytest.raises(ConfigError, match="between 1 and 3"):
        attack("little", 4, "fedavg", kit.federation(), rounds=1)
    with pytest.raises(ConfigError, match="there is no attack 'nothing'"):
        attack("nothing", 1, "fedavg", kit.federation(), rounds=1)


def test_scores_of_the_last_rounds_are_averaged():
    how = {"data": alike(), "model": "linear", "lr": 0.2, "compile": False, "engine": "stacked", "select": "loss"}
    first, second = (attack("little", 1, "fedavg", rounds=rounds, **how).scores for rounds in (1, 2))
    both = attack("little", 1, "fedavg", rounds=2, last=2, **how).scores
    np.testing.assert_allclose(both, (first + second) / 2, rtol=1e-6)
    assert (first != second).any()
    with pytest.raises(ConfigError, match="last = 3: of 2 rounds"):
        attack("little", 1, "fedavg", rounds=2, last=3, **how)


def test_without_an_attack_nothing_differs_from_a_run(tmp_path):
    setup = coterie.prepare("fedavg", kit.federation(), rounds=2, compile=False, engine="stacked")
    found = attack_setup(setup, None, [0])
    ran = coterie.run(
        "fedavg",
        kit.federation(),
        rounds=2,
        compile=False,
        engine="stacked",
        reference=False,
        report=False,
        out=tmp_path / "run",
    )
    last = ran.rounds[-1]["test"][found.metric]
    np.testing.assert_allclose(found.scores, last[1:], rtol=1e-6)
