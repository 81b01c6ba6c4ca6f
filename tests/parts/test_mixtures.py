import torch

from coterie import testing
from coterie.core import tree
from coterie.core.optimizers import SGD
from coterie.core.routes import NOBODY
from coterie.core.training import train
from coterie.parts.mixtures import (
    Contributions,
    apply_contributions,
    capped_contributions,
    choose_owners,
    contributions,
    only_finite,
)

MODELS = {"w": torch.tensor([[10.0], [20.0]]), "mean": torch.tensor([[1.0], [2.0]])}
AT = torch.tensor([[0, 1], [0, -1]])  # what the second sender has beside is for a model elsewhere
STEPS = Contributions(
    torch.tensor([[0.9, 0.5], [0.6, 7.0]]),
    {"w": torch.tensor([[[0.9], [1.0]], [[2.1], [99.0]]])},  # weighted already
    {"mean": torch.tensor([[[0.3], [0.2]], [[0.6], [99.0]]])},
)


def test_ways_are_divided_by_their_total_weight_if_that_is_above_one():
    new, states = apply_contributions(None, MODELS, (), AT, STEPS, idle_below=0.0)
    torch.testing.assert_close(new["w"], torch.tensor([[10 - 3.0 / 1.5], [20 - 1.0]]))
    torch.testing.assert_close(new["mean"], torch.tensor([[1 + 0.9 / 1.5], [2 + 0.2]]))
    assert states == ()


def test_gradients_are_added_up_and_buffers_divided_all_the_same():
    sgd = SGD(0.1)
    states = torch.func.vmap(sgd.init)({"w": MODELS["w"]})
    new, _ = apply_contributions(sgd, MODELS, states, AT, STEPS, idle_below=0.0)
    torch.testing.assert_close(new["w"], torch.tensor([[10 - 0.1 * 3.0], [20 - 0.1 * 1.0]]))
    torch.testing.assert_close(new["mean"], torch.tensor([[1 + 0.9 / 1.5], [2 + 0.2]]))


def test_a_model_of_little_weight_stays():
    new, _ = apply_contributions(None, MODELS, (), AT, STEPS, idle_below=0.6)
    torch.testing.assert_close(new["w"], torch.tensor([[8.0], [20.0]]))
    torch.testing.assert_close(new["mean"], torch.tensor([[1.6], [2.0]]))


def test_a_client_comes_first_and_then_the_highest_scores_that_are_allowed():
    score = torch.tensor([[0.0, 5.0, 3.0, 4.0], [9.0, 0.0, 1.0, 2.0]])
    allowed = torch.tensor([[False, True, True, False], [False, False, False, True]])
    owners = choose_owners(score, allowed, torch.tensor([0, 1]), 3)
    assert owners.tolist() == [[0, 1, 2], [1, 3, NOBODY]]


def test_what_a_client_contributes_to_buffers_is_how_far_they_moved():
    """Weights 0.25 and 0.75 of two models that begin equal: 0.75 of the way that training alone moves a buffer."""
    task, batches, sgd = testing.task(), testing.batches(1), SGD(0.1)
    models, weight = tree.broadcast(task.init(), 2), torch.tensor([0.25, 0.75])
    found = contributions(task, sgd, models, weight, torch.ones(()), batches)
    trained, buffers = task.split(task.init())
    end = train(task, sgd, task.init(), batches)[0]
    moving = [name for name, value in buffers.items() if value.is_floating_point()]
    assert moving
    for name in moving:
        assert not torch.equal(end[name], buffers[name])
        for model, share in enumerate((0.25, 0.75)):
            torch.testing.assert_close(found.buffers[name][model], share * (end[name] - buffers[name]))
    for name, value in trained.items():
        torch.testing.assert_close(found.trained[name][1], 0.75 * (value - end[name]), rtol=1e-4, atol=1e-6)


def test_what_cannot_be_trained_is_not_contributed_but_for_the_own_model():
    trained = {"w": torch.tensor([[torch.nan], [2.0], [torch.inf]])}
    found = only_finite(Contributions(torch.tensor([0.5, 0.3, 0.2]), trained, {"mean": torch.ones(3, 1)}))
    torch.testing.assert_close(found.weight, torch.tensor([0.5, 0.3, 0.0]))
    torch.testing.assert_close(found.trained["w"], torch.tensor([[torch.nan], [2.0], [0.0]]), equal_nan=True)
    assert found.buffers["mean"].flatten().tolist() == [1, 1, 0]


def test_others_contribute_no_more_weight_than_the_cap_and_go_no_further_than_the_owner():
    """Client 0 goes 2 with its model (weight 0.5), 1 goes 3 with its own; 1 goes 40 with 0's, and 0 goes 1 with 1's."""
    at = torch.tensor([[0, 1], [1, 0]])
    weight = torch.tensor([[0.5, 0.5], [0.2, 0.8]])
    ways = torch.tensor([[[2.0], [1.0]], [[3.0], [-40.0]]])
    steps = Contributions(weight, {"w": weight[..., None] * ways}, {"mean": torch.ones(2, 2, 1)})
    found = capped_contributions(steps, at, cap=0.4)
    torch.testing.assert_close(found.weight, torch.tensor([[0.5, 0.4], [0.2, 0.4]]))
    torch.testing.assert_close(found.trained["w"][..., 0], torch.tensor([[1.0, 0.4 * 1.0], [0.6, 0.4 * -2.0]]))
    torch.testing.assert_close(found.buffers["mean"][..., 0], torch.tensor([[1.0, 0.8], [1.0, 0.5 / 20]]))


def test_the_median_way_stands_for_that_of_an_owner_who_took_no_part():
    at = torch.tensor([[0, 3], [1, 3], [2, 3]])  # nobody is client 3
    ways = torch.tensor([[[2.0], [9.0]], [[5.0], [-4.0]], [[4.0], [1.0]]])
    found = capped_contributions(Contributions(torch.full((3, 2), 0.5), {"w": ways / 2}, {}), at, cap=1.0)
    torch.testing.assert_close(2 * found.trained["w"][:, 1, 0], torch.tensor([4.0, -4.0, 1.0]))
