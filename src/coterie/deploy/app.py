"""A Flower app on disk: what `flwr run` takes, with every setting in its table."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coterie.deploy.settings import Deploy, flatten
from coterie.errors import ConfigError
from coterie.experiment import files
from coterie.experiment.config import Config, _toml

SERVER = '''"""The server: Coterie's rounds, checks and checkpoints; which method is a setting in pyproject.toml."""

from coterie.flower import server_app

app = server_app()  # a network of your own: server_app(model=lambda shape, outputs: MyNetwork(shape, outputs))
'''

CLIENT = '''"""A site: trains on its own data and keeps its state on its own disk."""

from coterie_site import client_app  # the same as coterie.flower's, without importing PyTorch for every message

# With a network and data of your own: client_app(model=the same factory as the server's, data=read), where
# read(node_config) returns this site's (inputs, targets) as tensors.
app = client_app()
'''

HEAD = """# A Flower app that runs a method of Coterie: `flwr run .` takes it as it is, in simulation and in deployment.
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "1.0.0"
description = "A federation of Coterie: {method} on {data}"
license = "Apache-2.0"
# Empty: every machine has Coterie beside its Flower (pip install 'coterie[flower]', for a simulation 'coterie[ray]').
# What is named here, Flower installs anew in each run; add what a network or data function of your own imports.
dependencies = []

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "coterie"

[tool.flwr.app.components]
serverapp = "{package}.server_app:app"
clientapp = "{package}.client_app:app"

# Coterie's settings: 'coterie run --help' and 'coterie methods {method}' say what each is.
# "" is not set; engine, compile, workers, memory and checkpoint_every are the simulator's alone.
# Any of them can be changed for one run: flwr run . --run-config "rounds=5 hyper.x=1"
[tool.flwr.app.config]
"""


def write(out: Path, config: Config, deploy: Mapping[str, Any]) -> Path:
    """The folder `out` with pyproject.toml and a package of two modules."""
    if (out / "pyproject.toml").exists():
        raise ConfigError([f"'{out}' holds an app already: name another folder"])
    package = re.sub(r"\W", "_", out.name).lower()
    if not package.isidentifier():
        package = f"federation_{package}"
    federation = {"federation": re.sub(r"[^A-Za-z0-9_.-]", "-", out.name)}
    chosen = Deploy(**{**federation, **deploy}).model_dump()
    text = HEAD.format(name=package.replace("_", "-"), package=package, method=config.method, data=config.data)
    files.write_text(out / "pyproject.toml", text + _tables(config, chosen))
    files.write_text(out / package / "__init__.py", "")
    files.write_text(out / package / "server_app.py", SERVER)
    files.write_text(out / package / "client_app.py", CLIENT)
    return out


def _tables(config: Config, deploy: Mapping[str, Any]) -> str:
    flat = flatten(config)
    lines = [f"{key} = {_toml(value)}" for key, value in flat.items() if "." not in key]
    for table in ("hyper", "optimizer"):
        mine = {key.partition(".")[2]: value for key, value in flat.items() if key.startswith(f"{table}.")}
        if mine:
            lines += [
                "",
                f"[tool.flwr.app.config.{table}]",
                *(f"{key} = {_toml(value)}" for key, value in mine.items()),
            ]
    lines += ["", "[tool.flwr.app.config.deploy]"]
    for key, value in deploy.items():
        lines += [f"# {Deploy.model_fields[key].description}", f"{key} = {_toml(value)}"]
    return "\n".join(lines) + "\n"
