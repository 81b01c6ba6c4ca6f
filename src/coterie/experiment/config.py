"""Describe a run completely: every setting, with what it may be (`resolve.py` fills in the rest)."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from coterie.core.device import parse as parse_device
from coterie.core.errors import ConfigError
from coterie.core.losses import check_name
from coterie.core.units import parse_bytes
from coterie.data.minibatches import Plan
from coterie.data.partition import check_spec
from coterie.engine.peers import parse, read_edges
from coterie.experiment import silos as silo_settings
from coterie.experiment import training_settings
from coterie.experiment.tracking import parse as parse_trackers
from coterie.experiment.training_settings import SamplerSetting, ScheduleSetting, ServerOptimizerSetting
from coterie.methods.fields import AnyMethod
from coterie.parts import robust

# A setting may be called `schema`, although pydantic's models had a method of that name once. The warning comes when
# the class is made; afterwards the filters are what they were.
_usual_filters = warnings.catch_warnings()
_usual_filters.__enter__()
warnings.filterwarnings("ignore", message='Field name "schema" in "Config" shadows an attribute')


class Config(BaseModel):
    """Describe a run completely. Every field is a key of the TOML file and, except for the two tables, a flag."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    setting: str | None = Field(None, description="a published experiment; `coterie data settings` lists them")
    method: str = Field("fedmap", description="which method; `coterie methods` lists them")
    data: str = Field(
        "hospitals",
        description="which data set (`coterie data` lists them), a file's path, or your own as package.module:function",
    )
    data_dir: str | None = Field(
        None, description="folder with the data sets; by default the one that COTERIE_DATA names"
    )
    partition: str | None = Field(
        None,
        description="how the data are divided among clients: iid, dirichlet:0.3, natural, package.module:function",
    )
    clients: int | None = Field(None, ge=1, description="number of clients that the data are divided among")
    split: Literal["random", "published"] = Field(
        "random", description="test on random examples or on the published test set"
    )
    scaling: Literal["unit", "standard", "imagenet"] | None = Field(
        None, description="scale images to 0..1 (unit, the default), to mean 0 and sd 1 per channel, or as for ImageNet"
    )
    image_size: int | None = Field(None, ge=8, le=1024, description="side of images read from folders; by default 224")
    drop_duplicates: bool = Field(False, description="of identical examples, keep only the first")
    silos: list[str] | None = Field(
        None, description="instead of data: one CSV or Parquet file per site, or a folder of them"
    )
    target: str | None = Field(
        None,
        description="for silos: the column to predict, or a comparison such as num>0; some tasks take several: a,b,c",
    )
    schema: str | None = Field(  # type: ignore[assignment]
        None, description="for silos: the schema the sites agreed on, a file written by `coterie data schema`"
    )
    columns: list[str] | None = Field(
        None, description="for silos: the column names, if the files have no header: a,b,c"
    )
    missing: list[str] | None = Field(None, description="for silos: cells that mean a missing value (?,NA,NaN,null)")
    site_column: str | None = Field(
        None, description="for silos: the column that names the site, if all sites are in one file"
    )
    group: str | None = Field(
        None, description="for silos: a column (such as the patient); rows that agree in it stay on one side of a split"
    )
    drop: list[str] | None = Field(None, description="for silos: columns to leave out: a,b,c")
    regression: bool | None = Field(
        None, description="for silos: the target is a number; by default judged by its values"
    )
    task: Literal["classification", "regression", "multilabel", "ordinal", "survival", "cox", "multitask"] | None = (
        Field(None, description="what kind of target is predicted; by default classes or a number, as the data say")
    )
    horizons: list[float] | None = Field(
        None, description="for survival: the ends of the intervals of time, and the times of predictions: 30,90,365"
    )
    levels: list[str] | None = Field(None, description="for ordinal silos: the levels in their order: low,mid,high")
    loss: str | None = Field(
        None, description="train with another loss: focal:gamma=2, huber:delta=1, ... or package.module:function"
    )
    metric: list[str] | None = Field(None, description="measure your own metrics as well: package.module:metric")
    class_weights: Literal["balanced"] | None = Field(
        None, description="balanced: every class of a client counts the same in training"
    )
    augment: str | None = Field(
        None,
        description="change images at random in training: flip, crop:4, rotate:10, brightness, contrast, noise",
    )
    model: str = Field("mlp", description="which network, or your own as package.module:factory")
    models: list[str] | None = Field(
        None,
        description="clients with different networks: dealt out in turn, or by client: mlp,cnn or site-1=mlp,*=cnn",
    )
    pretrained: str | None = Field(None, description="a safetensors file with the weights that the model begins with")
    adapter: str | None = Field(
        None, description="freeze the model and train low-rank updates and its head: lora:rank=4:alpha=8"
    )
    head: str | None = Field(None, description="the layer that is the model's head; by default its last linear layer")
    rounds: int = Field(20, ge=1, description="communication rounds")
    local_epochs: int = Field(1, ge=1, description="passes of each client over its data per round")
    local_steps: int | None = Field(None, ge=1, description="minibatches per client and round, instead of local_epochs")
    batch_size: int = Field(32, ge=1, description="examples in a minibatch")
    fraction: float = Field(1.0, gt=0, le=1, description="share of the clients that take part in a round")
    clients_per_round: int | None = Field(None, ge=1, description="number of clients per round, instead of fraction")
    clients_heard: int | None = Field(
        None, ge=1, description="how many of the clients of a round are averaged; by default all"
    )
    sampler: SamplerSetting = Field(
        None, description="who takes part: uniform (default), by-size, round-robin, or your own as package.module:name"
    )
    topology: str | list[tuple[str, str]] = Field(
        "server", description="server, or peers: complete, ring, star, k-regular:4, small-world:4:0.1, a CSV of edges"
    )
    robust: str | None = Field(
        None,
        description="average robustly: median, trimmed:0.2, krum:1, multi-krum:1, geometric-median, clip:auto, "
        "nnm:1+median",
    )
    server_optimizer: ServerOptimizerSetting = Field(
        None,
        description="the server steps towards the average: fedavgm, fedadam:lr=0.01, fedyogi, fedadagrad, or your own",
    )
    schedule: ScheduleSetting = Field(
        None,
        description="of the learning rate: cosine, step:every=10:factor=0.5, warmup:rounds=5:then=cosine, or your own; "
        "cosine:per=step changes with every step",
    )
    clip_gradient: float | None = Field(None, gt=0, description="clip gradients to this norm, whatever the optimiser")
    clip_gradient_value: float | None = Field(None, gt=0, description="clip each number of a gradient to -x..x")
    privacy: Literal["record", "site-local", "site-central"] | None = Field(
        None, description="differential privacy of single examples (record) or of clients as a whole (site-...)"
    )
    epsilon: float | None = Field(None, gt=0, description="for privacy: find the noise that costs no more than this")
    delta: float = Field(1e-5, gt=0, lt=1, description="for privacy: the delta of epsilon, far below 1 / examples")
    noise: float | None = Field(None, ge=0, description="for privacy: the noise itself, relative to the clip")
    clip: float = Field(1.0, gt=0, description="for privacy: most that one gradient, or one site's change, may weigh")
    clip_features: float = Field(5.0, gt=0, description="for privacy: the longest that features may be in class means")
    clip_loss: float = Field(
        5.0, gt=0, description="for privacy: the largest loss of an example, where losses are told"
    )
    holdout: float = Field(
        0.0, ge=0, lt=1, description="share of the clients that are kept out, and onboarded at the end"
    )
    seed: int = Field(0, ge=0, description="seed of the data, initial model, minibatches and participation")
    split_seed: int | None = Field(
        None, ge=0, description="seed of the data's division and splits, if they are to stay the same for every --seed"
    )
    validation: float = Field(
        0.1, gt=0, description="share of each client's data that selects the round, or how many examples"
    )
    test: float = Field(
        0.3, gt=0, description="share of each client's data that results are reported on, or how many examples"
    )
    evaluate_every: int = Field(1, ge=1, description="evaluate every so many rounds, and after the last")
    select: str | None = Field(
        None, description="validation metric that selects the round; by default balanced_accuracy or rmse"
    )
    early_stop: int | None = Field(
        None, ge=1, description="stop after so many evaluated rounds without a better validation score; reference too"
    )
    callbacks: list[str] | None = Field(
        None, description="called after each round, once for each: package.module:Class:option=value"
    )
    sections: list[str] | None = Field(
        None, description="added to the report, once for each: package.module:function:option=value"
    )
    average: Literal["mean", "trimmed"] | None = Field(
        None,
        description="over clients, of metrics; trimmed leaves out extremes (default over Flower; else mean)",
    )
    engine: Literal["auto", "loop", "stacked"] = Field(
        "auto", description="how clients are computed; auto measures which is fastest"
    )
    compile: bool | None = Field(None, description="compile the training step; by default if that is faster")
    workers: int | None = Field(
        None, ge=1, description="processes or threads; by default one per core, if that is faster"
    )
    debug: bool = Field(
        False, description="find mistakes: clients one by one, uncompiled, in one process and thread: breakpoints stop"
    )
    device: str = Field("cpu", description="cpu, cuda, cuda:1 or mps: where data and models are kept and steps run")
    bf16: bool = Field(False, description="multiply in bfloat16 during training; parameters stay float32")
    memory: str = Field(
        "2GB", description="memory for the clients' state, such as 500MB or 2GB; the rest is kept on disk"
    )
    checkpoint_every: int = Field(
        1, ge=1, description="write a checkpoint every so many rounds, but at most every two seconds"
    )
    reference: bool = Field(True, description="also train every client alone, for comparison")
    references: bool = Field(
        False, description="of tables: also show scikit-learn's linear models and trees, on own and on pooled data"
    )
    take_home: Literal["federated", "best"] = Field(
        "federated", description="what a client keeps; best: by its validation data, also its local model or an average"
    )
    take_home_errors: float = Field(
        1.0, ge=0, le=10, description="for take_home: how many standard errors better than its local model it must be"
    )
    take_home_folds: int = Field(
        5, ge=0, le=20, description="for take_home: folds of cross-validation where validation is tiny; 0: none"
    )
    calibrate: bool = Field(False, description="calibrate the model that a client keeps: a temperature by validation")
    threshold: Literal["balanced_accuracy", "accuracy", "macro_f1"] | None = Field(
        None, description="of two classes: predict the second above the threshold that is best for this on validation"
    )
    report: bool = Field(True, description="write report.html, with figures of the run, at the end")
    track: str | None = Field(
        None, description="also log each round to tensorboard, mlflow, or both (separated by a comma)"
    )
    hyper: dict[str, Any] = Field(default_factory=dict, description="the method's own hyper-parameters")
    optimizer: dict[str, Any] = Field(
        default_factory=dict, description="name (sgd, adam, adamw, rmsprop) and its settings"
    )

    @field_validator("memory")
    @classmethod
    def _memory(cls, value: str) -> str:
        parse_bytes(value)
        return value

    @field_validator("device")
    @classmethod
    def _device(cls, value: str) -> str:
        parse_device(value)
        return value

    @field_validator("track")
    @classmethod
    def _track(cls, value: str | None) -> str | None:
        parse_trackers(value)
        return value

    @field_validator("robust")
    @classmethod
    def _robust(cls, value: str | None) -> str | None:
        if value is not None:
            robust.parse(value)
        return value

    @field_validator("loss")
    @classmethod
    def _loss(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                check_name(value)
            except ConfigError as error:
                raise ValueError("; ".join(error.problems)) from error
        return value

    @field_validator("silos", mode="before")
    @classmethod
    def _silos(cls, value: Any) -> Any:
        paths = [value] if isinstance(value, str) else value
        return silo_settings.find_files(paths) if isinstance(paths, list) and all(map(_is_text, paths)) else paths

    @field_validator("callbacks", "sections", mode="before")
    @classmethod
    def _several(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value or None

    @field_validator("columns", "missing", "drop", "models", "levels", "metric", "horizons", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        """Accept a list, or text with commas as it is typed on a command line."""
        given = [value] if isinstance(value, str) else value
        if isinstance(given, tuple):
            given = list(given)
        if not isinstance(given, list) or not all(map(_is_text, given)):
            return given
        return [name.strip() for part in given for name in part.split(",")] if len(given) == 1 else given

    @field_validator("schema", "pretrained")
    @classmethod
    def _schema(cls, value: str | None) -> str | None:
        return (
            value if value is None else str(Path(value).resolve())
        )  # so that the run does not depend on where it began

    @field_validator("validation", "test")
    @classmethod
    def _part(cls, value: float) -> float:
        if value >= 1 and value != int(value):
            raise ValueError("give a share below 1, or a whole number of examples")
        return value

    @field_validator("partition")
    @classmethod
    def _partition(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                check_spec(value)
            except ConfigError as error:
                raise ValueError("; ".join(error.problems)) from error
        return value

    @field_validator("topology", mode="before")
    @classmethod
    def _topology(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if Path(value).is_file():
            return read_edges(Path(value))  # a run then does not depend on the file
        parse(value)
        return value

    @property
    def data_seed(self) -> int:
        """The seed of everything that is done to the data: how they are divided, split and held out."""
        return self.seed if self.split_seed is None else self.split_seed

    def plan(self) -> Plan:
        """Return how many minibatches of which size a client draws in a round."""
        chance = self.privacy == "record" and self.method != "local"
        pacing = training_settings.pacing_of(self)
        return Plan(self.batch_size, self.local_epochs, self.local_steps, poisson=chance, pacing=pacing)

    @property
    def takes_last(self) -> bool:
        """Whether the last round is selected, because selecting it by validation data would tell of these."""
        return self.privacy is not None and self.method != "local"

    def participants(self, clients: int) -> int:
        """Return how many of `clients` take part in a round."""
        return self.clients_per_round or max(1, round(self.fraction * clients))

    def ready(self, method: AnyMethod) -> AnyMethod:
        """Return the method as this run calls it: for its number of rounds, and with what is wrapped around it.

        Raises:
            ConfigError: it cannot be made robust, or its server cannot have an optimiser.
        """
        return training_settings.as_trained(self, method.scheduled(self.rounds))

    def to_file(self) -> dict[str, Any]:
        """Return what config.toml holds: of two settings that exclude each other, only the one in force."""
        instead = {"local_epochs": self.local_steps, "fraction": self.clients_per_round}
        return self.model_dump(exclude={key for key, other in instead.items() if other is not None})


TABLES = ("hyper", "optimizer")
OWN_AUGMENT = "own-augment"  # what config.toml says of an augmentation that came from Python
DEBUGGING = {"engine": "loop", "compile": False, "workers": 1}
PARTITION_SETTINGS = (
    "partition",
    "clients",
    "split",
    "scaling",
    "image_size",
    "drop_duplicates",
)  # only for data sets that are not divided among clients yet


_usual_filters.__exit__(None, None, None)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)
