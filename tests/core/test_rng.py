import numpy as np

from coterie.core import rng


def test_many_seeds_are_the_seeds_of_each():
    names = ["site-1", "Zürich", "", "a\x1fb"]
    many = rng.seeds_of((7, "participation", 3), names)
    assert many.tolist() == [rng.seed_of(7, "participation", 3, name) for name in names]
    assert many.argsort(kind="stable").tolist() == sorted(range(4), key=lambda i: int(many[i]))
    assert np.issubdtype(many.dtype, np.unsignedinteger)
