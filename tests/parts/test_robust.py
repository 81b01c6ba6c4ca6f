import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie import METHODS, ConfigError
from coterie.core import tree
from coterie.core.method import CountedParams
from coterie.methods.fedavg import FedAvg
from coterie.methods.fedmap import FedMAP
from coterie.parts import robust
from coterie.testing import kit

RULES = (
    *("median", "trimmed:0.25", "krum:1", "multi-krum:1", "geometric-median", "clip:auto"),
    *("nnm:1+median", "nnm:2+trimmed:0.3", "nnm:2+geometric-median", "nnm:2+krum:2"),
)
AVERAGING = [name for name, cls in METHODS.items() if robust.averaged_fields(cls())]


def some(clients=7, size=5, seed=0):
    return torch.randn(clients, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_median_and_trimmed_mean_against_numpy():
    w = some(8)
    torch.testing.assert_close(robust.median(w)[3], torch.from_numpy(np.median(w.numpy(), 0)))
    ordered = w.sort(0).values
    torch.testing.assert_close(robust.trimmed(w, 0.25)[0], ordered[2:6].mean(0))
    torch.testing.assert_close(robust.trimmed(w, 0.0)[0], w.mean(0))


class Large(torch.Tensor):
    """A tensor that says that it has more numbers than `quantile` takes."""

    def numel(self):
        return 2**24 + 1


@pytest.mark.parametrize("clients", [1, 2, 3, 8, 9])
def test_the_median_of_large_models_is_the_same(clients):
    w = some(clients)
    torch.testing.assert_close(robust.median(w.as_subclass(Large)).as_subclass(torch.Tensor), robust.median(w))


def test_krum_chooses_a_model_among_those_that_agree():
    w = torch.tensor([[0.0, 0.0], [0.1, 0.0], [0.0, 0.1], [9.0, 9.0], [-9.0, 9.0]])
    # With f = 1 each model looks at its two nearest: 0.02 for the first, 0.01 + 0.02 for the second and third.
    assert torch.equal(robust.krum(w, 1), w[[0] * 5])
    with pytest.raises(ConfigError, match="needs 7 clients"):
        robust.krum(w, 2)


def test_multi_krum_leaves_out_the_one_that_is_far_from_all():
    w = torch.tensor([[0.0, 0.0], [0.1, 0.0], [0.0, 0.1], [0.1, 0.1], [-9.0, 9.0]])
    torch.testing.assert_close(robust.multi_krum(w, 1), torch.tensor([[0.05, 0.05]]).expand(5, 2))
    torch.testing.assert_close(robust.multi_krum(w, 0), w.mean(0).expand(5, 2))
    with pytest.raises(ConfigError, match="'multi-krum:2' needs 7 clients"):
        robust.multi_krum(w, 2)


def test_geometric_median_has_no_slope():
    """At the minimum of sum ||w_i - z||, the unit vectors from z to the points add up to 0."""
    w = some(9, 3)
    away = w - robust.geometric_median(w)[0]
    torch.testing.assert_close(
        (away / away.norm(dim=1, keepdim=True)).sum(0), torch.zeros(3).double(), atol=1e-5, rtol=0
    )


def test_geometric_median_of_three_points_on_a_line_is_the_middle_one():
    w = torch.tensor([[0.0, 0.0], [1.0, 1.0], [5.0, 5.0]], dtype=torch.float64)
    torch.testing.assert_close(robust.geometric_median(w)[0], w[1], atol=1e-3, rtol=0)


def test_clipping_shortens_only_what_is_far_from_the_median():
    w = torch.tensor([[-1.0], [0.0], [1.0], [100.0], [0.5]])
    torch.testing.assert_close(robust.clip(w, 2.0), torch.tensor([[-1.0], [0.0], [1.0], [2.5], [0.5]]))
    # Distances from the median, 0.5, are 1.5, 0.5, 0.5, 99.5 and 0; their median is 0.5.
    torch.testing.assert_close(robust.clip(w, None), torch.tensor([[0.0], [0.0], [1.0], [1.0], [0.5]]))


@pytest.mark.parametrize(
    "text",
    [
        *("mean", "trimmed", "trimmed:0.5", "krum:-1", "krum:x", "clip:0", "clip:nan", "median:2", "nnm:1", "median+"),
        *("nnm:x+median", "nnm:-1+median", "nnm:1+mean", "nnm:1+nnm:1+median", "median+nnm:1", "clip:auto+median", ""),
    ],
)
def test_rules_that_there_are_not(text):
    with pytest.raises(ValueError, match="choose median"):
        robust.parse(text)


def test_nearest_models_are_mixed_by_hand():
    w = torch.tensor([[0.0], [1.0], [3.0], [100.0]])
    # With one hostile each takes the three nearest: 0, 1, 3 for the first three, and 100, 3, 1 for the last.
    torch.testing.assert_close(robust.nearest_mixed(w, 1), torch.tensor([[4 / 3], [4 / 3], [4 / 3], [104 / 3]]))
    torch.testing.assert_close(robust.nearest_mixed(w, 0), w.mean(0).expand(4, 1))
    torch.testing.assert_close(robust.parse("nnm:1+median")(w), torch.tensor([[4 / 3]]).expand(4, 1))
    with pytest.raises(ConfigError, match="'nnm:2' needs 5 clients"):
        robust.nearest_mixed(w, 2)


@pytest.mark.parametrize("far", [0.0, 1.0, 30.0, 1e6])
@pytest.mark.parametrize("rule", [each for each in RULES if ":1" not in each])  # others were told of one
@settings(max_examples=10, deadline=None, derandomize=True)
@given(st.integers(0, 2**31))
def test_two_of_nine_move_no_rule_beyond_what_the_others_differ(rule, far, seed):
    """Wherever the two are, together or not, the mean that the server takes stays near the honest ones'."""
    draw = torch.Generator().manual_seed(seed)
    honest = torch.randn(7, 5, generator=draw, dtype=torch.float64)
    away = far * torch.randn(2, 5, generator=draw, dtype=torch.float64)
    mean = honest.mean(0)
    widest = (honest - mean).norm(dim=1).max()
    found = robust.parse(rule)(torch.cat([honest, away]))
    # The worst is the clipped mean: two of nine at the median distance from a median that is within the honest ones.
    assert (found.mean(0) - mean).norm() <= 2 * widest


@pytest.mark.parametrize("rule", RULES)
def test_no_rule_asks_in_which_order_clients_are(rule):
    w, order = some(9), torch.randperm(9, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(robust.parse(rule)(w[order]), robust.parse(rule)(w)[order])


@pytest.mark.parametrize("rule", RULES)
def test_no_rule_asks_where_the_origin_is(rule):
    w = some(9)
    torch.testing.assert_close(robust.parse(rule)(w + 7), robust.parse(rule)(w) + 7)


@pytest.mark.parametrize("rule", RULES)
def test_equal_models_stay_as_they_are(rule):
    w = some(1).expand(7, -1)
    torch.testing.assert_close(robust.parse(rule)(w), w)


@pytest.mark.parametrize(
    ("text", "fewest"), [("median", 1), ("trimmed:0.2", 1), ("krum:1", 5), ("multi-krum:2", 7), ("nnm:2+krum:1", 5)]
)
def test_how_many_clients_a_rule_needs(text, fewest):
    assert robust.fewest(text) == fewest


def test_the_wrapper_is_the_rule_on_all_leaves_together():
    """Two leaves and an integer one; weights no longer matter, since all are given the same model."""
    rows = {"a": some(5, 4).float(), "b": some(5, 2, 1).float(), "steps": torch.tensor([1, 2, 3, 4, 9])}
    ups = CountedParams(rows, torch.tensor([1.0, 100.0, 1.0, 1.0, 1.0]))
    method = robust.robust(FedAvg(), "median")
    new = method.aggregate(tree.rows(rows, 0), torch.arange(5), ups)
    torch.testing.assert_close(new["a"], rows["a"].median(0).values)
    assert int(new["steps"]) == 3
    assert method == FedAvg()
    assert FedAvg().aggregate(tree.rows(rows, 0), torch.arange(5), ups)["a"].ne(new["a"]).any()


def test_one_client_is_left_alone():
    ups = CountedParams({"a": some(1, 4)}, torch.ones(1))
    assert torch.equal(robust.robust(FedAvg(), "krum:1").aggregate({}, torch.arange(1), ups)["a"], ups.params["a"][0])


@pytest.mark.parametrize("name", AVERAGING)
def test_one_client_cannot_move_the_server_of_a_method_that_averages(name):
    """One client of four sends models of a million; with the median, no number of the server's is near that."""
    plain, seen = METHODS[name](), []
    sim = kit.simulate(plain, rounds=1)
    server = sim.state.server
    sim.tamper = lambda round, ids, down, ups: seen.append(ups) or ups
    sim.train(2, kit.LOOP)
    ids = torch.arange(len(kit.SIZES))

    def million(leaf):
        return leaf.index_fill(0, ids[:1], 1e6 if leaf.is_floating_point() else 1)

    fields = robust.averaged_fields(plain)
    false = seen[0]._replace(**{field: tree.map(million, getattr(seen[0], field)) for field in fields})
    for method, moves in ((plain, True), (robust.robust(plain, "median"), False)):
        new = tree.leaves(method.aggregate(server, ids, false))
        assert (max(float(leaf.abs().max()) for leaf in new if leaf.is_floating_point()) > 1e4) == moves


@pytest.mark.parametrize(
    "method", [METHODS["fedamp"](), METHODS["ifca"](), METHODS["local"](), FedMAP(prior="laplace")]
)
def test_methods_that_do_not_average_are_refused(method):
    with pytest.raises(ConfigError, match="does not average"):
        robust.robust(method, "median")
