"""Makes a federation from a Hugging Face dataset that a partitioner of `flwr-datasets` splits among clients.

    from datasets import load_dataset
    from flwr_datasets.partitioner import DirichletPartitioner

    partitioner = DirichletPartitioner(num_partitions=10, partition_by="label", alpha=0.3)
    partitioner.dataset = load_dataset("mnist", split="train")
    coterie.run("fedmap", from_partitioner(partitioner, x="image", y="label"), model="cnn")

Both packages come with `pip install 'coterie[huggingface]'`. Neither is imported here: any object
with `num_partitions` and `load_partition(i)` is a partitioner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.core.errors import DataError
from coterie.data.federation import Federation, from_clients


def from_partitioner(
    partitioner: Any,
    *,
    x: str | Sequence[str],
    y: str,
    name: str = "own-data",
    regression: bool | None = None,
    validation: float = 0.1,
    test: float = 0.3,
    seed: int = 0,
) -> Federation:
    """Make a federation with one client per partition.

    Args:
        partitioner: Has `num_partitions` and `load_partition(i)`.
        x: A column of images, arrays or lists, or several columns of numbers. Images of bytes become [channels, height,
            width] in 0..1.
        y: The column of targets. Classes keep their names if they have any, or are text.
        name: The name of the federation.
        regression: Whether targets are numbers to predict; by default if they are floating-point.
        validation: Share of each client's examples for validation.
        test: Share of each client's examples for testing.
        seed: Seed of the splits.

    Raises:
        DataError: A column is missing, or its cells do not stack to one array.
    """
    parts = [partitioner.load_partition(i) for i in range(partitioner.num_partitions)]
    if not parts:
        raise DataError("the partitioner has no partitions")
    wanted = [x] if isinstance(x, str) else list(x)
    for column in [*wanted, y]:
        if column not in parts[0].column_names:
            raise DataError(f"the dataset has no column '{column}'; it has {', '.join(parts[0].column_names)}")
    targets = [np.asarray(part[y][:]) for part in parts]
    classes = tuple(getattr(parts[0].features[y], "names", None) or ())
    if targets[0].dtype.kind in "UO":  # text
        classes = tuple(map(str, np.unique(np.concatenate(targets))))
        place = {each: i for i, each in enumerate(classes)}
        targets = [np.array([place[str(label)] for label in each], np.int64) for each in targets]
    clients = {
        f"partition-{i}": (_inputs(part, x), torch.from_numpy(np.ascontiguousarray(target)))
        for i, (part, target) in enumerate(zip(parts, targets, strict=True))
    }
    federation = from_clients(
        clients,
        name=name,
        num_classes=len(classes) or None,
        regression=False if classes else regression,
        validation=validation,
        test=test,
        seed=seed,
    )
    return replace(federation, classes=classes)


def _inputs(part: Any, x: str | Sequence[str]) -> Tensor:
    if not isinstance(x, str):
        return torch.from_numpy(np.stack([np.asarray(part[name][:], np.float32) for name in x], 1))
    cells = [np.asarray(cell) for cell in part[x]]
    if any(cell.shape != cells[0].shape for cell in cells):
        raise DataError(f"column '{x}': its cells have different shapes; resize or pad them first (dataset.map)")
    values = np.stack(cells)
    if values.dtype.kind not in "fiub":
        raise DataError(f"column '{x}' is {values.dtype}: inputs must be numbers or images")
    if hasattr(part[0][x], "getbands"):  # Pillow images: [rows, height, width(, channels)]
        values = values[:, None] if values.ndim == 3 else values.transpose(0, 3, 1, 2)
        values = values.astype(np.float32) / 255 if values.dtype == np.uint8 else values
    return torch.from_numpy(np.ascontiguousarray(values, np.float32))
