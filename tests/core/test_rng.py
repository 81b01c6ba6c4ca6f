import numpy as np
import torch

from coterie.core import rng


def test_many_seeds_are_the_seeds_of_each():
    names = ["site-1", "Zürich", "", "a\x1fb"]
    many = rng.seeds_of((7, "participation", 3), names)
    assert many.tolist() == [rng.seed_of(7, "participation", 3, name) for name in names]
    assert many.argsort(kind="stable").tolist() == sorted(range(4), key=lambda i: int(many[i]))
    assert np.issubdtype(many.dtype, np.unsignedinteger)


def test_normal_numbers_are_normal_and_belong_to_key_tensor_and_position():
    like = {"a": torch.zeros(60_000), "b": torch.zeros(60_000, dtype=torch.float64)}
    first, other = (rng.normals(torch.tensor(key), like) for key in (5, 5 + rng.ROUND_STEP % 2**62))
    for each in (*first.values(), *other.values()):
        assert abs(float(each.mean())) < 0.025  # six standard errors
        assert abs(float(each.var()) - 1) < 0.04
        assert abs(float((each.abs() < 1).double().mean()) - 0.6827) < 0.012
    assert first["b"].dtype == torch.float64
    rows = torch.stack([first["a"], first["b"].float(), other["a"], other["b"].float()])
    assert (torch.corrcoef(rows) - torch.eye(4)).abs().max() < 0.025
    assert torch.equal(first["a"], rng.normals(torch.tensor(5), like)["a"])


def test_servers_of_runs_with_other_seeds_draw_other_numbers():
    assert rng.server_seed(3) == rng.server_seed(3) != rng.server_seed(4)
    assert 0 <= rng.server_seed(3) < 2**63
