"""Makes pFedBreD's federations of MNIST and Fashion-MNIST (section 6; the recipe is that of the authors' generator).

The official training and test images are pooled. User u of 100 has the labels (u + j) mod 10 for its slots j: three on
MNIST, two on Fashion-MNIST. Each slot first gets 10 images, and then int(p) U{1..10} + U{10..200} more unless that
would use up the class, with

    p = (n_l - 1000) LogNormal(0, 2)[l, u // 10, j] / sum over (user, slot) of LogNormal[l]

where n_l is the size of the class. A quarter of each user's images is for testing. MNIST is scaled pixel by pixel,
(x - mean) / (sd + 0.001), Fashion-MNIST by one mean and one standard deviation, both over the pool.

The authors' MNIST generator labels the first 30 images of each user by the slot (0, 1, 2) instead of by the digit. That
is wrong for 90 of 100 users, and is what the paper's numbers come from. `slot_labels` keeps that.

`authors` makes the federation with the authors' own random numbers: NumPy's old generator, seeded with 1 (MNIST) or 0
(Fashion-MNIST), draws the log-normal numbers, and Python's the rest of the sizes and the splits. They seed the latter
with 1 for MNIST, whose federation is then theirs to the image, and not at all for Fashion-MNIST, where it is our seed:
the shares are theirs, and each seed is another draw of the rest. Images are dealt in the order of the files, and the
splits are not stratified.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch

from coterie.data.federation import Federation, Split, split_client
from coterie.data.partition.sizes import Draws, lognormal
from coterie.data.readers.idx import read_pool

USERS = 100
AUTHORS_SEEDS: dict[str, tuple[int, int | None]] = {"mnist": (1, 1), "fashion-mnist": (0, None)}  # NumPy's, Python's


def pfedbred(
    name: str,
    source: str,
    slots: int,
    seed: int,
    validation: float,
    test: float,
    folder: Path,
    *,
    slot_labels: bool,
    authors: bool = False,
) -> Federation:
    """Make the federation from the idx files in `folder`; `slots` is the number of labels per user."""
    pool = read_pool(source, folder)
    digits = pool.y.numpy()
    x = pool.x.flatten(1).numpy().astype(np.float32) / 255
    if source == "mnist":
        x = (x - x.mean(0)) / (x.std(0) + 0.001)
    else:
        x = (x - x.mean()) / x.std()
    chosen, labels, splits, start = [], [], {}, 0
    python, draws = authors_draws(source, seed) if authors else (None, None)
    for user, (own, given) in enumerate(deal(digits, slots, seed, slot_labels, draws)):
        client = f"user-{user:02d}"
        if python is None:
            split = split_client(client, len(own), given, validation, test, seed)
        else:
            split = _cut_as_authors(len(own), validation, test, python)
        splits[client] = Split(split.train + start, split.validation + start, split.test + start)
        chosen.append(own)
        labels.append(given)
        start += len(own)
    return Federation(
        name, torch.from_numpy(x[np.concatenate(chosen)]), torch.from_numpy(np.concatenate(labels)), splits, 10
    )


def deal(
    digits: np.ndarray, slots: int, seed: int, slot_labels: bool, draws: Draws | None = None
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (positions, labels) of every user; no image has two owners."""
    return [_labelled(own, digits, slots, slot_labels) for own in lognormal(digits, USERS, slots, seed, draws=draws)]


def authors_draws(source: str, seed: int) -> tuple[random.Random, Draws]:
    """Return Python's generator, which goes on to draw the splits, and the random numbers of the sizes."""
    of_numpy, of_python = AUTHORS_SEEDS[source]
    python = random.Random(seed if of_python is None else of_python)
    old = np.random.RandomState(of_numpy)
    return python, Draws(None, lambda shape: old.lognormal(0, 2.0, shape), python.randint)


def _cut_as_authors(size: int, validation: float, test: float, python: random.Random) -> Split:
    """Split a random order: what is not for testing first. Of that, a share of all is for validation."""
    order = list(range(size))
    python.shuffle(order)
    rest = min(int((1 - test) * size), size - 1)
    held = min(max(round(size * validation), 1), rest - 1)
    parts = order[held:rest], order[:held], order[rest:]
    train, validating, testing = (np.sort(np.array(part, dtype=np.int64)) for part in parts)
    return Split(train, validating, testing)


def _labelled(own: np.ndarray, digits: np.ndarray, slots: int, slot_labels: bool) -> tuple[np.ndarray, np.ndarray]:
    labels = digits[own].copy()
    if slot_labels:
        labels[: 10 * slots] = np.repeat(np.arange(slots), 10)
    return own, labels
