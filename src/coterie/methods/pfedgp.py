"""pFedGP (Achituve, Shamsian, Navon, Chechik, Fetaya, "Personalized Federated Learning with Gaussian Processes",
NeurIPS 2021).

All clients share a network, whose features z (what enters the head) are the input of a kernel k, and each client
classifies with Gaussian processes of its own, given all of its examples: a binary tree of its classes, with a binary
process at every inner node. With omega the Polya-Gamma variables of the nodes' likelihoods:

    tree_i  <- splits of the mean features of client i's classes                    (`parts.class_tree.balanced_tree`)
    omega   ~  p(omega | y_i, z_i; phi, k), by Gibbs steps                          (`parts.gaussian_process.gibbs`)
    phi_i, k_i <- steps along  grad log p(y_i | omega, z_i; phi, k) / n_i           (`_step`)
    phi, k  <- sum_i (n_i / n) (phi_i, k_i)                                         (`aggregate`)
    p(y* | x*, client i's examples): products of the nodes' E sigma(f*)             (`predict`)

By Fisher's identity, the third line is a gradient of the log marginal likelihood log p(y_i | z_i), unbiased but for the
chain's beginning. The loss that is shown is the log-loss of the training examples at the mean of f. Every step sees all
of a client's examples at once (`Batches.whole`), in training mode. `coterie.parts.gaussian_process` has the processes,
in closed form given omega. The head is never trained, sent or used. A client deploys the network with the features of
its own training examples: these stay at the client, as its data do.

The paper's variant with the client's own examples is here; its two variants with inducing points are not.

Deviations:
- A round is `inner_steps` steps for every local epoch (with `local_steps`, for the round). The loss is divided by n_i,
  so that step sizes are those of other methods; gradients are then small, and are not clipped.
- The tree is balanced, each node split in halves between two far class means, where the paper clusters class means:
  all nodes of a level are then one process, and there are ceil(log2 classes) levels. It is made anew in each round.
- The objective is the marginal likelihood. The authors' program has a choice, and begins with the predictive likelihood
  of a half of the examples given the other.
- A gradient takes one draw of omega, after `gibbs_steps` Gibbs steps (the authors: a mean over 20). A prediction takes
  `draws` (the authors: 30), and a Gaussian with
  the mean and variance of f* over them in place of their mixture (the variance given omega is that of the mean omega),
  so that predicting takes only products.
- The kernel measures squared distances in the client's own mean squared distance between two of its examples, so that
  its first scales suit networks with features of any size. s begins at 16 (the authors: 8). `learn_kernel` learns s and
  l with the network (the authors' program: the network alone).
- Clients are averaged by number of examples.
- Of a client with more than `examples` examples, each step takes others, and a view is given so many, of every class
  its share. Time grows with the cube of `examples`, and a view with its square.
- All classes that a client has no examples of share a probability of 1 / (n_i + 1), by the rule of succession.
- With class weights, omega is the weight times PG(1, f) in place of PG(weight, f): the mean is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.func import grad_and_value

from coterie.core import tree
from coterie.core.batches import MIN_TOTAL_WEIGHT, Batch, Batches
from coterie.core.method import Info, Method, Population, body_cautions
from coterie.core.optimizers import SGD, Optimizer
from coterie.core.scan import scan
from coterie.core.task import Task
from coterie.core.tree import Params
from coterie.parts import averaging, class_moments, class_tree
from coterie.parts import gaussian_process as gp

KERNEL = "kernel of the Gaussian processes"  # the name of its two numbers beside the network's names


class Shared(NamedTuple):
    body: Params  # phi: the model without its head
    kernel: Tensor  # [2]; log s and log l


class Up(NamedTuple):
    body: Params
    kernel: Tensor
    count: Tensor  # type: ignore[assignment]  # []; n_i


class View(NamedTuple):
    theta: Params  # the network, with a head that is not used
    kernel: gp.Kernel
    tree: Tensor  # [classes]; the leaves
    z: Tensor  # [examples, dim]; features of the client's own examples
    leaf: Tensor  # [examples]; the leaves of their classes
    found: gp.Posterior
    count: Tensor  # type: ignore[assignment]  # []; how many of them there are


@dataclass(frozen=True)
class PFedGP(Method[Shared, Params, Shared, Up]):
    learns_from: ClassVar[str] = "all clients, through the features that they share; its classifier is its own"
    view_holds: ClassVar[str] = "features of examples that it was trained on, and their classes"
    law_contexts: ClassVar[tuple[dict[str, Any], ...]] = ({"examples": 8},)
    not_meant_to_learn: ClassVar[dict[str, str]] = {
        "examples": "from eight of its examples at a time, a client learns too little in the law's few steps"
    }

    optimizer: Optimizer = SGD()
    inner_steps: Annotated[int, Field(ge=1, description="steps on all examples for each local epoch")] = 1
    examples: Annotated[int, Field(ge=2, description="the most of a client's examples that are used at once")] = 128
    gibbs_steps: Annotated[int, Field(ge=1, description="steps of the chain before omega is used")] = 5
    draws: Annotated[int, Field(ge=1, description="draws of omega for a prediction")] = 5
    output_scale: Annotated[float, Field(gt=0, description="s, variance of the processes, at first")] = 16.0
    length_scale: Annotated[float, Field(gt=0, description="l, in the usual distance of two examples, at first")] = 1.0
    learn_kernel: Annotated[bool, Field(description="learn s and l as well as the network")] = True

    @property
    def personalize_epochs(self) -> int:
        return 1

    @property
    def averaged(self) -> tuple[str, ...]:
        return "body", "kernel"

    @property
    def stepped(self) -> tuple[str, ...]:
        return "body", "kernel"

    def init_server(self, params: Params, population: Population) -> Shared:
        class_moments.dimensions(population.task)  # complains in words if there are no classes or features
        return Shared(averaging.init_body(self, params, population), self._log_scales())

    def init_client(self, params: Params) -> Params:
        return params  # only its head is read, and what is never sent

    def dispatch(self, server: Shared, ids: Tensor, rng: torch.Generator) -> Shared:
        return tree.broadcast(server, len(ids))

    def local_update(self, task: Task, client: Params, down: Shared, batches: Batches) -> tuple[Params, Up, Info]:
        theta = {**client, **down.body}
        whole = batches.whole(self.examples)
        first = whole.batch()
        tree_i = _class_tree(task, task.features(theta, first.x).flatten(1), first)
        trained = frozenset(down.body) & task.trainable
        zero = batches.mask.new_zeros(())
        start = (theta, down.kernel, self.optimizer.init(self._free(theta, down.kernel, trained)), zero, zero)
        step = partial(self._step, task, trained, batches.filled(self.examples))
        # Most of a step is work of Cholesky factors, which no compiler makes faster.
        end = scan(step, start, tree_i, whole.repeated_with_new_keys(self.inner_steps), compiles=False)
        theta, kernel, _, total, seen = end
        up = Up(task.sent({name: theta[name] for name in down.body}), kernel, batches.count)
        return theta, up, {"loss": total / seen.clamp_min(MIN_TOTAL_WEIGHT)}

    def aggregate(self, server: Shared, ids: Tensor, ups: Up) -> Shared:
        body, kernel = tree.mean((ups.body, ups.kernel), ups.count)
        return Shared({**server.body, **body}, kernel)

    def personalize(self, task: Task, client: Params, down: Shared, batches: Batches) -> View:
        theta = {**client, **down.body}
        batch = batches.whole(self.examples).batch() if len(batches.index) else _no_examples(batches, self.examples)
        z = task.features(theta, batch.x).flatten(1)
        tree_i = _class_tree(task, z, batch)
        leaf = torch.where(batch.mask > 0, tree_i[batch.y], class_tree.ABSENT)
        kernel, filled = gp.Kernel(down.kernel, gp.unit_of(z, batch.mask)), batches.filled(self.examples)
        nodes = gp.nodes_of(tree_i, leaf[:filled], batch.mask[:filled])
        wide = tree.widest_float(z[:filled])
        gram = gp.kernel(wide, wide, kernel)
        chain = gp.gibbs(gram, nodes, batch.key, self.gibbs_steps + self.draws - 1)
        found = gp.posterior(gram, nodes, chain[-self.draws :]).padded(self.examples)
        kernel, found = tree.map(lambda leaf: leaf.to(z), (kernel, found))
        return View(theta, kernel, tree_i, z, leaf, found, (batch.mask > 0).sum().to(z))

    def predict(self, task: Task, view: View, x: Tensor) -> Tensor:
        across = gp.kernel(task.features(view.theta, x).flatten(1), view.z, view.kernel).T
        logs = gp.log_classes(across, view.kernel.log[0].exp(), view.found, view.tree, view.leaf)
        absent = view.tree == class_tree.ABSENT
        missing = absent.sum()
        seen = torch.where(missing > 0, view.count / (view.count + 1), 1.0).log()
        return torch.where(absent, -(missing.clamp_min(1) * (view.count + 1)).log(), logs + seen)

    def cautions(self, task: Task, population: Population) -> list[str]:
        return body_cautions(task)

    def _log_scales(self) -> Tensor:
        return torch.tensor([self.output_scale, self.length_scale]).log()

    def _free(self, theta: Params, kernel: Tensor, trained: frozenset[str]) -> Params:
        """Return what the optimiser trains."""
        free = {name: value for name, value in theta.items() if name in trained}
        return {**free, KERNEL: kernel} if self.learn_kernel else free

    def _step(self, task: Task, trained: frozenset[str], filled: int, carry: Any, tree_i: Tensor, batch: Batch) -> Any:
        """Take one step on all examples, of which only the first `filled` may be real: a step of a scan."""
        theta, kernel, state, total, seen = carry
        leaf, mask = tree_i[batch.y[:filled]], batch.mask[:filled]
        count = mask.sum()

        def objective(free: Params) -> tuple[Tensor, tuple[Tensor, Params]]:
            own = {name: free.get(name, value) for name, value in theta.items()}
            _, z, left = task.outputs_and_features(own, batch)
            wide = tree.widest_float(z[:filled].flatten(1))
            gram = gp.kernel(wide, wide, gp.Kernel(free.get(KERNEL, kernel), gp.unit_of(wide, mask)))
            fixed, nodes = gram.detach(), gp.nodes_of(tree_i, leaf, mask)
            found = gp.posterior(fixed, nodes, gp.gibbs(fixed, nodes, batch.key, self.gibbs_steps)[-1:])
            # Its gradient is that of -log p(y | omega) / n, which is known in closed form.
            downhill = -(gp.evidence_slope(found, nodes) * gram).sum() / count.clamp_min(MIN_TOTAL_WEIGHT)
            return downhill.to(count), (gp.training_loss(fixed, nodes, found).to(count), left)

        free = self._free(theta, kernel, trained)
        grads, (_, (loss, left)) = grad_and_value(objective, has_aux=True)(free)
        free, state = self.optimizer.update(grads, state, free)
        theta = {name: free.get(name, left.get(name, value)) for name, value in theta.items()}
        return theta, free.get(KERNEL, kernel), state, total + loss, seen + count


def _class_tree(task: Task, z: Tensor, batch: Batch) -> Tensor:
    """Return the tree of a client's classes by the mean of their features `z` [examples, dim]; [classes]."""
    classes, _ = class_moments.dimensions(task)
    own = (batch.y[:, None] == torch.arange(classes, device=batch.y.device)) & (batch.mask[:, None] > 0)
    size = own.sum(0)
    return class_tree.balanced_tree((own.to(z).T @ z) / size.clamp_min(1)[:, None], size > 0)


def _no_examples(batches: Batches, number: int) -> Batch:
    """Return so many examples of anybody, all masked."""
    nobody = batches.index.new_zeros(number)
    return Batch(batches.x[nobody], batches.y[nobody], batches.mask.new_zeros(number), batches.key.new_zeros(()))
