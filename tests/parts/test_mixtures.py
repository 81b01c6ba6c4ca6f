import torch

from coterie import testing
from coterie.core import tree
from coterie.core.optimizers import SGD
from coterie.core.routes import NOBODY
from coterie.core.training import train
from coterie.parts.mixtures import (
    Contributions,
    agreeing_contributions,
    apply_contributions,
    capped_contributions,
    choose_owners,
    contributions,
    only_finite,
)

MODELS = {"w": torch.tensor([[10.0], [20.0]]), "mean": torch.tensor([[1.0], [2.0]])}
AT = torch.tensor([[0, 1], [0, -1]])  # what the second sender has beside is for a model elsewhere
OWN = torch.tensor([[True, False]]).expand(7, 2)
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
    found = capped_contributions(steps, at, OWN[:2], cap=0.4)
    torch.testing.assert_close(found.weight, torch.tensor([[0.5, 0.4], [0.2, 0.4]]))
    torch.testing.assert_close(found.trained["w"][..., 0], torch.tensor([[1.0, 0.4 * 1.0], [0.6, 0.4 * -2.0]]))
    torch.testing.assert_close(found.buffers["mean"][..., 0], torch.tensor([[1.0, 0.8], [1.0, 0.5 / 20]]))


def contributed(ways, weight):
    """Contributions of seven clients to the model of the first: (the contributions, whose model each is to)."""
    at = torch.stack([torch.arange(7), torch.where(torch.arange(7) == 0, -1, 0)], 1)
    every = torch.stack([torch.zeros(7), ways], 1)
    every[0] = every[0].flip(0)  # the first client's contribution to its own model
    weights = torch.stack([torch.full((7,), 0.5), weight], 1)
    weights[0] = weights[0].flip(0)
    scaled = (weights * every)[..., None]
    return Contributions(weights, {"w": scaled}, {"mean": scaled.clone()}), at


def test_contributions_that_are_far_from_the_others_are_left_out():
    """Six go 1 to 1.5 and the last goes -4. Its claim of 0.9 is more than the others', of whom one claims 0.4."""
    steps, at = contributed(
        torch.tensor([1.0, 1.1, 1.2, 1.3, 1.4, 1.5, -4.0]), torch.tensor([0.2, 0.2, 0.2, 0.4, 0.2, 0.2, 0.9])
    )
    found = agreeing_contributions(steps, at, OWN, 1)
    torch.testing.assert_close(found.weight[:, 1], torch.tensor([0.0, 0.2, 0.2, 0.4, 0.2, 0.2, 0.0]))
    torch.testing.assert_close(found.trained["w"][1:6, 1], steps.trained["w"][1:6, 1])
    assert found.trained["w"][6, 1] == found.buffers["mean"][6, 1] == 0
    # All weights but the one largest may be as they are: a claim of 0.9 that goes with the others counts 0.4.
    alike, at = contributed(
        torch.tensor([1.0, 1.1, 1.2, 1.3, 9.0, 1.5, 1.2]), torch.tensor([0.2, 0.2, 0.2, 0.4, 0.2, 0.2, 0.9])
    )
    found = agreeing_contributions(alike, at, OWN, 1)
    torch.testing.assert_close(found.weight[:, 1], torch.tensor([0.0, 0.2, 0.2, 0.4, 0.0, 0.2, 0.4]))
    torch.testing.assert_close(found.trained["w"][6, 1], torch.tensor([0.4 * 1.2]))


def test_the_owner_is_never_left_out_and_is_alone_where_too_few_contribute():
    far = torch.tensor([50.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.2])
    steps, at = contributed(far, torch.full((7,), 0.2))
    found = agreeing_contributions(steps, at, OWN, 2)
    assert found.weight[0, 0] == 0.2
    assert (found.weight[1:, 1] > 0).sum() == 4
    alone = agreeing_contributions(steps, at, OWN, 3)  # of seven, three liars cannot be told
    torch.testing.assert_close(alone.weight[:, 0], steps.weight[:, 0])
    assert not alone.weight[1:, 1].any()
    torch.testing.assert_close(alone.trained["w"][:, 0], steps.trained["w"][:, 0])


def test_the_median_way_stands_for_that_of_an_owner_who_took_no_part():
    at = torch.tensor([[0, 3], [1, 3], [2, 3]])  # nobody is client 3
    ways = torch.tensor([[[2.0], [9.0]], [[5.0], [-4.0]], [[4.0], [1.0]]])
    found = capped_contributions(Contributions(torch.full((3, 2), 0.5), {"w": ways / 2}, {}), at, OWN[:3], cap=1.0)
    torch.testing.assert_close(2 * found.trained["w"][:, 1, 0], torch.tensor([4.0, -4.0, 1.0]))
    lonely = torch.tensor([[0, 3], [1, -1], [2, -1]])
    found = capped_contributions(Contributions(torch.full((3, 2), 0.5), {"w": ways / 2}, {}), lonely, OWN[:3], cap=1.0)
    torch.testing.assert_close(2 * found.trained["w"][:, 0, 0], torch.tensor([2.0, 5.0, 4.0]))
    assert found.trained["w"][0, 1] == 0
