"""A client's personalised model, back from a run folder. Neither the data nor the checkpoints are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from coterie import tree
from coterie.batches import Batches
from coterie.decode import Decode
from coterie.errors import CheckpointError, ConfigError, CoterieError
from coterie.experiment import files
from coterie.experiment.folder import FORMAT, safe_name
from coterie.experiment.result import as_module
from coterie.experiment.setup import Model
from coterie.hyper import AnyMethod, build, find_method, suggest
from coterie.method import Population
from coterie.models import find_model
from coterie.task import Task
from coterie.tree import Params, Tree


def load(run: str | Path, client: str, *, model: Model | None = None) -> nn.Module:
    """The model that `client` would deploy after `run`, in evaluation mode.

    It is the run's own network where the method deploys one, and otherwise a module that predicts as the method says.
    A run whose model was given in Python needs the same `model` again.
    """
    folder = _client_folder(Path(run), client)
    about = files.read_json(folder / "model.json")
    if not isinstance(about, dict) or about.get("format", 0) > FORMAT:
        raise CheckpointError(f"'{folder}' was written by a newer version of Coterie: update Coterie to read it")
    flat = files.read_tensors(folder / "model.safetensors")
    decode = Decode.from_json(about.get("decode"))
    task = Task(_module(about, model, run, client), about["kind"], num_classes=about["num_classes"], decode=decode)
    method = _method(about)
    try:
        return as_module(task, method, tree.unpack(flat, _like(task, method, about, flat)))
    except ValueError as error:
        raise CheckpointError(f"'{folder / 'model.safetensors'}' does not fit the model: {error}") from error


def _client_folder(run: Path, client: str) -> Path:
    if not (run / "config.toml").exists():
        raise CheckpointError(f"'{run}' is not a run folder: it has no config.toml")
    folder = run / "clients" / safe_name(client)
    if (folder / "model.json").exists():
        return folder
    names = [files.read_json(path).get("client", path.parent.name) for path in (run / "clients").glob("*/model.json")]
    if not names:
        raise CheckpointError(f"'{run}' has no models yet: 'coterie resume {run}' completes it")
    raise CoterieError(f"there is no client '{client}'{suggest(client, names)}; there are {', '.join(sorted(names))}")


def _module(about: dict[str, Any], model: Model | None, run: Any, client: str) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    if model is None and about["model"] == "own-model":
        raise ConfigError([f"this run's model came from Python: coterie.load('{run}', '{client}', model=...)"])
    name = about["model"] if model is None else model
    factory = find_model(name) if isinstance(name, str) else name
    shape = tuple(about["input_shape"])
    with torch.random.fork_rng(devices=[]):  # the initial values are replaced: they cost the caller no random numbers
        module = factory(shape, about["outputs"])
    if not isinstance(module, nn.Module):
        raise ConfigError([f"model '{name}' gave a {type(module).__name__}, not an nn.Module"])
    return module


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
    """A view of the structure and shapes that `flat` should have: one model or, in general, what the method makes of
    the initial one without training."""
    params: Params = task.init()
    if flat.keys() == params.keys():
        return params
    size, audience = about["population"]
    server = method.init_server(params, Population(size, audience, task))
    down = method.deploy(server, torch.tensor([0]), torch.Generator())
    x, y = torch.zeros(1, *about["input_shape"]), torch.zeros(1, dtype=torch.long)
    steps = torch.zeros(method.personalize_epochs, 1, 1, dtype=torch.long)
    batches = Batches(x, y, steps, steps.float(), steps[..., 0], torch.tensor(1.0))  # all masked: no step is taken
    return method.personalize(task, method.init_client(params), tree.rows(down, 0), batches)
