"""The laws must be able to fail: each method here breaks one on purpose, and the law says so."""

import dataclasses
import os
from functools import partial
from typing import Annotated, ClassVar, Literal, NamedTuple

import pytest
import torch
from pydantic import Field

from coterie import SGD, ConfigError, Method, testing
from coterie.core import tree
from coterie.core.method import CountedParams
from coterie.core.optimizers import Optimizer
from coterie.core.scan import scan
from coterie.core.training import gradient, quadratic_penalty, train
from coterie.core.tree import Params
from coterie.methods import FedAvg, FedMAP, FedProx, Local, Scaffold
from tests.marks import compiles


class CountsCalls(FedAvg):
    """Trains from another model in every call: one client at a time there are three a round, stacked there is one."""

    calls: ClassVar[list[int]] = [0]

    def init_server(self, params, population):
        self.calls[0] = 0
        return super().init_server(params, population)

    def local_update(self, task, client, down, batches):
        self.calls[0] += 1
        return super().local_update(task, client, tree.scale(down, 1 + 0.01 * self.calls[0]), batches)


class NoiseByPlace(FedAvg):
    """Peers that ask for one row of noise each get other noise than clients of a server, who ask for all at once."""

    def dispatch(self, server, ids, rng):
        noise = 0.1 * torch.rand(len(ids), generator=rng)
        return {name: w + noise.reshape(-1, *[1] * w.ndim).to(w.dtype) for name, w in server.items()}


class InPlace(FedAvg):
    def aggregate(self, server: Params, ids, ups):
        for value in ups.params.values():
            value.mul_(2)
        return super().aggregate(server, ids, ups)


@dataclasses.dataclass(frozen=True)
class DetachedProx(FedProx):
    """The defect of a well-known library: a penalty without a gradient."""

    def local_update(self, task, client, down, batches):
        return FedAvg(self.optimizer).local_update(task, client, down, batches)


@dataclasses.dataclass(frozen=True)
class Anchored(Local):
    """Local training; but with the strict prior, no model leaves the point where a round begins."""

    optimizer: Optimizer = SGD()
    prior: Annotated[Literal["flat", "strict"], Field(description="how strong the prior is")] = "flat"
    strength: Annotated[float, Field(gt=0, description="of the strict prior")] = 9.0

    law_contexts: ClassVar = ({"prior": "strict"},)

    def local_update(self, task, client, down, batches):
        strength = torch.tensor(self.strength if self.prior == "strict" else 0.01 * self.strength)
        theta, loss = train(task, self.optimizer, client, batches, quadratic_penalty, (task.init(), strength))
        return theta, (), {"loss": loss}


class CountsPadding(FedAvg):
    def local_update(self, task, client, down, batches):
        up = super().local_update(task, client, down, batches)
        return up[0], up[1]._replace(count=batches.index.numel() + up[1].count), up[2]


class ByPosition(FedMAP):
    def aggregate(self, server, ids, ups):
        return super().aggregate(server, ids, ups._replace(log_weight=ids.float()))


class TwoOfOneName(FedAvg):
    """Keeps a leaf "b" of "a", and another one that is called "a/b": packed, both have one path."""

    def init_client(self, params):
        return {"a": {"b": torch.zeros(())}, "a/b": torch.ones(())}

    def local_update(self, task, client, down, batches):
        return client, *super().local_update(task, (), down, batches)[1:]


class Peeks(FedAvg):
    def local_update(self, task, client, down, batches):
        return super().local_update(task, client, down, batches._replace(count=batches.x.sum()))


class Forgets(FedAvg):
    def aggregate(self, server, ids, ups):
        return server


class CountsRounds(FedAvg):
    """Knows the round by a number that is no part of its state, so that a resumed run begins to count again."""

    rounds: ClassVar[list[int]] = [0]

    def init_server(self, params, population):
        self.rounds[0] = 0
        return super().init_server(params, population)

    def aggregate(self, server, ids, ups):
        self.rounds[0] += 1
        averaged = super().aggregate(server, ids, ups)
        return averaged | {"0.weight": averaged["0.weight"] * (1 + 0.01 * self.rounds[0])}


class KnowsItsProcess(FedAvg):
    """Trains from another model in a worker."""

    first: ClassVar[int] = os.getpid()

    def local_update(self, task, client, down, batches):
        here = os.getpid() == self.first
        return super().local_update(task, client, down if here else tree.scale(down, 1.01), batches)


STEP_SIZE = [0.0]


def _descend(task, params, aux, batch):
    grads, _, rest = gradient(task, params, batch)
    return rest | {name: params[name] - STEP_SIZE[0] * grads[name] for name in grads}


class GlobalStepSize(FedAvg):
    """Its step reads a number of Python that changes from round to round; compiled, the step keeps the first one."""

    def init_server(self, params, population):
        STEP_SIZE[0] = 0.05
        return super().init_server(params, population)

    def local_update(self, task, client, down, batches):
        theta = scan(partial(_descend, task), down, (), batches)
        return client, CountedParams(theta, batches.count), {"loss": torch.zeros(())}

    def aggregate(self, server, ids, ups):
        STEP_SIZE[0] /= 2
        return super().aggregate(server, ids, ups)


DEFECTS = {
    1: (CountsCalls(), "loop and stacked differ"),
    2: (NoiseByPlace(), "a peer's copy of the server is not the server"),
    3: (InPlace(), "aggregate modifies its input"),
    4: (DetachedProx(), "hyper-parameter mu changes nothing"),  # its other half: Anchored
    5: (CountsPadding(), "masked steps matter"),
    6: (ByPosition(), "the order of clients matters"),
    7: (TwoOfOneName(), "client state cannot be packed, written and read again: two leaves"),
    8: (Peeks(), "other clients' data matters"),
    9: (Forgets(), "alone, a client"),
    10: (CountsRounds(), "a resumed run "),
    11: (KnowsItsProcess(), "2 processes give other results than one"),
    12: (GlobalStepSize(), "compiled, and one client at a time differ"),
}


def test_every_law_has_a_defect_that_it_must_find():
    assert DEFECTS.keys() == testing.LAWS.keys()


@pytest.mark.parametrize("law", [pytest.param(law, marks=[compiles] if law == 12 else []) for law in DEFECTS])
def test_the_laws_find_defects(law, workers_keep_their_work):
    method, complaint = DEFECTS[law]
    with pytest.raises(testing.LawBroken) as found:
        testing.LAWS[law].test(method)
    assert complaint in str(found.value)


def test_an_option_that_changes_every_bit_and_collapses_is_found():
    testing.options_change_the_result(Anchored())
    with pytest.raises(testing.LawBroken, match=r"with prior = strict, the method does not learn: .*% right"):
        testing.check(Anchored(), only=(4,))


def test_only_compiling_finds_a_number_that_was_compiled_in():
    """The defect of law 12 keeps the laws of engines that do not compile."""
    assert [row.outcome for row in testing.check(GlobalStepSize(), only=(1, 3, 6))] == ["held"] * 3


# All of them, whatever they find


class Twice(InPlace):
    """Breaks law 3 with a complaint, and law 5 with an error that no law expects."""

    def local_update(self, task, client, down, batches):
        if task == testing.task(norm=False):
            raise ZeroDivisionError("by nothing")
        return super().local_update(task, client, down, batches)


def test_check_tells_every_broken_law():
    with pytest.raises(testing.LawBroken) as found:
        testing.check(Twice(), only=(3, 5, 8))
    head, *told = str(found.value).splitlines()
    assert head == "Twice breaks 2 of 3 laws:"
    assert told[0].startswith("  law 3, inputs are not modified: aggregate modifies its input: 'params/")
    assert told[1:] == ["  law 5, padding is ignored: ZeroDivisionError: by nothing"]


def test_examine_tells_what_became_of_each_law():
    assert [row[:3] for row in testing.examine(Twice(), only=(8, 5, 3))] == [
        (3, "inputs are not modified", "broken"),
        (5, "padding is ignored", "broken"),
        (8, "own data only", "held"),
    ]


def test_a_law_that_does_not_exist_is_not_asked():
    with pytest.raises(ConfigError, match="there is no law 13: laws are 1 to 12"):
        testing.check(FedAvg(), only=(13,))


# Laws that do not apply


class Both(NamedTuple):
    own: Params  # v
    common: Params  # w


@dataclasses.dataclass(frozen=True)
class Mixture(Method):
    """After APFL: a client trains v of its own and a copy of w, and deploys alpha v + (1 - alpha) w."""

    optimizer: Optimizer = SGD(0.05)
    alpha: Annotated[float, Field(ge=0, le=1, description="share of the client's own model")] = 0.5

    def init_server(self, params, population):
        return params

    def init_client(self, params):
        return params

    def dispatch(self, server, ids, rng):
        return tree.broadcast(server, len(ids))

    def local_update(self, task, client, down, batches):
        common, loss = train(task, self.optimizer, down, batches)
        own, _ = train(task, SGD(0.1), client, batches)  # with steps of another size, so that v is not w
        return own, CountedParams(common, batches.count), {"loss": loss}

    def aggregate(self, server, ids, ups):
        return tree.mean(ups.params, ups.count)

    def personalize(self, task, client, down, batches):
        return tree.mix(down, client, self.alpha)


class Excused(Mixture):
    exempt: ClassVar = {9: "a client deploys a mixture of v and w, and so neither of them"}


def test_a_mixture_breaks_the_ninth_law_unless_it_says_why():
    with pytest.raises(testing.LawBroken, match="law 9, one client, own solution: alone, a client does not deploy"):
        testing.check(Mixture(), only=(8, 9))
    rows = testing.check(Excused(), only=(8, 9))
    assert [row[2:] for row in rows] == [("held", ""), ("does not apply", Excused.exempt[9])]


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_a_mixture_of_one_model_keeps_the_ninth_law(alpha):
    """So the law is about what is deployed, and not about how a method is written."""
    testing.check(Mixture(alpha=alpha), only=(9,))


def test_an_exemption_needs_a_law_and_a_reason():
    class Careless(FedAvg):
        exempt: ClassVar = {2: " ", 13: "it does not matter", "9": "a name"}

    with pytest.raises(ConfigError) as found:
        testing.check(Careless(), only=(3,))
    assert found.value.problems == [
        "Careless.exempt does not say why law 2 does not apply",
        "Careless.exempt names law 13: laws are 1 to 12",
        "Careless.exempt names law '9': laws are 1 to 12",
    ]


def test_a_method_that_needs_a_server_is_seen_not_to_run_among_peers():
    (row,) = testing.check(Scaffold(), only=(2,))
    assert row[2:] == ("does not apply", "the method needs one server (peer_to_peer = False)")


@compiles
def test_where_there_are_no_processes_the_laws_of_workers_say_so(monkeypatch):
    monkeypatch.setattr("coterie.testing.engine_laws.can_fork", lambda: False)
    rows = testing.check(FedAvg(), only=(11, 12))
    assert [row.words for row in rows] == [
        testing.NO_PROCESSES,
        f"{testing.REPEATED}; {testing.NO_PROCESSES}",
    ]
