"""The budget of a run: how much noise, and what it costs every client."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from coterie.core.errors import ConfigError
from coterie.core.privacy import Guard, Private
from coterie.core.task import Task
from coterie.data.federation import Federation
from coterie.data.minibatches import OVERFLOW, Plan
from coterie.experiment.privacy import accountant, refusals
from coterie.experiment.privacy.accountant import Release
from coterie.experiment.privacy.releases import count_releases
from coterie.experiment.privacy.site_level import Shares, parts_of
from coterie.methods.fields import AnyMethod, with_optimizer

SUM_NOISE = 2.0  # all other sums of a run together cost as much as one with so many times the gradients' noise
LEVELS = {
    "record": "each example of a client, against whoever reads its messages",
    "site-local": "a client as a whole, against whoever reads its messages",
    "site-central": "a client as a whole, against whoever sees the server's models, but not against the server",
}
TOLERANCE = 1.001  # of epsilon, for noise that was found and written down


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What was asked for."""

    level: str
    delta: float = 1e-5
    epsilon: float | None = None
    noise: float | None = None
    clip: float = 1.0
    clip_features: float = 5.0
    clip_loss: float = 5.0


@dataclasses.dataclass(frozen=True)
class Budget:
    """What a run protects, and how well."""

    level: str
    delta: float
    noise: float  # standard deviation of the noise, relative to the clip
    clip: float
    epsilons: dict[str, float]  # of every client
    parts: dict[str, dict[str, float]]  # what is released: how often, clip, noise

    @property
    def epsilon(self) -> float:
        """The worst client's."""
        return max(self.epsilons.values(), default=0.0)

    @property
    def worst(self) -> str:
        """Whose it is."""
        return max(self.epsilons, key=self.epsilons.__getitem__)

    def sentence(self) -> str:
        """Say it in a line or two."""
        if self.noise == 0:
            return f"Differential privacy ({self.level}): none, since there is no noise."
        least = min(self.epsilons.values())
        apart = (
            "" if math.isclose(least, self.epsilon, rel_tol=1e-3) else f", of {self.worst}; the least is {least:.2f}"
        )
        return (
            f"Differential privacy ({self.level}): epsilon {self.epsilon:.2f} at delta {self.delta:g}{apart}. "
            f"Noise {self.noise:.3g} times the clip of {self.clip:g}. It protects {LEVELS[self.level]}."
        )

    def of(self, client: str) -> dict[str, Any]:
        """Return what a client's model card says; an infinite epsilon is null."""
        found = self.epsilons.get(client, self.epsilon)
        cost = f"epsilon {found:.2f} at delta {self.delta:g}" if math.isfinite(found) else "no finite epsilon"
        about = (
            f"What was sent to train this model is differentially private, with {cost}: it protects "
            f"{LEVELS[self.level]}. "
            "The model itself stays with the client, and may tell of the examples that it was trained on: keep it as "
            "confidential as these."
        )
        return {
            "epsilon": found if math.isfinite(found) else None,
            "delta": self.delta,
            "level": self.level,
            "words": about,
        }

    def to_json(self) -> dict[str, Any]:
        """Return all of it; an infinite epsilon is null."""
        finite = {name: value if math.isfinite(value) else None for name, value in self.epsilons.items()}
        return dataclasses.asdict(self) | {
            "epsilon": self.epsilon if math.isfinite(self.epsilon) else None,
            "worst": self.worst,
            "epsilons": finite,
            "protects": LEVELS[self.level],
            "adjacency": "one client replaced by nothing"
            if self.level != "record"
            else "one example replaced by nothing",
        }


def for_records(
    wanted: Wanted, method: AnyMethod, name: str, task: Task, federation: Federation, plan: Plan, rounds: Sequence[int]
) -> tuple[AnyMethod, Budget]:
    """Make a method's messages private example by example.

    Args:
        wanted: what was asked for.
        method: the method.
        name: its name.
        task: the model and its loss.
        federation: the clients, of which sizes matter.
        plan: the minibatches of a client's local update.
        rounds: in how many rounds each client takes part, at most.

    Returns:
        The method with a private optimiser, and what it costs.

    Raises:
        ConfigError: it cannot be private, or not at this epsilon.
    """
    if problems := refusals.of_examples(method, name):
        raise ConfigError(problems)
    guard = Guard(plan.batch_size, wanted.clip, 1.0, 1.0, wanted.clip_features, wanted.clip_loss)
    known: dict[tuple[int, int], tuple[dict[int, int], int]] = {}
    uses: dict[tuple[int, int], list[str]] = {}
    counted = with_guard(method, guard)
    for client, (who, size, times) in enumerate(zip(federation.names, federation.sizes, rounds, strict=True)):
        steps = plan.num_steps(size), min(size, plan.batch_size + 1)
        if steps not in known:
            known[steps] = count_releases(counted, task, federation, plan, client, len(federation.names))
        uses.setdefault((size, times), []).append(who)
        known[size, -1] = known[steps]
    most = max((known[size, -1][1] * times for size, times in uses), default=0)
    scale = SUM_NOISE * math.sqrt(max(most, 1))

    def releases(size: int, times: int, noise: float) -> list[Release]:
        gradients, sums = known[size, -1]
        rate = min(1.0, _up(plan.batch_size / size))
        found = [
            Release(rate, noise / math.sqrt(number), minibatches * times)
            for number, minibatches in gradients.items()
            if number
        ]
        return [*found, Release(1.0, scale * noise, sums * times)]

    def cost(of: tuple[int, int], noise: float) -> float:
        parts = releases(*of, noise)
        found = accountant.epsilon(parts, wanted.delta * (1 - accountant.OVERFLOW_SHARE))
        over = OVERFLOW * sum(each.times for each in parts) * (1 + math.exp(min(found, 700.0)))
        fits = plan.batch_size >= federation.largest or over <= accountant.OVERFLOW_SHARE * wanted.delta
        return found if fits else math.inf

    noise = wanted.noise
    if noise is None:
        assert wanted.epsilon is not None
        noise = 0.0
        for of in sorted(uses, key=lambda of: of[0] / max(of[1], 1)):  # small clients first: they are mostly the worst
            if noise == 0 or cost(of, noise) > wanted.epsilon:
                noise = accountant.find_noise(partial(cost, of), wanted.epsilon)
    spent = {of: cost(of, noise) for of in uses}
    epsilons = {name: spent[of] for of, names in uses.items() for name in names}
    parts = {"gradients": {"clip": wanted.clip, "noise": noise, "times": _most(known, uses, 0)}}
    if most:
        parts["other sums"] = {"noise": scale * noise, "times": most}
    budget = Budget("record", wanted.delta, noise, wanted.clip, {who: epsilons[who] for who in federation.names}, parts)
    check(wanted, budget)
    made = dataclasses.replace(guard, noise=noise, sum_noise=scale * noise)
    return with_guard(method, made), budget


def for_sites(
    wanted: Wanted, method: AnyMethod, name: str, up: Any, taking_part: dict[str, int], participants: int, rounds: int
) -> tuple[Shares, Budget]:
    """Work out how messages are clipped and noised, so that clients are protected as a whole.

    Args:
        wanted: what was asked for.
        method: the method.
        name: its name.
        up: a message of a client.
        taking_part: the clients, and in how many rounds each of them takes part.
        participants: how many take part in a round.
        rounds: the number of rounds.

    Returns:
        The clips and the noise of the parts of a message, and what it costs.

    Raises:
        ConfigError: it cannot be private, or not at this epsilon.
    """
    if problems := refusals.of_sites(method, name, wanted.level, up):
        raise ConfigError(problems)
    sampled = wanted.level == "site-central" and participants < len(taking_part)

    def cost(times: int, noise: float) -> float:
        alone = accountant.epsilon([Release(1.0, noise, times)], wanted.delta)
        if not sampled or noise == 0:
            return alone
        return min(alone, accountant.sampled_epsilon(len(taking_part), participants, noise, rounds, wanted.delta))

    most = max(taking_part.values())
    noise = wanted.noise
    if noise is None:
        assert wanted.epsilon is not None
        noise = accountant.find_noise(lambda value: cost(most, value), wanted.epsilon)
    spent = {times: cost(times, noise) for times in {*taking_part.values()}}
    parts = parts_of(method, up, wanted.clip, wanted.clip_features, wanted.clip_loss)
    shares = Shares(wanted.level, parts, noise * math.sqrt(len(parts)))
    told = {part.name or "model": {"clip": part.clip, "noise": shares.noise, "times": most} for part in parts}
    epsilons = {who: spent[times] for who, times in taking_part.items()}
    budget = Budget(wanted.level, wanted.delta, noise, wanted.clip, epsilons, told)
    check(wanted, budget)
    return shares, budget


def with_guard(method: AnyMethod, guard: Guard) -> AnyMethod:
    """Return the method with a private optimiser; as it is if it has none."""
    optimizer = getattr(method, "optimizer", None)
    if optimizer is None:
        return method
    return with_optimizer(method, Private(optimizer.unguarded, guard))


def check(wanted: Wanted, budget: Budget) -> None:
    """Raise `ConfigError` if more is spent than was asked for."""
    if wanted.epsilon is not None and not budget.epsilon <= wanted.epsilon * TOLERANCE:
        raise ConfigError(
            [
                f"noise = {budget.noise:g} gives epsilon {budget.epsilon:.3g} ({budget.worst}), and epsilon = "
                f"{wanted.epsilon:g} was asked for: leave out noise, which is then found"
            ]
        )


def _up(rate: float) -> float:
    """Return a chance rounded up to three digits, so that clients of nearly the same size cost the same."""
    if rate >= 1:
        return 1.0
    unit = 10.0 ** (math.floor(math.log10(rate)) - 2)
    return min(1.0, math.ceil(rate / unit) * unit)


def _most(known: Any, uses: Any, which: int) -> int:
    return max((sum(n * k for n, k in known[size, -1][0].items()) * times for size, times in uses), default=0)
