import math

import numpy as np
import pytest

from coterie.evaluation.significance import signed_rank
from coterie.experiment.reproduce.scores import at_protocol, client_values, holm, pairs_of, row_of
from coterie.experiment.reproduce.tables import Entry, Protocol

from .kit import record, small_table

LAST = Protocol("last", at="last")
BEST = Protocol("best")
EXAMPLES = Protocol("examples", over="examples")
VARIATION = Protocol("variation", over="variation")
# Two clients with 10 and 30 test examples. Over clients, round 2 is best (0.6); over examples round 3 (0.5).
ROUNDS = {1: (0.2, 0.2), 2: (1.0, 0.2), 3: (0.2, 0.6), 4: (0.1, 0.1)}


@pytest.mark.parametrize(
    ("protocol", "number"), [(LAST, 10.0), (BEST, 60.0), (EXAMPLES, 50.0), (VARIATION, 100 * 0.2 / 0.4)]
)
def test_protocols_take_the_round_and_the_average_that_they_say(protocol, number):
    row = row_of(Entry("a", "fedavg"), protocol, {0: record(ROUNDS, selected=1)})
    assert row.protocol == [pytest.approx(number)]
    if protocol is not VARIATION:
        assert row.selected == [pytest.approx(20.0)]
    assert row.rounds == [1]
    assert row.megabytes == pytest.approx(1.0)  # 4 MB in 4 rounds


def test_the_model_for_everybody_is_scored_where_a_row_asks_for_it():
    entry = Entry("a", "pfedme", which="global_")
    found = record(ROUNDS, part="global_test")
    assert row_of(entry, BEST, {0: found}).protocol == [pytest.approx(60.0)]
    assert row_of(Entry("a", "pfedme"), BEST, {0: found}).protocol == [0.0]
    assert at_protocol(found, "global_", EXAMPLES) == 2


def test_a_row_that_the_paper_scores_otherwise_is_scored_alike_at_the_selected_round():
    found = record({1: (0.5, 0.5)})
    found["rounds"][0]["test"]["balanced_accuracy"] = [0.1, 0.3]
    balanced = Protocol("last", "balanced_accuracy", "last")
    row = row_of(Entry("Individual", "local", metric="accuracy"), balanced, {0: found})
    assert (row.protocol, row.selected) == ([50.0], [20.0])


def test_models_sent_are_counted_for_each_client_and_round():
    """FedAvg: 8 bytes down and up, for two clients of a model of 8 bytes, in each of four rounds."""
    found = record(ROUNDS, bytes=[4 * 16, 4 * 16], model_bytes=8)
    assert row_of(Entry("a", "fedavg"), BEST, {0: found}).models == 2.0
    assert row_of(Entry("a", "fedavg"), BEST, {0: record(ROUNDS)}).models is None


def test_missing_values_are_left_out():
    found = record({1: (None, 0.5), 2: (0.1, 0.3)})
    assert row_of(Entry("a", "fedavg"), BEST, {0: found}).protocol == [pytest.approx(50.0)]
    assert np.isnan(client_values(found, Entry("a", "fedavg"), BEST, selected=True)[0])


def test_holm():
    """By hand: 3 x 0.01, 2 x 0.03, and 0.04, which must not be below the one before it."""
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_rows_are_compared_over_the_clients_of_all_seeds():
    """Every client of every seed has one more point by the first method: with 8 clients, p = 2 / 2^8."""
    sizes = (10,) * 4
    ours = {
        seed: record({1: np.linspace(0.2, 0.5, 4) + 0.01 * (1 + seed)}, sizes=sizes, key=f"a{seed}") for seed in (0, 1)
    }
    base = {seed: record({1: np.linspace(0.2, 0.5, 4)}, sizes=sizes, key=f"b{seed}") for seed in (0, 1)}
    entries = (Entry("ours", "fedprox"), Entry("base", "local"), Entry("base again", "local"))
    table = small_table(entries=entries)
    (pair,) = pairs_of(table, {"ours": ours, "base": base, "base again": base})  # the same runs are not compared
    assert (pair.first, pair.second, pair.clients) == ("ours", "base", 8)
    assert pair.gain == pytest.approx(1.5)
    assert pair.sd == pytest.approx(np.std([1, 2], ddof=1), abs=1e-3)
    assert pair.p == pytest.approx(signed_rank(np.full(8, 0.01))["p"], rel=1e-2)
    # If the clients are the same for all seeds, there are four: each with its mean over the seeds.
    (same,) = pairs_of(small_table(entries=entries, redrawn=False), {"ours": ours, "base": base})
    assert (same.clients, same.p) == (4, 0.125)


def test_pairs_are_of_the_seeds_that_both_have():
    ours = {0: record({1: (0.3, 0.4)}, key="a0"), 1: record({1: (0.9, 0.9)}, key="a1")}
    base = {0: record({1: (0.2, 0.2)}, key="b0")}
    table = small_table(entries=(Entry("ours", "fedprox"), Entry("base", "local")))
    (pair,) = pairs_of(table, {"ours": ours, "base": base})
    assert pair.gain == pytest.approx(15.0)
    assert math.isnan(pair.sd)
    assert pairs_of(table, {"ours": {1: ours[1]}, "base": base}) == []
