import dataclasses
from typing import Annotated

import pytest
import torch
from pydantic import Field

from coterie.core import tree
from coterie.core.errors import ConfigError
from coterie.core.optimizers import SGD, Adam, Optimizer
from coterie.core.schedules import SCHEDULES, Constant, Cosine, Schedule, Step, Warmup
from coterie.core.wrapped import Clipped
from coterie.methods.named import OPTIMIZER, Kind, build_optimizer, optimizer_fields, optimizer_values

KIND = Kind("schedule", SCHEDULES, Schedule, "f(t, rounds)")


def halved(t, rounds):
    return 0.5


@dataclasses.dataclass(frozen=True)
class Signs(Optimizer):
    lr: Annotated[float, Field(gt=0)] = 0.1
    boost: Annotated[float, Field(ge=1, description="more")] = 1.0

    def init(self, params):
        return ()

    def update(self, grads, state, params):
        return tree.map(lambda p, g: p - self.lr * self.boost * torch.sign(g), params, grads), state


@pytest.mark.parametrize(
    ("text", "thing"),
    [
        ("cosine", Cosine()),
        ("step:every=3:factor=0.1", Step(3, 0.1)),
        ("warmup:rounds=2:then=cosine:least=0.2:per=step", Warmup(2, then=Cosine(0.2, "step"))),
        ("warmup:then=warmup:rounds=1:start=0.5:then=constant:value=2", Warmup(then=Warmup(1, 0.5, then=Constant(2)))),
        ("tests.methods.test_named:halved", halved),
    ],
)
def test_text_and_back(text, thing):
    assert KIND.read(text) == thing
    assert KIND.read(KIND.write(thing)) == thing


def test_tables_objects_and_classes():
    assert KIND.read({"name": "step", "every": 3, "factor": 0.1}) == Step(3, 0.1)
    assert KIND.read({"name": "step:every=3", "factor": 0.1}) == Step(3, 0.1)
    assert KIND.read({"name": "warmup", "rounds": 2, "then": {"name": "cosine", "least": 0.5}}) == Warmup(
        2, then=Cosine(0.5)
    )
    assert KIND.read(Cosine) == KIND.read(Cosine()) == Cosine()
    assert KIND.read(halved) is halved


def test_a_table_that_is_read_stays_as_it_was():
    table = {"name": "warmup", "rounds": 2, "then": {"name": "cosine", "least": 0.5}}
    assert KIND.read(table) == KIND.read(table)
    assert table == {"name": "warmup", "rounds": 2, "then": {"name": "cosine", "least": 0.5}}


def test_what_has_no_name_is_ones_own():
    local = lambda t, rounds: 1.0  # noqa: E731
    assert KIND.write(local) == "own-schedule"

    @dataclasses.dataclass(frozen=True)
    class Here(Schedule):
        def __call__(self, t, rounds):
            return 1.0

    assert KIND.write(Here()) == KIND.write(Warmup(then=Here())) == "own-schedule"
    for value in ("own-schedule", {"name": "own-schedule"}):
        with pytest.raises(ConfigError, match="came from Python: give it again, as schedule="):
            KIND.read(value)


@pytest.mark.parametrize(
    ("value", "problems"),
    [
        ("cosin", ["there is no schedule 'cosin' (did you mean 'cosine'?)"]),
        ("cosine:5", ["'5' is no option: write NAME:option=value"]),
        ("cosine:lest=0.1", ["schedule cosine has no 'lest' (did you mean 'least'?); it has least, per"]),
        (
            "step:every=0:factor=x",
            ["every = '0': schedule step needs a number > 0", "factor = 'x': schedule step needs"],
        ),
        (
            "warmup:rounds=0:then=cosine:least=2",
            ["least = '2': schedule cosine needs", "rounds = '0': schedule warmup"],
        ),
        ("tests.methods.test_named:halved:a=1", ["takes no options: only a class has some, its fields"]),
        ("tests.methods.test_named:Signs", ["is no schedule: that is a dataclass that extends"]),
        ({"every": 3}, ["a table needs the name of a schedule"]),
        (3, ["'int' is no schedule"]),
    ],
)
def test_all_that_is_wrong_is_said(value, problems):
    with pytest.raises(ConfigError) as error:
        KIND.read(value)
    assert len(error.value.problems) == len(problems)
    for said, words in zip(error.value.problems, problems, strict=True):
        assert words in said


def test_an_optimiser_by_name_path_options_or_object():
    path = "tests.methods.test_named:Signs"
    assert build_optimizer({}) == (SGD(), [])
    assert build_optimizer({"name": "adam:beta1=0.5", "lr": 0.1}) == (Adam(0.1, 0.5), [])
    assert build_optimizer({"name": path, "boost": 2}) == (Signs(boost=2.0), [])
    assert build_optimizer({"name": Signs, "lr": 0.2}) == build_optimizer({"name": Signs(0.2)}) == (Signs(0.2), [])
    assert optimizer_values(Signs(0.2)) == {"name": path, "lr": 0.2, "boost": 1.0}
    assert build_optimizer(optimizer_values(Signs(0.2, 3.0))) == (Signs(0.2, 3.0), [])
    assert "boost" in {each.name for each in optimizer_fields(path)} - {each.name for each in optimizer_fields()}
    assert "lr: the optimizer is given as an object" in build_optimizer({"name": Signs(), "lr": 0.1})[1][0]
    assert build_optimizer({"name": "sgdd", "lr": 1})[1][0].startswith("there is no optimizer 'sgdd'")
    assert OPTIMIZER.name_of(SGD) == "sgd"


def test_steps_that_would_not_work_in_a_round_are_found_before_it():
    class InPlace(Signs):
        def update(self, grads, state, params):
            return {name: leaf.sub_(self.lr * grads[name]) for name, leaf in params.items()}, state

    class Branches(Signs):
        def update(self, grads, state, params):
            return super().update(grads, state, params) if self.lr > 0.05 else (params, state)

    class Remembers(Signs):
        def update(self, grads, state, params):
            object.__setattr__(self, "first", getattr(self, "first", None) or float(self.lr))
            return tree.map(lambda p, g: p - 0.3 * g, params, grads), state

    class Forgets(Signs):
        def update(self, grads, state, params):
            return {"weight": params["weight"]}, state

    class Grows(Signs):
        def init(self, params):
            return torch.zeros(())

        def update(self, grads, state, params):
            return params, torch.zeros(2)

    for cls, words in (
        (InPlace, "changes what it is given"),
        (Branches, "with a tensor as lr: RuntimeError"),
        (Remembers, "with a tensor as lr"),
        (Forgets, "different names"),
        (Grows, r"its state has the shape"),
    ):
        made, problems = build_optimizer({"name": cls()})
        assert (made, len(problems)) == (None, 1), cls
        assert words in problems[0]


def test_a_clipped_optimiser_is_none_of_a_user_s_own_to_name():
    """It is a wrapper: its fields are settings of the run."""
    assert "is no optimizer" not in str(build_optimizer({"name": SGD(0.1)})[1])
    assert optimizer_values(Clipped(SGD(0.1), 1.0).inner) == optimizer_values(SGD(0.1))
