"""Onboard a site that took no part in a finished run: give it a model, and measure whether it beats training alone.

The newcomer is one more client of its own copy of the finished server. Where the server has a row for each client, the
copy has one more (`grown`), with the values of a client that has not sent anything yet. In every round the newcomer is
sent what a client is sent and does a client's local update; `Method.onboard` decides what becomes of its message.
Nobody else trains, and the run itself does not change. The round is selected on the newcomer's validation data, and the
comparison is local training on its own data for as many steps, from the run's initial model.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie.core import rng
from coterie.core.decode import Decode
from coterie.core.errors import CheckpointError, ConfigError, DataError
from coterie.core.method import Info, Newcomer, Population
from coterie.core.task import Task
from coterie.core.tree import Params, Tree
from coterie.core.units import parse_bytes
from coterie.data import Federation, from_clients
from coterie.data.augment import find_augmentation
from coterie.data.tables.schema import schema_from_dict
from coterie.data.tables.silos import Silos, load_silos
from coterie.data.weights import balanced
from coterie.engine import Central
from coterie.engine.central import Draw, Send
from coterie.evaluation.metrics import add
from coterie.experiment import stopping
from coterie.experiment.building import Model, named_loss
from coterie.experiment.conclude import add_benefit
from coterie.experiment.config import OWN_AUGMENT, PARTITION_SETTINGS, Config
from coterie.experiment.execute import execute, local_like, write_models
from coterie.experiment.notebook import Heard, listener
from coterie.experiment.progress import Progress, Silent
from coterie.experiment.resolve import resolve
from coterie.experiment.result import Result
from coterie.experiment.run import read_config
from coterie.experiment.setup import Setup
from coterie.experiment.silos import OPTIONS
from coterie.experiment.stopping import Stop
from coterie.experiment.take_home.card import write_cards
from coterie.experiment.take_home.input_files import in_type, read_examples
from coterie.experiment.take_home.load import build_module, find_client, target_of
from coterie.methods.fields import AnyMethod
from coterie.storage import files, paged_rows
from coterie.storage.paged_rows import Paged, Store
from coterie.storage.run_folder import RunFolder, read_rows
from coterie.storage.state import State

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Finished:
    """Hold what a newcomer needs of a finished run: no data, and none of the clients' own states."""

    config: Config
    method: AnyMethod
    task: Task  # starts from the run's initial model
    metric: str
    names: tuple[str, ...]
    server: Tree  # at the selected round
    stopped: Stop | None = None  # when it stopped early, if it did; a newcomer has as many rounds


@dataclass(frozen=True)
class Guest:
    """Stand in for `Central` with the newcomer's own copy of the server."""

    task: Task
    newcomer: Newcomer
    row: int  # the newcomer's number in that copy

    @property
    def ids(self) -> Tensor:
        return torch.tensor([self.row])

    def start(self, method: AnyMethod, params: Params, population: Population) -> Tree:
        return self.newcomer.server

    def send(self, method: AnyMethod, send: Send, server: Tree, ids: Tensor, draw: Draw) -> Tree:
        return send(server, self.ids, draw())

    def aggregate(self, method: AnyMethod, server: Tree, ids: Tensor, ups: Tree) -> Tree:
        heard = method.onboard(self.task, self.newcomer._replace(server=server), self.ids, ups)
        return heard.server

    def info(self, method: AnyMethod, server: Tree) -> Info:
        return Central().info(method, server)

    def models(self, method: AnyMethod, server: Tree, size: int) -> Params | None:
        return Central().models(method, server, size)

    def traffic(self, method: AnyMethod, ids: Tensor, ups: Tree, down: Tree) -> tuple[int, int]:
        return Central().traffic(method, ids, ups, down)


def onboard(
    run: str | Path,
    data: str | Path | Pair,
    *,
    name: str | None = None,
    target: str | None = None,
    model: Model | None = None,
    progress: Heard = None,
) -> Result:
    """Let a new site join a finished run, and write its model, its card and a line in onboarded.csv to the run folder.

    Args:
        run: the run folder.
        data: a CSV or .npz file, or a pair (x, y) of tensors. The examples are split as those of the run's clients.
        name: the site's name; by default the file's name without its ending.
        target: the name of the target column in a CSV file.
        model: the same model again, if the run's was given in Python.
        progress: receives news of the newcomer's rounds.

    Returns:
        A result whose `model(0)` is the site's model and whose `clients[0]` has the metrics, with gain, low, high and
        verdict.

    Raises:
        ConfigError: the name is taken, the run has no server, or its model came from Python and is not given.
        DataError: the data cannot be read, or do not suit the run.
        CheckpointError: the run is not finished, or its selected checkpoint is missing.

    Examples:
        `first` is a run folder; a clinic that took no part has examples of its own:

        >>> import coterie, torch
        >>> x = torch.randn(60, 20)
        >>> result = coterie.onboard("first", (x, (x[:, 0] > 0).long()), name="clinic")
        >>> result.names
        ['clinic']
    """
    run = Path(run)
    finished, about = open_run(run, model)
    name = name or (Path(data).stem if isinstance(data, str | Path) else "newcomer")
    if name in finished.names:
        raise ConfigError([f"'{name}' took part in this run: give the newcomer another name with --name"])
    site = _site(run, name, data, target, about, finished.config)
    result = join(finished, balanced(site) if finished.config.class_weights else site, listener(progress))
    _write(run, finished, result, site)
    return result


def onboard_held_out(result: Result, setup: Setup, out: Path | None, tell: Progress) -> list[Result]:
    """Let every client that was held out join the run, one after another, each as if it were the only one."""
    held_out = setup.held_out
    if held_out is None:
        return []
    # A single client trains on the CPU, as it would if it joined later. Paged rows are there already.
    server = paged_rows.walk(result.server, lambda _, leaf: leaf if isinstance(leaf, Paged) else leaf.cpu())
    finished = Finished(
        setup.config, setup.method, setup.task, setup.metric, setup.federation.names, server, result.stopped
    )
    joined = []
    for name, split in held_out.clients.items():
        site = dataclasses.replace(held_out, clients={name: split})
        tell.say(f"onboarding {name}, which took no part")
        joined.append(join(finished, site, Silent()))
        if out:
            _write(out, finished, joined[-1], site)
    return joined


def join(finished: Finished, site: Federation, tell: Progress) -> Result:
    """Run the newcomer's rounds and, for comparison, as many of the same site alone."""
    method, task, row = finished.method, finished.task, len(finished.names)
    server = grown(method, task, finished.server, [*finished.names, *site.names])
    newcomer = method.onboard(task, Newcomer(server, task.init()), torch.tensor([row]), None)
    place = Guest(task, newcomer, row)
    alone_there = {"fraction": 1.0, "clients_per_round": None, "clients_heard": None, "holdout": 0.0}
    alone_there["sampler"] = None
    engine = {"engine": "loop", "compile": False, "workers": 1}
    # It sends nothing that others would read, and what it takes home is not chosen here.
    engine |= {"privacy": None, "epsilon": None, "noise": None, "take_home": "federated"}
    engine |= {"early_stop": None, "callbacks": None}
    config = finished.config.model_copy(update=alone_there | engine)
    begun, until = task.beginning(newcomer.params, newcomer.only), finished.stopped
    result = execute(Setup(config, method, site, begun, finished.metric, place), None, tell, resume=False, until=until)
    if finished.config.method != "local":
        alone = Setup(config, method, site, task, finished.metric).with_method(local_like(method))
        result.reference = execute(alone, None, Silent(), resume=False, until=until)
        add_benefit(result, None)
    return result


def grown(method: AnyMethod, task: Task, server: Tree, names: Sequence[str]) -> Tree:
    """Return the server with one more client, the last of `names`, that has not sent anything yet.

    Leaves that have a row for each client get one more, with the values that a server starts with.
    """
    size = len(names)
    known: dict[str, Any] = {}
    paged_rows.walk(server, known.__setitem__)
    store = next((leaf.store for leaf in known.values() if isinstance(leaf, Paged)), None)
    fresh = method.init_server(task.init(), Population(size, size, task, rng.keys_of(names), store))

    def fill(path: str, new: Any) -> Any:
        old = known[path]
        if isinstance(old, Paged):
            return old.resized(size)
        if new.shape == old.shape:
            return old
        filled = new.clone()
        filled[tuple(slice(length) for length in old.shape)] = old
        return filled

    return paged_rows.walk(fresh, fill)


def open_run(run: Path, model: Model | None = None) -> tuple[Finished, dict[str, Any]]:
    """Read what a newcomer needs from the run folder, without any client's data.

    Returns:
        The finished run, and the content of a client's model.json.

    Raises:
        ConfigError: the run has no server, or its model came from Python and is not given.
        CheckpointError: the run is not finished, or its selected checkpoint is missing.
    """
    _, about = find_client(run, 1)
    # The run's data are not needed, so it does not matter where its files were.
    unused = ("silos", *OPTIONS, *PARTITION_SETTINGS, "callbacks", "sections")
    values = {key: value for key, value in read_config(run).items() if key not in unused}
    config, method = resolve(values, own_data=True, own_model=True)
    if config.models:
        raise ConfigError(
            [f"'{run}' has clients with different models, so it is not known which a newcomer would have"]
        )
    if config.topology != "server":
        raise ConfigError([f"'{run}' has no server to join: its clients are peers (topology = {config.topology!r})"])
    names = tuple(row["client"] for row in read_rows(run / "clients.csv"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.seed_of(config.seed, "model") % 2**63)  # as in `prepare`: the run's initial model
        module = build_module(about, model, run, config.pretrained)
    decode = Decode.from_json(about.get("decode"))
    if config.augment == OWN_AUGMENT:
        raise ConfigError(
            [f"'{run}' was trained with an augmentation that came from Python: nobody can join by command"]
        )
    augment = config.augment and find_augmentation(config.augment)
    target = target_of(about)
    own: dict[str, Any] = {"head": config.head, "decode": decode, "augment": augment or None}
    own |= {"loss": named_loss(config, target), "metrics": add(config.metric or ())}
    task = Task(module, target, **own)
    params = task.init()
    store = Store(parse_bytes(config.memory) // 2)
    people = len(names), config.participants(len(names))
    population = Population(*people, task, rng.keys_of(names), store, seed=rng.server_seed(config.seed))
    like = State(method.init_server(params, population), population.rows(method.init_client(params)))
    summary = files.read_json(run / "summary.json")
    selected = summary["selected_round"]
    if selected not in RunFolder(run).checkpoints():
        raise CheckpointError(f"'{run}' has no checkpoint of round {selected}, the selected one: run it again")
    state, _ = RunFolder(run).load(selected, like)
    metric = str(summary["selected_by"]).split()[-1]
    return Finished(config, method, task, metric, names, state.server, stopping.read(run)), about


def _site(
    run: Path, name: str, data: str | Path | Pair, target: str | None, about: dict[str, Any], config: Config
) -> Federation:
    """Make a federation of the newcomer alone. If the run's sites prepared their tables, it prepares its own too."""
    record = find_client(run, 1)[0] / "preprocessing.json"
    if isinstance(data, str | Path):
        path = Path(data)
        if record.exists() and path.suffix.lower() != ".npz":
            return _silo(run, name, path, target, files.read_json(record)["schema"], config)
        x, y = read_examples(path, target, about)
    else:
        x, y = data
    x = in_type(x, about, name)
    if tuple(x.shape[1:]) != tuple(about["input_shape"]):
        raise DataError(f"'{name}': inputs of shape {tuple(x.shape[1:])}; this run has {tuple(about['input_shape'])}")
    site = from_clients(
        {name: (x, y)},
        name=config.data,
        **_kind(about),
        validation=config.validation,
        test=config.test,
        seed=config.data_seed,
    )
    return dataclasses.replace(site, classes=tuple(about.get("classes") or ()))


def _kind(about: dict[str, Any]) -> dict[str, Any]:
    target = target_of(about)
    if target.kind in ("classification", "regression"):
        return {"num_classes": about["num_classes"], "regression": target.kind == "regression"}
    return {"target": target}


def _silo(run: Path, name: str, path: Path, target: str | None, schema: dict[str, Any], config: Config) -> Federation:
    """Read the newcomer's table by the schema that the sites agreed on, and prepare it by its own training rows."""
    agreed = schema_from_dict(schema, str(run))
    if target not in (None, agreed.target):
        raise ConfigError([f"target = '{target}': the sites of this run agreed on {agreed.target}"])
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder) / "schema.toml"
        given.write_text(agreed.to_toml(), encoding="utf-8")
        group = read_config(run).get("group")
        silos = Silos((str(path),), schema=str(given), columns=agreed.names, missing=agreed.missing, group=group)
        site = load_silos(silos, validation=config.validation, test=config.test, seed=config.data_seed)
    (split,), (record,) = site.clients.values(), site.preprocessing.values()
    return dataclasses.replace(site, clients={name: split}, preprocessing={name: record}, files={})


def _write(run: Path, finished: Finished, result: Result, site: Federation) -> None:
    folder, row, metric = RunFolder(run), result.clients[0], result.metric
    write_models(folder, result, site, len(finished.names) + 1)
    before: list[dict[str, Any]] = [r for r in read_rows(run / "onboarded.csv") if r["client"] != row["client"]]
    folder.write_clients([*before, row], "onboarded.csv")
    setup = Setup(result.config, result.method, site, result.task, metric)
    gain = {**row, "federated": row[f"test_{metric}"], "local": row.get(f"local_test_{metric}")}
    write_cards(result, setup, run, finished.names, {"clients": [gain] if result.reference else []})
