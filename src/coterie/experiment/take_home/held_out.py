"""Cross-validation for clients whose validation examples are too few to choose by what they take home.

The training and validation examples of such a client are divided into parts. For each part the federation is trained
again, without that part, for as many rounds as were selected, and the client's model predicts the part. So each of its
examples is predicted once by a model that has not seen it, instead of only the few for validation. In these trainings
all such clients hold out their part of the same number, and the others train on what they always train on.

The rounds stay those that the run has selected, and no test example is predicted. What is judged is the method at this
client, with a fold's share of its examples less, and not one model; that is what a cross-validation can do.

Where a table has groups, such as patients with several rows, a group's rows are in one part. With privacy nothing is
cross-validated: its budget is that of one training.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from coterie.core.errors import CoterieError
from coterie.core.units import parse_bytes
from coterie.data.federation import Federation, Split, replace_unchecked
from coterie.engine import ClientRunner
from coterie.evaluation import Predictions
from coterie.experiment.divergence import DIVERGED
from coterie.experiment.mixed_simulation import begin
from coterie.experiment.setup import Setup
from coterie.experiment.tuning.folds import pieces_of
from coterie.storage.paged_rows import Store

TINY = 50  # validation examples, below which a client's choice is cross-validated (docs/adoption.md)


def tiny_clients(setup: Setup) -> list[int]:
    """Return the clients whose choice is cross-validated, by number."""
    config, federation = setup.config, setup.federation
    if config.take_home != "best" or config.take_home_folds < 2 or config.privacy is not None:
        return []
    return [i for i in range(len(federation.names)) if len(federation.split(i).validation) < TINY]


def predict_held_out(setup: Setup, rounds: int, engine: ClientRunner) -> Predictions | None:
    """Return what clients' models say of examples that they have not seen; only clients with few for validation.

    Args:
        setup: what was run.
        rounds: how many rounds to train in each fold.
        engine: computes the clients' updates.

    Returns:
        Their predictions, in the order of the clients; None if no client needs them, or if training diverged.
    """
    who = tiny_clients(setup)
    if not who:
        return None
    found = []
    try:
        for federation, holding in _folds(setup.federation, who, setup.config.take_home_folds, setup.config.data_seed):
            predictions = _trained(dataclasses.replace(setup, federation=federation), rounds, engine)
            theirs = torch.isin(predictions.owner, torch.tensor(holding))
            found.append([part[theirs] for part in predictions])
    except CoterieError as error:
        if not str(error).startswith(DIVERGED):
            raise
        return None
    if not found:
        return None
    outputs, y, owner = (torch.cat(part) for part in zip(*found, strict=True))
    order = torch.argsort(owner, stable=True)
    return Predictions(outputs[order], y[order], owner[order])


def _trained(setup: Setup, rounds: int, engine: ClientRunner) -> Predictions:
    config = setup.config
    sim = begin(setup, Store(parse_bytes(config.memory) // 2, None))
    sim.heard, sim.sampler = config.clients_heard, config.sampler
    for number in range(1, rounds + 1):
        sim.train(number, engine)
    return sim.predictions(rounds, engine)


def _folds(federation: Federation, who: list[int], number: int, seed: int) -> list[tuple[Federation, list[int]]]:
    """Return a federation for each fold, and which of the clients `who` hold out some of their examples in it."""
    clients = {
        name: Split(own.train, own.validation[:1], own.validation[:1]) for name, own in federation.clients.items()
    }
    made = [(dict(clients), list[int]()) for _ in range(number)]  # every client needs an example of each kind
    for i in who:
        name = federation.names[i]
        own = federation.clients[name]
        pieces = pieces_of(federation, name, number, seed)
        if len(pieces) < 2:
            continue  # one patient alone cannot be held out
        for k, piece in enumerate(pieces):
            rest = np.concatenate([other for j, other in enumerate(pieces) if j != k])
            made[k][0][name] = Split(np.sort(rest), own.validation[:1], np.sort(piece))
            made[k][1].append(i)
    return [(replace_unchecked(federation, clients=each), holding) for each, holding in made if holding]
