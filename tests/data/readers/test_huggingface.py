import numpy as np
import pytest
import torch

import coterie
from coterie.core.errors import DataError
from coterie.data.readers.huggingface import from_partitioner

datasets = pytest.importorskip("datasets", reason="pip install 'coterie[huggingface]'")
partitioners = pytest.importorskip("flwr_datasets.partitioner", reason="pip install 'coterie[huggingface]'")


def dataset():
    draw = np.random.default_rng(0)
    labels = draw.integers(3, size=240)
    return datasets.Dataset.from_dict(
        {
            **{"a": draw.normal(labels), "b": draw.normal(size=240), "v": draw.normal(size=(240, 4)).tolist()},
            **{"label": labels, "name": [f"n{i}" for i in labels], "cost": draw.normal(size=240)},
        }
    ).cast_column("label", datasets.ClassLabel(names=["x", "y", "z"]))


def dealt(partitioner):
    partitioner.dataset = dataset()
    return partitioner


def test_every_row_belongs_to_the_client_of_its_partition():
    partitioner = dealt(partitioners.IidPartitioner(num_partitions=4))
    federation = from_partitioner(partitioner, x=["a", "b"], y="label")
    assert federation.names == tuple(f"partition-{i}" for i in range(4))
    assert federation.classes == ("x", "y", "z")
    assert (federation.num_classes, federation.x.shape) == (3, (240, 2))
    for i in range(4):
        rows = np.sort(np.concatenate([federation.split(i)[part] for part in ("train", "validation", "test")]))
        part = partitioner.load_partition(i)
        np.testing.assert_allclose(federation.x[rows, 0], part["a"][:], rtol=1e-6)
        assert federation.y[rows].tolist() == list(part["label"])


def test_a_dirichlet_partition_runs():
    partitioner = dealt(
        partitioners.DirichletPartitioner(
            num_partitions=3, partition_by="label", alpha=1.0, min_partition_size=10, seed=1
        )
    )
    federation = from_partitioner(partitioner, x="v", y="name")
    assert federation.classes == ("n0", "n1", "n2")
    result = coterie.run("fedavg", federation, model="tabular", rounds=1, engine="loop", compile=False, workers=1)
    assert len(result.clients) == 3


def test_images_and_regression():
    pil = pytest.importorskip("PIL.Image")
    pictures = [pil.fromarray(np.full((4, 5, 3), i, np.uint8)) for i in range(12)]
    partitioner = partitioners.IidPartitioner(num_partitions=2)
    partitioner.dataset = datasets.Dataset.from_dict({"image": pictures, "y": np.linspace(0, 1, 12)}).cast_column(
        "image", datasets.Image()
    )
    federation = from_partitioner(partitioner, x="image", y="y")
    assert federation.x.shape == (12, 3, 4, 5)
    assert federation.kind == "regression"
    torch.testing.assert_close(federation.x[:, 0, 0, 0], torch.arange(12) / 255)


def test_what_is_wrong_is_said():
    partitioner = dealt(partitioners.IidPartitioner(num_partitions=2))
    with pytest.raises(DataError, match="has no column 'q'; it has a, b"):
        from_partitioner(partitioner, x="q", y="label")
    with pytest.raises(DataError, match="inputs are numbers, or images"):
        from_partitioner(partitioner, x="name", y="label")
