"""The transformer is PyTorch's encoder with the same weights; tokens and attention run in every engine."""

import numpy as np
import pytest
import torch
from torch import nn

import coterie
from coterie.core import rng
from coterie.core.make_task import make_task
from coterie.core.optimizers import SGD
from coterie.data.federation import Federation, Split
from coterie.data.minibatches import Plan
from coterie.data.readers.dialects import LENGTH, VOCABULARY, reports
from coterie.engine import Engine
from coterie.experiment.simulation import Simulation
from coterie.methods import FedAvg
from coterie.models.transformer import Layer, transformer
from coterie.testing.engine_laws import ROUNDING, engines
from coterie.testing.kit import LOOP, same
from tests.marks import compiles

SMALL = {"dim": 8, "heads": 2, "layers": 1, "hidden": 6, "vocabulary": VOCABULARY}


def small(**options):
    torch.manual_seed(0)
    return transformer((LENGTH,), 4, **{**SMALL, **options})


class Own(nn.Module):
    """What a user writes: PyTorch's layers, with dropout inside the attention."""

    def __init__(self, dropout=0.2):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(VOCABULARY, 8, padding_idx=0)
        layer = nn.TransformerEncoderLayer(8, 2, 6, dropout=dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.pool = nn.MultiheadAttention(8, 1, dropout=dropout, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        h = self.encoder(self.table(x), src_key_padding_mask=x == 0)
        return self.head(self.pool(h[:, :1], h, h)[0][:, 0])  # which asks for the weights, too


def federation():
    xs, ys, clients, start = [], [], {}, 0
    for i, size in enumerate((5, 23, 12, 17)):
        x, y = reports(rng.generator("tokens", i), size + 10, second=i == 3)
        clients[f"site-{i}"] = Split(*np.split(start + np.arange(len(x)), [size, size + 4]))
        xs.append(x)
        ys.append(y)
        start += len(x)
    return Federation("tokens", *(torch.from_numpy(np.concatenate(part)) for part in (xs, ys)), clients, 4)


def outcome(module, engine):
    clients = federation()
    task = make_task(module, "classification", 4, clients.x)
    sim = Simulation.start(FedAvg(SGD(lr=0.1)), task, clients, Plan(4, 2), 3, seed=0)
    for number in (1, 2):
        sim.train(number, engine)
    return sim.state, sim.views(2, engine), sim.predictions(2, engine).outputs


def test_a_layer_is_pytorchs_with_the_same_weights():
    torch.manual_seed(0)
    ours = Layer(8, 2, 6, 0.0)
    theirs = nn.TransformerEncoderLayer(8, 2, 6, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
    parts = [(theirs.norm1, ours.norm1), (theirs.norm2, ours.norm2), (theirs.linear1, ours.wide)]
    parts += [(theirs.linear2, ours.narrow), (theirs.self_attn.out_proj, ours.attention.output)]
    for their, our in parts:
        their.load_state_dict(our.state_dict())
    own = ours.attention
    with torch.no_grad():
        theirs.self_attn.in_proj_weight.copy_(torch.cat([own.query.weight, own.key.weight, own.value.weight]))
        theirs.self_attn.in_proj_bias.copy_(torch.cat([own.query.bias, own.key.bias, own.value.bias]))
    h, padding = torch.randn(3, 5, 8), torch.tensor([5, 2, 4])[:, None] <= torch.arange(5)
    mask = torch.where(padding, -1e9, 0.0)[:, None, None]
    torch.testing.assert_close(ours(h, mask)[~padding], theirs(h, src_key_padding_mask=padding)[~padding])


def test_padding_changes_nothing_and_order_does():
    model = small(layers=2).eval()
    x = torch.tensor([[3, 1, 30, 9, 12, 2]])
    longer = nn.functional.pad(x, (0, 5))
    torch.testing.assert_close(model(longer), model(x))
    assert not torch.allclose(model(x.flip(1)), model(x), atol=1e-3)
    assert torch.isfinite(model(torch.zeros(2, 6, dtype=torch.long))).all()  # nothing but padding
    vectors = transformer((6, 5), 4, dim=8, heads=2, layers=1, hidden=6).eval()
    h = torch.randn(2, 6, 5)
    torch.testing.assert_close(vectors(nn.functional.pad(h, (0, 0, 0, 3))), vectors(h))


def test_shapes_that_it_cannot_take_are_refused():
    with pytest.raises(ValueError, match="needs a sequence of tokens"):
        transformer((1, 8, 8), 4)
    with pytest.raises(ValueError, match="dim = 6 must be"):
        transformer((8,), 4, dim=6, heads=2)


@pytest.mark.parametrize("module", [small, Own])
def test_dropout_and_attention_stack(module):
    same(outcome(module(), LOOP), outcome(module(), Engine("stacked", chunk=3)), "loop and stacked", ROUNDING)


def test_dropout_inside_attention_trains_otherwise():
    one, other = (outcome(Own(dropout), LOOP)[2] for dropout in (0.0, 0.2))
    assert not torch.allclose(one, other, atol=1e-4)


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("module", [small, Own])
def test_every_engine_agrees(module, monkeypatch):
    monkeypatch.delenv("COTERIE_BACKEND", raising=False)
    base = outcome(module(), LOOP)
    for name, engine in engines():
        same(base, outcome(module(), engine), f"{name} and one client at a time", ROUNDING)


def test_whole_numbers_reach_a_model_that_takes_them_and_floats_one_that_does_not(tmp_path):
    draw = torch.Generator().manual_seed(0)
    clients = [(torch.randint(1, 9, (30, 4), generator=draw), torch.arange(30) % 2) for _ in range(3)]

    def tokens(shape, outputs):
        return nn.Sequential(nn.Embedding(9, 3), nn.Flatten(), nn.Linear(3 * shape[0], outputs))

    for model, dtype in ((tokens, torch.int64), ("mlp", torch.float32)):
        out = tmp_path / str(dtype)
        result = coterie.run("fedavg", clients, model=model, rounds=2, out=out, report=False, engine="loop", workers=1)
        loaded, x = coterie.load(out, 1, model=model), clients[0][0]
        assert torch.equal(loaded(x.to(dtype)), result.model("client-1")(x.to(dtype)))
    with pytest.raises(coterie.ConfigError, match="does not accept whole numbers from 1 to 8"):
        coterie.run("fedavg", clients, model=lambda shape, outputs: nn.Sequential(nn.Embedding(8, 2), nn.Flatten()))


@pytest.mark.slow
def test_it_learns_what_no_sum_over_words_can_tell():
    result = coterie.run("fedavg", "dialects", engine="stacked", report=False)
    rows = {row["client"]: row["test_balanced_accuracy"] for row in result.clients}
    assert result.mean("balanced_accuracy") > result.reference.mean("balanced_accuracy") + 0.1
    assert min(rows["hill"], rows["dale"]) > 0.75  # a sum of scores for each word has 0.5
