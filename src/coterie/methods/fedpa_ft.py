"""FedPA with fine-tuning (Al-Shedivat et al., "Federated Learning via Posterior Averaging: A New Perspective and
Practical Algorithms", ICLR 2021).

The mode of a product of Gaussian posteriors is where sum_i Sigma_i^-1 (w - mu_i) = 0. So a client does not send how far
it moved, but that distance in the metric of its own posterior, estimated from samples of its SGD iterates:

    x_1 ... x_l <- means of the iterates over l parts of the steps after B         (`_iteration`; iterate-averaged SG)
    Sigma_i = rho_l I + (1 - rho_l) S_l,   rho_l = 1 / (1 + (l - 1) rho)           (`_direction`; shrinkage covariance)
    Delta_i = Sigma_i^-1 (w - mean x)                                              (`_direction`; Algorithm 3)
    w       <- w - server_lr sum_i (n_i / n) Delta_i                               (`aggregate`; Algorithm 1)
    theta_i <- SGD on f_i, over `finetune_epochs` epochs, from w                   (`personalize`; "FT")

S_l is the samples' covariance. The paper finds Delta_i by a recursion over samples, and here the same number comes from
one system of l equations (Woodbury; tested against the dense inverse). In the first `burn_in` rounds, and with
`samples` = 0, Delta_i is the way that SGD went, which is FedAvg (tested).

Iterates are samples of a posterior only once they have stopped travelling. So, as in the paper, there are two burn-ins:
`burn_in` rounds of FedAvg, a number or `auto` (default), which is half of the run's rounds; and in each later round B
steps, the share `settle` of the client's, before the first sample. A mean over all of a round's iterates, from its very
start, would go only half of the way that FedAvg goes.

Details: the client's steps after B are cut into l parts of equal length, and the iterates of a part are averaged into
one sample; a client of fewer steps has fewer samples. Buffers are averaged. The fine-tuned model is never sent or kept.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import torch
from pydantic import Field
from torch import Tensor

from coterie.core import tree
from coterie.core.batches import MIN_TOTAL_WEIGHT, Batch, Batches
from coterie.core.method import Info, Method, Population, TrainedAndBuffers
from coterie.core.optimizers import SGD, Optimizer
from coterie.core.scan import scan
from coterie.core.search import Search
from coterie.core.task import Task
from coterie.core.training import gradient, train
from coterie.core.tree import Params


class Server(NamedTuple):
    w: Params
    round: Tensor  # [] int64; rounds so far


@dataclass(frozen=True)
class FedPAFT(Method[Server, tuple[()], Server, TrainedAndBuffers]):
    optimizer: Optimizer = SGD()
    samples: Annotated[int, Field(ge=0, description="l, posterior samples of a client and round; 0 is FedAvg")] = 5
    rho: Annotated[
        float, Search(1e-3, 1), Field(ge=0, description="shrinkage; 0 makes the covariance the identity")
    ] = 0.01
    burn_in: Annotated[
        Literal["auto"] | Annotated[int, Field(ge=0)],
        Field(description="rounds of FedAvg before samples are used; auto: half of all rounds"),
    ] = "auto"
    settle: Annotated[float, Field(ge=0, lt=1, description="share of a round's steps before the first sample")] = 0.5
    server_lr: Annotated[float, Field(gt=0, description="step size of w")] = 1.0
    finetune_epochs: Annotated[int, Search(1, 10), Field(ge=0, description="epochs on own data before use")] = 1

    law_contexts: ClassVar[tuple[dict[str, Any], ...]] = ({"burn_in": 0},)

    @property
    def stepped(self) -> tuple[str, ...]:
        return ("w",)

    @property
    def personalize_epochs(self) -> int:
        return self.finetune_epochs

    def scheduled(self, rounds: int) -> Self:
        return dataclasses.replace(self, burn_in=rounds // 2) if self.burn_in == "auto" else self

    def init_server(self, params: Params, population: Population) -> Server:
        return Server(params, torch.zeros((), dtype=torch.int64))

    def init_client(self, params: Params) -> tuple[()]:
        return ()

    def dispatch(self, server: Server, ids: Tensor, rng: torch.Generator) -> Server:
        return tree.broadcast(server, len(ids))

    def local_update(
        self, task: Task, client: tuple[()], down: Server, batches: Batches
    ) -> tuple[tuple[()], TrainedAndBuffers, Info]:
        begin = task.split(down.w)[0]
        zero = batches.mask.new_zeros(())
        room = tree.map(lambda leaf: leaf.new_zeros(self.samples, *leaf.shape), begin)
        steps = batches.mask.flatten(0, 1).any(-1).sum()
        start = (down.w, self.optimizer.init(begin), room, zero.new_zeros(self.samples), zero, zero, zero)
        w, _, sums, lengths, _, total, seen = scan(partial(self._iteration, task), start, steps, batches)
        trained, buffers = task.split(task.sent(w))
        delta = tree.sub(begin, trained)
        if self.samples and not isinstance(self.burn_in, str):
            delta = tree.where(down.round >= self.burn_in, self._direction(begin, sums, lengths), delta)
        up = TrainedAndBuffers(delta, buffers, batches.count)
        return (), up, {"loss": total / seen.clamp_min(MIN_TOTAL_WEIGHT)}

    def aggregate(self, server: Server, ids: Tensor, ups: TrainedAndBuffers) -> Server:
        delta = tree.mean(ups.trained, ups.count)
        moved = {name: server.w[name] - self.server_lr * value for name, value in delta.items()}
        return Server({**server.w, **moved, **tree.mean(ups.buffers, ups.count)}, server.round + 1)

    def personalize(self, task: Task, client: tuple[()], down: Server, batches: Batches) -> Params:
        return train(task, self.optimizer, down.w, batches)[0]

    def global_model(self, server: Server) -> Params:
        return server.w

    def _iteration(self, task: Task, carry: Any, steps: Tensor, batch: Batch) -> Any:
        """Do one minibatch: a step of a scan."""
        w, state, sums, lengths, step, total, seen = carry
        grads, loss, rest = gradient(task, w, batch)
        trained, state = self.optimizer.update(grads, state, task.split(w)[0])
        first = (self.settle * steps).floor()  # B; never all of the steps
        part = ((step - first) * self.samples / (steps - first).clamp_min(1)).floor()  # below 0: of no sample
        here = (torch.arange(self.samples, device=part.device) == part).to(lengths)  # [l]
        sums = tree.map(lambda s, x: s + here.reshape(-1, *[1] * x.ndim) * x, sums, trained)
        count = batch.mask.sum()
        return {**rest, **trained}, state, sums, lengths + here, step + 1, total + loss * count, seen + count

    def _direction(self, begin: Params, sums: Params, lengths: Tensor) -> Params:
        """Return Sigma_i^-1 (w - mean x), from the samples' sums over the `lengths` [l] of their parts."""
        used = lengths > 0
        number = used.sum()

        samples = tree.map(lambda s: s / _over(lengths.clamp_min(1), s), sums)
        mean = tree.map(lambda x: (x * _over(used.to(x), x)).sum(0) / number, samples)
        centred = tree.map(lambda x, m: (x - m) * _over(used.to(x), x), samples, mean)
        away = tree.sub(begin, mean)
        rho = 1 / (1 + (number - 1) * self.rho)
        gram = _sum([leaf.flatten(1) @ leaf.flatten(1).T for leaf in centred.values()])
        along = _sum([leaf.flatten(1) @ away[name].flatten() for name, leaf in centred.items()])
        # Sigma = rho I + c X'X with c = (1 - rho) / (l - 1):  Sigma^-1 b = (b - c X' (rho I + c XX')^-1 X b) / rho
        c = (1 - rho) / (number - 1).clamp_min(1)
        system = rho * torch.eye(self.samples, dtype=gram.dtype, device=gram.device) + c * gram
        solved = torch.linalg.solve(system, along)
        return {
            name: (value - c * (centred[name] * _over(solved, centred[name])).sum(0)) / rho
            for name, value in away.items()
        }


def _over(values: Tensor, samples: Tensor) -> Tensor:
    """Shape `values` [l] so that they multiply `samples` [l, ...]."""
    return values.reshape(-1, *[1] * (samples.ndim - 1))


def _sum(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).sum(0)
