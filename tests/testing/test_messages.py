"""What methods send, and what they need not."""

import pytest
import torch

from coterie import METHODS, testing
from coterie.core import tree
from coterie.core.method import CountedParams
from coterie.core.task import Task
from coterie.methods import FedAvg, FedBN, FedMAP, FedProto, PFedBreD, PFedMe, PFedVMP
from coterie.testing.messages import BEGIN, END, describe, messages, model, table, with_column, with_table

FROZEN = {"0.weight", "0.bias"}
COUNT = "2.num_batches_tracked"
SENDS_BUFFERS = {"fedavg", "fedavg-ft", "fedprox", "fedmap", "ditto", "per-fedavg", "scaffold", "pfedme", "pfedbred"}
SENDS_BUFFERS |= {"fedprox-ft", "moon", "fedpa-ft", "fedrod", "fedpac", "ifca", "clustered-fl", "fedem", "pfedbayes"}
SENDS_BUFFERS |= {"apfl", "fedala", "fedcp", "gpfl", "fedfomo", "fedep-ft", "qlsd-ft", "federico"}
# In one process with the other test file that looks at messages, and the costs of all methods: each is found once.
pytestmark = pytest.mark.xdist_group("what methods send")


def names(message):
    """Names of the model's tensors anywhere in a packed message."""
    return {path.rpartition("/")[2] for path in tree.pack(message)} & model().init().keys()


@pytest.mark.parametrize("method", METHODS)
def test_nobody_sends_frozen_weights_or_counts_of_minibatches(method):
    down, up = messages(METHODS[method]())
    assert not names((down, up)) & (FROZEN | {COUNT})
    initial = model().init()
    for leaf in tree.leaves((down, up)):
        assert not any(leaf.shape == initial[name].shape and torch.equal(leaf, initial[name]) for name in FROZEN)
    assert ("2.running_mean" in names(up)) == (
        method in SENDS_BUFFERS | {"fedper", "fedrep", "fedbabu", "pfedvmp", "pfedgp"}
    )


@pytest.mark.parametrize("method", METHODS)
def test_the_server_keeps_its_model_whole(method):
    """What is not sent up is the server's own: what it sends down has the same names before and after a round."""
    cls = METHODS[method]
    sim = testing.simulate(cls(), testing.STACKED, rounds=2)
    ids = torch.arange(len(testing.SIZES))
    first = testing.simulate(cls(), rounds=0)
    sent = [sim.method.dispatch(each.state.server, ids, torch.Generator()) for each in (first, sim)]
    assert tree.pack(sent[0]).keys() == tree.pack(sent[1]).keys()


def test_fedbn_sends_no_normalisation_layer_in_either_direction():
    down, up = messages(FedBN())
    norm = model().norm_names
    assert norm == {f"2.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}
    assert not names(down) & norm
    assert names(up) == model().init().keys() - norm - FROZEN
    # Nor under another name: no leaf has the values that training gave to one of these layers.
    task = model()
    client, up, _ = FedBN().local_update(task, task.init(), down, testing.batches(1))
    for name in norm - {COUNT}:
        assert not torch.equal(client[name], task.init()[name])
        own = [leaf for leaf in tree.leaves(up) if leaf.shape == client[name].shape]
        assert not any(torch.allclose(leaf, client[name]) for leaf in own), name


def test_a_count_of_minibatches_that_is_read_is_sent():
    layers = torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.BatchNorm1d(3, momentum=None))
    assert Task(layers, num_classes=3).unsent == frozenset()


@pytest.mark.parametrize(
    ("method", "private"),
    [
        (FedProto(), "class_size"),
        (PFedVMP(), "class_size"),
        (PFedMe(weighting="uniform"), "count"),
        (PFedBreD(variant="paper"), "count"),
    ],
)
def test_numbers_that_nobody_uses_are_not_sent(method, private):
    leaf = getattr(messages(method).up, private)
    assert set(leaf.flatten().tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize("method", [FedProto(weighting="samples"), PFedVMP(precision="none")])
def test_numbers_that_are_used_are_sent(method):
    assert float(messages(method).up.class_size.sum()) == testing.SIZES[1]


def test_a_client_that_claims_more_weighs_no_more_where_all_weigh_the_same():
    method = PFedMe(weighting="uniform")
    server, ids = model().init(), torch.arange(2)
    ups = tree.stack([messages(method).up] * 2)
    lied = ups._replace(count=torch.tensor([100.0, 1.0]))
    other = lied._replace(
        trained=tree.map(lambda leaf: leaf * torch.arange(2.0).reshape(2, *[1] * (leaf.ndim - 1)), lied.trained)
    )
    honest = other._replace(count=torch.ones(2))
    for ours, theirs in zip(
        *(tree.leaves(method.aggregate(server, ids, each)) for each in (other, honest)), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_messages_in_words():
    assert describe(messages(FedAvg()).up) == "model, number of examples"
    assert describe(messages(FedAvg()).down) == "model"
    assert describe(messages(FedBN()).up) == "model without normalisation layers, number of examples"
    assert "learned variances" in describe(messages(FedMAP(prior="gaussian-learned")).down)
    assert describe(CountedParams({"1.weight": torch.zeros(8, 6)}, torch.ones(()))) == "`1.weight`, number of examples"
    assert describe(()) == "nothing"


def test_documents_are_written_anew_where_their_tables_are():
    assert with_table(f"before\n{BEGIN}\nold\n{END}\nafter") == f"before\n{BEGIN}\n{table()}\n{END}\nafter"
    with pytest.raises(ValueError, match="has no"):
        with_table("no table")
    old = "| `fedavg`, `fedprox` | an average | old words |\n| `other` | x | y |"
    new = "| `fedavg`, `fedprox` | an average | model, number of examples |\n| `other` | x | y |"
    assert with_column(old) == new
    with pytest.raises(ValueError, match="do not send the same"):
        with_column("| `fedavg`, `local` | x | y |")
