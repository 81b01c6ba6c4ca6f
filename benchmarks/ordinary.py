"""Methods as they are usually written in PyTorch: the other side of `whole_run.py` and of `study.py`.

One `nn.Module` a client, a shuffling `DataLoader` each, `torch.optim.SGD`, one client after the other, all cores as
threads inside each operation. A penalty is added to the loss; models are moved as lists of parameters.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

Vector = list[Tensor]
Batch = tuple[Tensor, ...]


class Work(NamedTuple):
    """What a round trains on: of two sides that are compared it must be the same."""

    gradients: int
    examples: int  # of all gradients
    scored: int  # examples whose loss is taken without a gradient


def vector(module: nn.Module) -> Vector:
    return [parameter.detach().clone() for parameter in module.parameters()]


@torch.no_grad()
def put(module: nn.Module, values: Vector) -> None:
    for parameter, value in zip(module.parameters(), values, strict=True):
        parameter.copy_(value)


def mean(models: list[Vector], weights: list[float]) -> Vector:
    total = sum(weights)
    return [sum(w / total * p for w, p in zip(weights, each, strict=True)) for each in zip(*models, strict=True)]


def squared(a: Vector, b: Vector) -> Tensor:
    return torch.stack([((p - q) ** 2).sum() for p, q in zip(a, b, strict=True)]).sum()


class Ordinary(ABC):
    """`round` trains every client for one epoch, combines, and returns each client's test accuracy."""

    def __init__(
        self, module: nn.Module, train: list[TensorDataset], test: list[TensorDataset], batch: int, lr: float
    ) -> None:
        self.modules = [copy.deepcopy(module) for _ in train]
        self.loaders = [DataLoader(data, batch_size=batch, shuffle=True) for data in train]
        self.tests = [DataLoader(data, batch_size=256) for data in test]
        self.sizes = [float(len(data)) for data in train]
        self.lr = lr
        self.work = Work(0, 0, 0)  # of the last round
        self.start(vector(module))

    def round(self) -> list[float]:
        self.work = Work(0, 0, 0)
        self.train()
        return [self.accuracy(i) for i in range(len(self.modules))]

    @abstractmethod
    def start(self, initial: Vector) -> None: ...

    @abstractmethod
    def train(self) -> None: ...

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """The mean of a minibatch, for a gradient."""
        gradients, examples, scored = self.work
        self.work = Work(gradients + 1, examples + len(batch[1]), scored)
        return F.cross_entropy(module(batch[0]), batch[1])

    def epoch(self, i: int, anchor: Vector | None = None, strength: float = 0.0) -> None:
        """SGD on the loss, with strength / 2 ||w - anchor||^2 if there is an anchor."""
        module = self.modules[i].train()
        optimizer = torch.optim.SGD(module.parameters(), lr=self.lr)
        for batch in self.loaders[i]:
            optimizer.zero_grad()
            loss = self.loss(module, batch)
            if anchor is not None:
                loss = loss + strength / 2 * squared(list(module.parameters()), anchor)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    @torch.no_grad()
    def score(self, i: int) -> float:
        """The mean loss of a client's model on its training examples."""
        module, total, seen = self.modules[i].eval(), 0.0, 0
        for x, y in self.loaders[i]:
            total, seen = total + float(F.cross_entropy(module(x), y, reduction="sum")), seen + len(y)
        self.work = Work(self.work.gradients, self.work.examples, self.work.scored + seen)
        return total / seen

    @torch.no_grad()
    def accuracy(self, i: int) -> float:
        module = self.modules[i].eval()
        right = sum(int((module(x).argmax(1) == y).sum()) for x, y in self.tests[i])
        return right / sum(len(y) for _, y in self.tests[i])


class FedAvg(Ordinary):
    def start(self, initial: Vector) -> None:
        self.model = initial

    def train(self) -> None:
        for i, module in enumerate(self.modules):
            put(module, self.model)
            self.epoch(i)
        self.model = mean([vector(module) for module in self.modules], self.sizes)
        for module in self.modules:  # what a client would deploy
            put(module, self.model)


class Local(Ordinary):
    """Every client alone."""

    def start(self, initial: Vector) -> None: ...

    def train(self) -> None:
        for i in range(len(self.modules)):
            self.epoch(i)


class FedProx(Ordinary):
    """A pull that takes back a tenth of a client's way in a round."""

    PULL = 0.1

    def start(self, initial: Vector) -> None:
        self.model = initial

    def train(self) -> None:
        for i, module in enumerate(self.modules):
            put(module, self.model)
            self.epoch(i, self.model, self.PULL / (self.lr * len(self.loaders[i])))
        self.model = mean([vector(module) for module in self.modules], self.sizes)
        for module in self.modules:
            put(module, self.model)


class FedPer(Ordinary):
    """The last layer (its weight and its bias) stays with the client; the rest is averaged."""

    HEAD = 2  # parameters

    def start(self, initial: Vector) -> None: ...

    def train(self) -> None:
        for i in range(len(self.modules)):
            self.epoch(i)
        models = [vector(module) for module in self.modules]
        base = mean([model[: -self.HEAD] for model in models], self.sizes)
        for module, model in zip(self.modules, models, strict=True):
            put(module, [*base, *model[-self.HEAD :]])


class Ditto(Ordinary):
    """FedAvg beside a personal model that is pulled towards what was received; both train, the personal one is used."""

    LAM = 1.0

    def start(self, initial: Vector) -> None:
        self.model = initial
        self.personal = [initial for _ in self.modules]

    def train(self) -> None:
        trained = []
        for i, module in enumerate(self.modules):
            put(module, self.model)
            self.epoch(i)
            trained.append(vector(module))
            put(module, self.personal[i])
            self.epoch(i, self.model, self.LAM)
            self.personal[i] = vector(module)
        self.model = mean(trained, self.sizes)


class Scaffold(Ordinary):
    """Control variates from the gradients of the round; a step follows the gradient less the client's, plus all's."""

    def start(self, initial: Vector) -> None:
        self.model = initial
        self.c = [torch.zeros_like(p) for p in initial]
        self.own = [self.c for _ in self.modules]

    def train(self) -> None:
        own = [self.client(i) for i in range(len(self.modules))]
        equal = [1.0] * len(own)
        self.model = mean([vector(module) for module in self.modules], equal)
        change = mean(
            [[new - old for new, old in zip(*pair, strict=True)] for pair in zip(own, self.own, strict=True)], equal
        )
        self.c = [c + d for c, d in zip(self.c, change, strict=True)]
        self.own = own
        for module in self.modules:
            put(module, self.model)

    def client(self, i: int) -> Vector:
        module = self.modules[i].train()
        put(module, self.model)
        optimizer = torch.optim.SGD(module.parameters(), lr=self.lr)
        total, steps = [torch.zeros_like(p) for p in self.model], 0
        for batch in self.loaders[i]:
            optimizer.zero_grad()
            self.loss(module, batch).backward()  # type: ignore[no-untyped-call]
            for p, t, c, own in zip(module.parameters(), total, self.c, self.own[i], strict=True):
                assert p.grad is not None
                t += p.grad
                p.grad += c - own
            optimizer.step()
            steps += 1
        return [t / steps for t in total]


class FedAMP(Ordinary):
    """Negative-exponential attention, sigma the median squared distance over 4, alpha = sigma / m, a gentle pull."""

    def start(self, initial: Vector) -> None:
        self.cloud = [initial for _ in self.modules]

    def train(self) -> None:
        for i in range(len(self.modules)):
            put(self.modules[i], self.cloud[i])
            self.epoch(i, self.cloud[i], min(1.0, 0.05 / (self.lr * len(self.loaders[i]))))
        models = [vector(module) for module in self.modules]
        m = len(models)
        distance = torch.tensor([[float(squared(a, b)) for b in models] for a in models])
        sigma = float(distance[~torch.eye(m, dtype=torch.bool)].median()) / 4
        for i in range(m):
            xi = torch.exp(-distance[i] / sigma) / m
            xi[i] = 0
            xi[i] = 1 - xi.sum()
            self.cloud[i] = mean(models, xi.tolist())


class FedMAP(Ordinary):
    """A Gaussian prior that takes back a tenth of a client's way in a round, and clients weighted by their examples.

    A client begins at its own model or at the prior's centre, whichever is better on its training examples.
    """

    PULL = 0.1

    def start(self, initial: Vector) -> None:
        self.gamma = initial

    def train(self) -> None:
        for i, module in enumerate(self.modules):
            strength = self.PULL / (self.lr * len(self.loaders[i]))
            own = vector(module)
            from_own = self.score(i) + strength / 2 * float(squared(own, self.gamma))
            put(module, self.gamma)
            if from_own <= self.score(i):
                put(module, own)
            self.epoch(i, self.gamma, strength)
        self.gamma = mean([vector(module) for module in self.modules], self.sizes)


class PFedBreD(Ordinary):
    """Strategy mh as its authors wrote it: a MAML step over two minibatches, the memory, K proximal steps."""

    LAM, ETA, K = 15.0, 0.05, 5

    def start(self, initial: Vector) -> None:
        self.outer = min(self.lr / (1 - max(0.0, 1 - self.lr * self.LAM) ** self.K), 1 / self.LAM)
        self.model = initial
        self.theta = [initial for _ in self.modules]
        self.memory = [initial for _ in self.modules]

    def train(self) -> None:
        received = [self.client(i) for i in range(len(self.modules))]
        self.model = mean(received, self.sizes)

    def client(self, i: int) -> Vector:
        module, w, theta, memory = self.modules[i].train(), self.model, self.theta[i], self.memory[i]
        for first, second in pairs(self.loaders[i]):
            inner = self.descend(module, w, w, first)
            w = self.descend(module, w, inner, second)
            mu = [p - self.ETA * (m - t) for p, m, t in zip(w, memory, theta, strict=True)]
            put(module, w)
            optimizer = torch.optim.SGD(module.parameters(), lr=self.lr)
            for _ in range(self.K):
                optimizer.zero_grad()
                (self.loss(module, second) + self.LAM / 2 * squared(list(module.parameters()), mu)).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            theta = vector(module)
            w = [p - self.outer * self.LAM * (m - t) for p, m, t in zip(w, mu, theta, strict=True)]
        self.theta[i], self.memory[i] = theta, w
        return w

    def descend(self, module: nn.Module, start: Vector, at: Vector, batch: Batch) -> Vector:
        put(module, at)
        grads = torch.autograd.grad(self.loss(module, batch), list(module.parameters()))
        return [p - self.lr * g for p, g in zip(start, grads, strict=True)]


def pairs(loader: DataLoader[Batch]) -> Iterator[tuple[Batch, Batch]]:
    """Every minibatch with the one after it; the last with the first."""
    batches = list(loader)
    return zip(batches, batches[1:] + batches[:1], strict=True)


METHODS: dict[str, type[Ordinary]] = {"fedavg": FedAvg, "fedamp": FedAMP, "fedmap": FedMAP, "pfedbred": PFedBreD}

STUDY: dict[str, type[Ordinary]] = {
    **{"local": Local, "fedavg": FedAvg, "fedprox": FedProx, "fedper": FedPer, "ditto": Ditto, "scaffold": Scaffold},
    **{"fedamp": FedAMP, "fedmap": FedMAP},
}
