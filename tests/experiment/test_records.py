"""Which round is the best."""

import math

from coterie.experiment.records import better, score_of


def test_a_round_with_a_defined_metric_beats_one_without():
    def scored(*values):
        return score_of("auroc", None, {"validation": {"auroc": list(values)}})

    assert better(scored(0.2, math.nan), scored(math.nan, math.nan))
    assert not better(scored(math.nan, math.nan), scored(0.2, math.nan))
    assert not better(scored(0.2, math.nan), scored(0.2, 0.2))


def test_where_the_auroc_is_defined_for_nobody_the_loss_selects():
    undefined = [{"validation": {"auroc": [math.nan, math.nan], "loss": [a, a]}} for a in (0.7, 0.4)]
    assert score_of("auroc", None, undefined[1]) > score_of("auroc", None, undefined[0])
