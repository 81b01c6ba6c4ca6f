"""Load a client's personalised model from a run folder, without reading data or checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from coterie.core import tree
from coterie.core.batches import Batches
from coterie.core.decode import Decode
from coterie.core.errors import CheckpointError, ConfigError, CoterieError
from coterie.core.extensions import suggest
from coterie.core.method import Population
from coterie.core.targets import Target, from_json, known
from coterie.core.task import Task
from coterie.core.tree import Params, Tree
from coterie.evaluation.adoption import FEDERATED
from coterie.experiment.building import Model, completed
from coterie.experiment.result import as_module
from coterie.experiment.take_home.adopt import LOCAL_FILE
from coterie.experiment.take_home.kept import kept_module
from coterie.methods.fields import AnyMethod, build, find_method
from coterie.models import find_model
from coterie.storage import files
from coterie.storage.run_folder import FORMAT, read_rows, safe_name


def load(run: str | Path, client: str | int, *, model: Model | None = None) -> nn.Module:
    """Load the model that a client takes home after a run.

    Args:
        run: the run folder.
        client: a client's name, or its number, counting from 1 in the order of the tables.
        model: the same model again, if the run's was given in Python.

    Returns:
        A module in evaluation mode whose outputs are those that evaluation measured: logits or, in a regression,
        values. It is the run's own network if the method deploys one, and otherwise predicts as the method does. If
        the clients chose what they take home, it is what this one chose.

    Raises:
        CheckpointError: the folder is not a run, has no models yet, or does not fit the model.
        CoterieError: there is no such client.
        ConfigError: the model came from Python and is not given.

    Examples:
        `coterie.run("fedavg", "hospitals", model="linear", rounds=2, out="first")` has written the folder `first`:

        >>> import coterie, torch
        >>> model = coterie.load("first", "north")  # or its number, 1
        >>> model(torch.zeros(3, 20)).softmax(1).shape
        torch.Size([3, 2])
    """
    folder, about = find_client(run, client)
    flat = files.read_tensors(folder / "model.safetensors")
    task = Task(
        build_module(about, model, run),
        target_of(about),
        head=about.get("head"),
        decode=Decode.from_json(about.get("decode")),
    )
    method = _method(about)
    try:
        module = as_module(task, method, tree.unpack(flat, _like(task, method, about, flat)))
    except ValueError as error:
        raise CheckpointError(f"'{folder / 'model.safetensors'}' does not fit the model: {error}") from error
    taken = about.get("take_home")
    if taken is None:
        return module
    local = _local(folder, task) if needs_local(about) else None
    return kept_module(task.target, module, local, taken["kept"], taken["temperature"])


def find_client(run: str | Path, client: str | int) -> tuple[Path, dict[str, Any]]:
    """Find a client by name, or by number from 1.

    Returns:
        The client's folder, and the content of its model.json.

    Raises:
        CheckpointError: the folder is not a run, has no models yet, or was written by a newer version.
        CoterieError: there is no such client.
    """
    run = Path(run)
    names = client_names(run)
    if not names:
        raise CheckpointError(f"'{run}' has no models yet: 'coterie resume {run}' completes it")
    number = client if isinstance(client, int) else int(client) if client.isdecimal() else 0
    if client not in names and not 1 <= number <= len(names):
        close = suggest(str(client), names)
        numbered = f" (or a number from 1 to {len(names)})"
        raise CoterieError(f"there is no client '{client}'{close}; there are {', '.join(names)}{numbered}")
    name = str(client) if client in names else names[number - 1]
    folder = run / "clients" / safe_name(name)
    about = files.read_json(folder / "model.json")
    if not isinstance(about, dict) or about.get("format", 0) > FORMAT:
        raise CheckpointError(f"'{folder}' was written by a newer version of Coterie: update Coterie to read it")
    return folder, about


def client_names(run: Path) -> list[str]:
    """Return the clients that have a model, in the order of the tables: who took part, then who was onboarded."""
    if not (run / "config.toml").exists():
        raise CheckpointError(f"'{run}' is not a run folder: it has no config.toml")
    listed = [row["client"] for file in ("clients.csv", "onboarded.csv") for row in read_rows(run / file)]
    return [name for name in dict.fromkeys(listed) if (run / "clients" / safe_name(name) / "model.json").exists()]


def build_module(about: dict[str, Any], model: Model | None, run: Any, pretrained: str | None = None) -> nn.Module:
    """Build a client's network, with initial values of its own or `pretrained` ones, and its adapter.

    Raises:
        ConfigError: that needs `model`.
    """
    if isinstance(model, nn.Module):
        return completed(model, pretrained, about.get("adapter"), about.get("head"))
    if model is None and about["model"] == "own-model":
        raise ConfigError([f"this run's model came from Python: coterie.load('{run}', '{about['client']}', model=...)"])
    name = about["model"] if model is None else model
    factory = find_model(name) if isinstance(name, str) else name
    shape = tuple(about["input_shape"])
    with torch.random.fork_rng(
        devices=[]
    ):  # initial values are replaced, so they must not use up the caller's random numbers
        module = factory(shape, about["outputs"])
    if not isinstance(module, nn.Module):
        raise ConfigError([f"model '{name}' gave a {type(module).__name__}, not an nn.Module"])
    return completed(module, pretrained, about.get("adapter"), about.get("head"))


def blank_inputs(about: dict[str, Any], rows: int) -> torch.Tensor:
    """Return inputs of zeros, of the shape and type that a client's model takes."""
    return torch.zeros(rows, *about["input_shape"], dtype=getattr(torch, about.get("input_dtype", "float32")))


def target_of(about: dict[str, Any]) -> Target:
    """Return what a client's model predicts; folders of older versions say only whether it is a class or a number."""
    return from_json(about["target"]) if about.get("target") else known(about["num_classes"])


def needs_local(about: dict[str, Any]) -> bool:
    """Return whether a client takes home its model trained alone, or an average with it, beside a federated one."""
    taken = about.get("take_home") or {}
    return bool(about["method"] != "local" and taken.get("kept", FEDERATED) != FEDERATED)


def _local(folder: Path, task: Task) -> nn.Module:
    params, like = files.read_tensors(folder / LOCAL_FILE), task.init()
    try:
        return task.module(tree.unpack(params, like))
    except ValueError as error:
        raise CheckpointError(f"'{folder / LOCAL_FILE}' does not fit the model: {error}") from error


def _method(about: dict[str, Any]) -> AnyMethod:
    cls, problems = find_method(about["method"])
    if cls is None:
        raise ConfigError(problems)
    method: AnyMethod | None
    method, problems = build(cls, about["hyper"], f"method {about['method']}")
    if method is None:
        raise ConfigError(problems)
    return method


def _like(task: Task, method: AnyMethod, about: dict[str, Any], flat: Params) -> Tree:
    """Return a view with the structure and shapes that `flat` should have.

    It is one model or, in general, what the method makes of the initial model without training.
    """
    params: Params = task.init()
    if flat.keys() == params.keys():
        return params
    size, audience = about["population"]
    server = method.init_server(params, Population(size, audience, task))
    down = method.deploy(server, torch.tensor([0]), torch.Generator())
    x, y = blank_inputs(about, 1), task.target.blank(1)
    steps = torch.zeros(method.personalize_epochs, 1, 1, dtype=torch.long)
    batches = Batches(x, y, steps, steps.float(), steps[..., 0], torch.tensor(1.0))  # all masked: no step is taken
    return method.personalize(task, method.init_client(params), tree.rows(down, 0), batches)
