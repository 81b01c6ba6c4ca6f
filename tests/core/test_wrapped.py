from dataclasses import replace

import pytest
import torch

from coterie.core import tree
from coterie.core.errors import ConfigError
from coterie.core.optimizers import SGD, Adam
from coterie.core.pace import at_pace
from coterie.core.privacy import Guard, Private
from coterie.core.training import envelope_step
from coterie.core.wrapped import Clipped, Paced, plain, with_lr, without_lr, wrapped

PARAMS = {"a": torch.tensor([[0.5, -1.0], [2.0, 0.25]]), "b": torch.tensor([0.1, -0.2])}
GRADS = {"a": torch.tensor([[0.3, 2.0], [-4.0, 0.4]]), "b": torch.tensor([-0.5, 0.6])}


@pytest.mark.parametrize(("norm", "value"), [(1.0, None), (100.0, None), (None, 0.45), (1.0, 0.45)])
@pytest.mark.parametrize("inner", [SGD(0.1, momentum=0.9, weight_decay=0.01), Adam(0.1)], ids=["sgd", "adam"])
def test_clipping_is_torchs(inner, norm, value):
    """Two steps: the gradient is clipped before weight decay and momentum; its norm is that of all parameters."""
    made = Clipped(inner, norm, value)
    free = [leaf.clone().requires_grad_() for leaf in PARAMS.values()]
    if isinstance(inner, SGD):
        theirs = torch.optim.SGD(free, lr=0.1, momentum=0.9, weight_decay=0.01)
    else:
        theirs = torch.optim.Adam(free, lr=0.1)
    params, state = PARAMS, made.init(PARAMS)
    for times in (1, 3):
        for leaf, grad in zip(free, GRADS.values(), strict=True):
            leaf.grad = times * grad
        if value is not None:
            torch.nn.utils.clip_grad_value_(free, value)
        if norm is not None:
            torch.nn.utils.clip_grad_norm_(free, norm)
        theirs.step()
        params, state = made.update(tree.scale(GRADS, times), state, params)
    for mine, leaf in zip(params.values(), free, strict=True):
        torch.testing.assert_close(mine, leaf.detach())


def test_nothing_to_train_is_nothing_to_clip():
    made = Clipped(SGD(0.1), 1.0, 1.0)
    assert made.update({}, made.init({}), {})[0] == {}


def test_a_paced_step_is_one_of_another_size():
    for inner in (SGD(0.2, momentum=0.9), Adam(0.2), Clipped(SGD(0.2), 0.5)):
        core = plain(inner)
        half = replace(inner, inner=replace(core, lr=0.1)) if isinstance(inner, Clipped) else replace(core, lr=0.1)
        paced = Paced(inner)
        with at_pace(torch.tensor(0.5)):
            found = paced.update(GRADS, paced.init(PARAMS), PARAMS)
            assert float(paced.lr) == pytest.approx(0.1)
            steady = paced.steady_step()
            assert (steady is None) == (half.steady_step() is None)
            assert steady is None or float(steady) == pytest.approx(half.steady_step())
        expected = half.update(GRADS, half.init(PARAMS), PARAMS)
        assert all(map(torch.allclose, tree.leaves(found), tree.leaves(expected)))
        with at_pace(()):  # steps without a schedule, such as fine-tuning
            assert paced.lr == 0.2


def test_outside_of_a_step_the_step_size_is_not_known():
    paced = Paced(SGD(0.2))
    for read in (lambda: paced.lr, paced.steady_step, lambda: Private(paced, Guard(4)).lr):
        with pytest.raises(ConfigError, match="outside of the steps"):
            read()
    assert paced.at_full_pace.lr == Clipped(paced, 1.0).at_full_pace.lr == 0.2
    assert Private(paced, Guard(4)).at_full_pace.lr == 0.2


def test_wrapping_again_replaces_what_was_there():
    once = wrapped(Adam(0.1), norm=1.0, value=None, paced=True)
    assert once == Paced(Clipped(Adam(0.1), 1.0))
    assert wrapped(once, norm=None, value=2.0, paced=False) == Clipped(Adam(0.1), None, 2.0)
    assert wrapped(once, norm=None, value=None, paced=False) == plain(once) == Adam(0.1)
    assert plain(Private(once, Guard(4))) == Adam(0.1)


def test_step_sizes_are_values_whatever_is_wrapped_around():
    one, other = (wrapped(SGD(lr), norm=1.0, value=None, paced=True) for lr in (0.1, 0.3))
    taker, lr = without_lr(one, PARAMS)
    assert taker == without_lr(other, PARAMS)[0]
    assert float(lr) == pytest.approx(0.1)
    assert float(plain(with_lr(taker, lr)).lr) == pytest.approx(0.1)


@pytest.mark.parametrize("lr", [1e-3, 0.01, 0.05, 0.2])
def test_the_step_of_an_envelope_with_a_schedule_is_the_same(lr):
    """lam = 15, K = 5: from lr = 1 / 15 on, a step goes all the way; at 0 it is the limit, 1 / (K lam)."""
    paced = Paced(SGD(1.0))
    with at_pace(torch.tensor(lr)):
        assert float(envelope_step(paced, 15.0, 5)) == pytest.approx(envelope_step(SGD(lr), 15.0, 5), rel=1e-4)
    with at_pace(torch.tensor(0.0)):
        assert float(envelope_step(paced, 15.0, 5)) == pytest.approx(1 / 75, rel=1e-4)
    with at_pace(torch.tensor(lr)):
        assert envelope_step(Paced(Adam(1.0)), 15.0, 5) == pytest.approx(1 / 75)
