"""Reads the settings of a deployed run from the flat table of a Flower app (`[tool.flwr.app.config]`).

Coterie's settings have the same names as in a TOML file (`rounds`, `hyper.sigma2`, `optimizer.lr`); those of the
deployment begin with `deploy.`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from coterie.core.errors import ConfigError
from coterie.data.loading import is_known
from coterie.deploy.contract import Rules
from coterie.deploy.schema import MAX_FOLDS, MAX_TRIALS
from coterie.deploy.secure import agreement
from coterie.experiment.config import TABLES, Config
from coterie.experiment.resolve import resolve
from coterie.methods.fields import AnyMethod, values_of
from coterie.methods.named import optimizer_of

# Settings of a simulation, and the name of a published setting, whose values are all in the table already.
SIMULATION_ONLY = (
    "engine",
    "compile",
    "workers",
    "debug",
    "memory",
    "device",
    "checkpoint_every",
    "holdout",
    "references",
    "track",
    "callbacks",
    "sections",
    "setting",
)
AVERAGE = "trimmed"  # by default, since sites report their own metrics
LIST_KEYS = ("silos", "columns", "missing", "drop", "levels", "horizons", "metric", "models")


class Deploy(BaseModel):
    """The settings of a deployment. Every field is a key `deploy.NAME`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    federation: str = Field(
        "federation",
        pattern=r"^[A-Za-z0-9_.-]+$",
        max_length=100,
        description="name of the federation, under which sites keep their state",
    )
    sites: int = Field(2, ge=1, description="number of sites to wait for at the start")
    names: str = Field("", description="names of the sites, in order, separated by commas; empty: the first to join")
    deadline: float = Field(600.0, gt=0, description="seconds after which a round closes with the sites that answered")
    quorum: float = Field(0.5, gt=0, le=1, description="share of the sampled sites that must answer in a round")
    patience: int = Field(3, ge=1, description="number of deadlines to wait for a quorum before stopping")
    joining: float = Field(600.0, gt=0, description="seconds to wait for the sites at the start")
    norm_bound: float = Field(1e6, gt=0, description="largest norm of a site's message")
    sealed: bool = Field(True, description="mail between peers is encrypted end to end")
    secure: bool = Field(False, description="the server learns sums of the sites' messages only, and no single one")
    threshold: float = Field(
        2 / 3, gt=0.5, le=1, description="secure: share of a round's sites that must still be there to recover the sum"
    )
    keys: str = Field(
        "", description="folder with the sites' public keys, NAME.pub; empty: trust the first key of a name"
    )
    key: str = Field("", description="the server's private key; empty: make one in the run folder")
    out: str = Field("", description="the run folder; empty: a new one in runs/")
    recommend: str = Field(
        "", description="methods, separated by commas: do not train, but recommend one of them; empty: train"
    )
    trials: int = Field(6, ge=1, le=MAX_TRIALS, description="to recommend: candidates of each method, in each fold")
    folds: int = Field(3, ge=2, le=MAX_FOLDS, description="to recommend: how often another part is held out")
    given: str = Field("", description="to recommend: hyper-parameters that are not searched, such as 'lr=0.1, lam=1'")
    resume: bool = Field(False, description="continue the run in `out`")

    def panel(self) -> list[str]:
        """Return the methods among which one is to be recommended."""
        return [name.strip() for name in self.recommend.split(",") if name.strip()]

    def given_values(self) -> dict[str, str]:
        """Return the hyper-parameters that are not searched, as they were typed."""
        pairs = (part.partition("=") for part in self.given.split(",") if part.strip())
        return {name.strip(): value.strip() for name, _, value in pairs}

    def rules(self) -> Rules:
        """Return the rules of the rounds."""
        names = tuple(name.strip() for name in self.names.split(",") if name.strip())
        same = {field.name for field in dataclasses.fields(Rules)} - {"names"}
        return Rules(names=names, **{key: value for key, value in self.model_dump().items() if key in same})


def read(flat: Mapping[str, Any], *, own_data: bool, own_model: bool) -> tuple[Config, AnyMethod, Deploy]:
    """Parse and check all settings; raise `ConfigError` with everything that is wrong."""
    values: dict[str, Any] = {}
    deploy: dict[str, Any] = {}
    for key, value in flat.items():
        table, dot, name = key.replace("-", "_").partition(".")
        if not dot:
            values[table] = value
        elif table == "deploy":
            deploy[name] = value
        else:
            values.setdefault(table, {})[name] = value
    if isinstance(values.get("topology"), str) and ";" in values["topology"]:
        values["topology"] = [tuple(edge.split(",")) for edge in values["topology"].split(";")]
    values = {key: value for key, value in values.items() if value != ""}  # TOML cannot express "not set"
    values = {"average": AVERAGE, **values}
    for one, other in {"local_steps": "local_epochs", "clients_per_round": "fraction"}.items():
        if one in values:
            values.pop(other, None)
    values |= {key: values[key].split(";") for key in LIST_KEYS if isinstance(values.get(key), str)}
    if values.get("silos"):
        values.pop("data", None)
    own_data = own_data or not (values.get("silos") or is_known(str(values.get("data"))))
    problems: list[str] = []
    config, method, settings = None, None, None
    if own_model:
        values["model"] = "own-model"
    try:
        config, method = resolve(values, own_data=own_data, own_model=own_model)
        problems += refuse_of_simulation(config)
    except ConfigError as error:
        problems += error.problems
    try:
        settings = Deploy(**deploy)
    except pydantic.ValidationError as error:
        problems += [f"deploy.{'.'.join(map(str, each['loc']))}: {each['msg'].lower()}" for each in error.errors()]
    if config is not None and method is not None and settings is not None and settings.secure:
        problems += agreement.problems(config, method, settings.rules().number)
        if config.privacy is not None:
            problems.append(
                "deploy.secure: not together with privacy yet: a round that a killed server begins again would be "
                "trained, and counted, twice. Leave one of them out"
            )
        if settings.panel():
            problems.append("deploy.secure: a recommendation compares the sites' messages one by one: leave secure out")
    if problems or config is None or method is None or settings is None:
        raise ConfigError(problems)
    resolved = {"hyper": values_of(method), "optimizer": optimizer_of(method) or config.optimizer}
    return config.model_copy(update=resolved), method, settings


def refuse_of_simulation(config: Config) -> list[str]:
    """Return problems if a device other than the CPU is asked for, or what only a simulation can do."""
    problems = []
    if config.device != "cpu":
        problems.append(f"device = {config.device!r}: sites and their server run on the CPU; leave this out")
    if config.callbacks:
        problems.append("callbacks: over Flower the server decides when to stop, by early_stop; leave callbacks out")
    if config.sections:
        problems.append("sections: leave them out, and add them at the end: coterie report RUN --section ...")
    if config.pretrained:
        problems.append("pretrained: sites could have other files: let a model of your own load the weights (--model)")
    if config.models:
        problems.append("models: sites with different models are not there yet: use one model")
    return problems


def flatten(config: Config) -> dict[str, Any]:
    """Return all settings as a flat table with values that TOML and Flower support; "" means not set."""
    flat: dict[str, Any] = {}
    for key, value in config.model_dump().items():
        if key in SIMULATION_ONLY:
            continue
        if key in TABLES:
            flat |= {f"{key}.{name}": each for name, each in value.items() if each is not None}
        elif isinstance(value, list):
            flat[key] = ";".join(",".join(each) if isinstance(each, tuple) else str(each) for each in value)
        else:
            flat[key] = "" if value is None else value
    return flat


def quoted(value: Any) -> str:
    """Format a value for the configuration of a run or a node."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'
