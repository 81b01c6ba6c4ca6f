"""What a setting names together with its options, and how it is written down: `cosine:least=0.1`, there and back.

A setting that stands for a thing (a schedule, a sampler, an optimiser of the server) may be

- text: a name that `coterie.core.extensions` finds, with options after it: `NAME:key=value:...`;
- a table of a file: `{name = "cosine", least = 0.1}`;
- from Python, the thing itself, its class or, where one will do, a function.

The options of a thing are the fields of its class, a frozen dataclass, with their types, limits and descriptions. A
field that holds another thing of the same kind takes all words that follow it: `warmup:rounds=3:then=cosine:least=0.1`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from torch.func import vmap

from coterie.core import tree
from coterie.core.errors import ConfigError
from coterie.core.extensions import with_options
from coterie.core.optimizers import OPTIMIZERS, Optimizer
from coterie.core.tree import Params
from coterie.core.user_code import in_user_code
from coterie.core.wrapped import plain
from coterie.methods.fields import AnyMethod, Hyper, build, hyper_parameters, values_of

OWN = "own-"  # how a file calls what came from Python and has no name
TRIED = 2  # steps that an optimiser of the user's own is tried on


@dataclass(frozen=True)
class Kind:
    """A kind of things that settings name.

    Attributes:
        name: what messages call it; one of `coterie.core.extensions.GROUPS`.
        known: the library's own, by name.
        base: what a class of this kind extends.
        signature: how a function of this kind is called, in words; empty if it cannot be a function.
    """

    name: str
    known: Mapping[str, Any] = dataclasses.field(hash=False)
    base: type
    signature: str = ""

    def read(self, value: Any) -> Any:
        """Return the thing that a setting stands for.

        Raises:
            ConfigError: it stands for none, or its options are wrong; it lists every problem.
        """
        if isinstance(value, str):
            return self._from_text(value, {})
        if isinstance(value, Mapping):
            options = dict(value)
            if not isinstance(options.get("name"), str):
                raise ConfigError([f"a table needs the name of a {self.name}, as text"])
            return self._from_text(options.pop("name"), options)
        return self.make(value, {})

    def make(self, value: Any, options: Mapping[str, Any]) -> Any:
        """Return the thing that an object from Python stands for, with options if it is a class.

        Raises:
            ConfigError: it stands for none, or its options are wrong; it lists every problem.
        """
        return self._made(value, options, getattr(value, "__name__", type(value).__name__))

    def write(self, thing: Any) -> str:
        """Return the text that `read` makes the thing of; "own-..." if there is none."""
        name = self.name_of(thing if isinstance(thing, type) or not isinstance(thing, self.base) else type(thing))
        if name.startswith(OWN) or not isinstance(thing, self.base):
            return name
        words, last = [name], []
        for field in dataclasses.fields(thing):  # type: ignore[arg-type]
            value = getattr(thing, field.name)
            if field.name in self._nested(type(thing)):
                inner = self.write(value)
                if inner.startswith(OWN):
                    return OWN + self.name.replace(" ", "-")
                last = [f"{field.name}={inner}"]
            else:
                words.append(f"{field.name}={str(value).lower() if isinstance(value, bool) else value}")
        return ":".join([*words, *last])

    def name_of(self, named: Any) -> str:
        """Return the name, or import path, of a class or function of this kind; "own-..." if it has none."""
        for name, cls in self.known.items():
            if named is cls:
                return name
        module, path = getattr(named, "__module__", None), getattr(named, "__qualname__", "")
        found = getattr(sys.modules.get(module or ""), path, None)
        reachable = found is named and module != "__main__"
        return f"{module}:{path}" if reachable else OWN + self.name.replace(" ", "-")

    def _from_text(self, text: str, options: Mapping[str, Any]) -> Any:
        if text.startswith(OWN):
            raise ConfigError([f"'{text}' came from Python: give it again, as {self.name.replace(' ', '_')}=..."])
        found, words = with_options(self.name, text, self.known)
        return self._made(found, {**self._options(found, words), **options}, text)

    def _options(self, found: Any, words: list[str]) -> dict[str, Any]:
        """Return the options in the words after a name."""
        options: dict[str, Any] = {}
        for at, word in enumerate(words):
            key, equals, value = word.partition("=")
            key = key.replace("-", "_")
            if not equals:
                raise ConfigError([f"'{word}' is no option: write NAME:option=value"])
            if isinstance(found, type) and key in self._nested(found):
                return {**options, key: ":".join([value, *words[at + 1 :]])}
            options[key] = value
        return options

    def _made(self, found: Any, options: Mapping[str, Any], called: str) -> Any:
        """Make a thing of what a name stands for, or check the thing that it is already."""
        if isinstance(found, type) and issubclass(found, self.base):
            return self._instance(found, dict(options), called)
        if isinstance(found, self.base) or (self.signature and callable(found) and not isinstance(found, type)):
            if options:
                raise ConfigError([f"'{called}' takes no options: only a class has some, its fields"])
            return found
        wanted = f"a dataclass that extends {self.base.__module__}.{self.base.__name__}"
        function = f", or a function {self.signature}" if self.signature else ""
        raise ConfigError([f"'{called}' is no {self.name}: that is {wanted}{function}"])

    def _instance(self, cls: type, options: dict[str, Any], called: str) -> Any:
        if not dataclasses.is_dataclass(cls):
            raise ConfigError([f"'{called}' is not a dataclass: write @dataclass(frozen=True) above its class"])
        problems: list[str] = []
        fixed: dict[str, Any] = {}
        for key in self._nested(cls) & options.keys():
            try:
                fixed[key] = self.read(options.pop(key))
            except ConfigError as error:
                problems += error.problems
        owner = f"{self.name} {self.name_of(cls) if not self.name_of(cls).startswith(OWN) else cls.__name__}"
        try:
            made, more = build(cls, options, owner, **fixed)
        except (TypeError, ValueError) as error:  # of its `__post_init__`, or of a field without a default
            made, more = None, [f"{owner}: {error}"]
        if problems + more:
            raise ConfigError(problems + more)
        return made

    def _nested(self, cls: type) -> set[str]:
        """Return the fields that hold another thing of this kind."""
        hints = get_type_hints(cls, include_extras=True)
        bare = {name: get_args(hint)[0] if get_origin(hint) is Annotated else hint for name, hint in hints.items()}
        return {name for name, hint in bare.items() if hint is self.base}


OPTIMIZER = Kind("optimizer", OPTIMIZERS, Optimizer)


def build_optimizer(values: Mapping[str, Any]) -> tuple[Optimizer | None, list[str]]:
    """Build the optimiser called `values["name"]` (SGD by default) from the other values.

    Returns:
        The optimiser, or None if there are problems; and all problems, in sentences.
    """
    name = values.get("name", "sgd")
    rest = {key: value for key, value in values.items() if key != "name"}
    try:
        if isinstance(name, str):
            made = OPTIMIZER.read({"name": name, **rest})
        elif isinstance(name, type):
            made = OPTIMIZER.make(name, rest)
        else:
            made = OPTIMIZER.read(name)
            if rest:
                return None, [f"{', '.join(rest)}: the optimizer is given as an object, so set this there"]
    except ConfigError as error:
        return None, error.problems
    problems = [] if type(made) in OPTIMIZERS.values() else problems_of_steps(made)
    return (None if problems else made), problems


def optimizer_fields(optimizer: Any = None) -> list[Hyper]:
    """Return the fields of the library's optimisers, once each, and those of `optimizer`, as a setting has it."""
    classes: list[Any] = list(OPTIMIZERS.values())
    text = optimizer.get("name") if isinstance(optimizer, Mapping) else optimizer
    if isinstance(text, str) and text.partition(":")[0] not in OPTIMIZERS:
        try:
            text = with_options("optimizer", text, OPTIMIZERS)[0]
        except ConfigError:  # `build_optimizer` reports that, with everything else that is wrong
            text = None
    if isinstance(text, type) and dataclasses.is_dataclass(text) and issubclass(text, Optimizer):
        classes.insert(0, text)
    found: dict[str, Hyper] = {}
    for cls in classes:
        found = {each.name: each for each in hyper_parameters(cls)} | found
    return list(found.values())


def optimizer_values(optimizer: Optimizer) -> dict[str, Any]:
    """Return the name and the settings of an optimiser, from which `build_optimizer` makes it again."""
    return {"name": OPTIMIZER.name_of(type(optimizer)), **values_of(optimizer)}


def problems_of_steps(optimizer: Optimizer) -> list[str]:
    """Try the steps of a user's own optimiser; return what would not work in a round, in sentences.

    They must be pure, keep names and shapes, and work for stacked clients and with a step size that is a tensor, as a
    schedule has it.
    """
    called = f"optimizer {type(optimizer).__name__}"
    params = {"weight": torch.tensor([[0.5, -1.0], [2.0, 0.25]]), "bias": torch.tensor([0.1, -0.2])}
    grads = {"weight": torch.tensor([[0.3, 0.2], [-0.1, 0.4]]), "bias": torch.tensor([-0.5, 0.6])}
    before = tree.clone((params, grads))

    def steps(optimizer: Optimizer, params: Params, grads: Params) -> Params:
        state = optimizer.init(params)
        for _ in range(TRIED):
            params, new = optimizer.update(grads, state, params)
            tree.map(_same_shape, state, new)
            state = new
        return tree.map(lambda _, leaf: leaf, grads, params)  # complains of other names

    def with_rate(lr: Tensor, params: Params, grads: Params) -> Params:
        return steps(dataclasses.replace(optimizer, lr=lr), params, grads)  # type: ignore[type-var]

    try:
        expected = steps(optimizer, params, grads)
        if not all(map(torch.equal, tree.leaves(before), tree.leaves((params, grads)))):
            return [f"{called}: its update changes what it is given: let it return new tensors"]
        two = tree.map(lambda leaf: torch.stack([leaf, leaf]), (params, grads))
        found = vmap(with_rate)(torch.full((2,), optimizer.lr), *two)
    except Exception as error:
        why = f"{type(error).__name__}: {error}{in_user_code(error)}"
        return [f"{called}: its steps cannot be taken for several clients at once, with a tensor as lr: {why}"]
    if not all(
        torch.allclose(one, both[0], 1e-4, 1e-6) for one, both in zip(expected.values(), found.values(), strict=True)
    ):
        return [f"{called}: with a tensor as lr, its steps are others: let `update` read `self.lr` each time"]
    return []


def _same_shape(old: Tensor, new: Tensor) -> None:
    if old.shape != new.shape:
        raise ValueError(f"its state has the shape {tuple(new.shape)} after a step, and {tuple(old.shape)} before")


def optimizer_of(method: AnyMethod) -> dict[str, Any]:
    """Return the name and settings of a method's optimiser, or {} if it has none."""
    optimizer = getattr(method, "optimizer", None)
    return optimizer_values(plain(optimizer)) if isinstance(optimizer, Optimizer) else {}
