"""pFedBayes (Zhang et al., "Personalized Federated Learning via Variational Bayesian Inference", ICML 2022).

Every weight is a Gaussian. Client i has a posterior q_i = N(mu_i, sigma_i^2) of its own, and the server's w = N(mu,
sigma^2) is its prior. sigma = log(1 + e^rho). In a round the client copies w to w_i, and each minibatch takes

    q_i <- a step on  E_q[f_i(theta)] + (zeta / n_i) KL(q_i || w_i)      (`_iteration`; the personal model)
    w_i <- a step on  KL(q_i || w_i) / n_i, with step size `prior_lr`    (`_iteration`; the localised global model)
    w   <- (1 - beta) w + beta sum_i (n_i / n) w_i                       (`aggregate`)

The expectation is one draw theta = mu_i + sigma_i * noise a minibatch, through which the gradient goes. The noise is a
hash of the minibatch's key, so that it is the same in every engine. A client deploys mu_i or, with `draws` > 0, the
mean of that many models' probabilities, drawn once for all examples (P); mu is the global model (G).

Without noise and with variances that stay (`noise` = false, `learn_variance` = false), KL is ||mu_i - mu||^2 / (2
sigma^2), so that q_i takes proximal steps (tested).

Details: f_i is a mean over examples, so that KL is divided by n_i. Buffers follow q_i's forward passes and are averaged.
A client's q_i starts at the w that it receives when it first takes part. Only mu_i counts where models are compared.
Clients are averaged by n_i; the paper, uniformly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from torch.func import grad, grad_and_value, vmap

from coterie.core import tree
from coterie.core.batches import MIN_TOTAL_WEIGHT, Batch, Batches
from coterie.core.dropout import uniform
from coterie.core.method import Info, Method, Population
from coterie.core.optimizers import SGD, Optimizer
from coterie.core.scan import scan
from coterie.core.task import Task
from coterie.core.tree import Params
from coterie.parts.mixtures import Mixture, predict_mixture

KEY_STEP = 0x51F15EED  # between the keys of two tensors' noise


class Gaussian(NamedTuple):
    mu: Params  # trained parameters
    rho: Params  # sigma = log(1 + e^rho)


class Server(NamedTuple):
    """The server's state, which is also what every client is sent."""

    w: Gaussian
    buffers: Params


class Up(NamedTuple):
    w: Gaussian
    buffers: Params
    count: Tensor  # type: ignore[assignment]  # []; n_i


class Client(NamedTuple):
    q: Gaussian
    buffers: Params
    rounds: Tensor  # []; rounds taken part in


@dataclass(frozen=True)
class PFedBayes(Method[Server, Client, Server, Up]):
    optimizer: Optimizer = SGD()
    zeta: Annotated[float, Field(ge=0, description="zeta, weight of the divergence from the prior")] = 10.0
    sigma: Annotated[float, Field(gt=0, description="standard deviation of every weight at first")] = 0.05
    prior_lr: Annotated[float, Field(ge=0, description="step size of the localised global model")] = 0.001
    beta: Annotated[float, Field(gt=0, le=1, description="share of the clients' mean in the server's new w")] = 1.0
    noise: Annotated[bool, Field(description="draw weights in training; otherwise use their means")] = True
    learn_variance: Annotated[bool, Field(description="learn the variances as well as the means")] = True
    draws: Annotated[int, Field(ge=0, description="models drawn for a prediction; 0 predicts with the means")] = 0
