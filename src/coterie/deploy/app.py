"""Writes a Flower app to disk, ready for `flwr run`, with every setting in its pyproject.toml."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coterie.core.errors import ConfigError
from coterie.core.toml import toml_value
from coterie.deploy.settings import Deploy, flatten
from coterie.experiment.config import Config
from coterie.storage import files

SERVER_APP = '''"""The server: Coterie's rounds, checks and checkpoints. The method is a setting in pyproject.toml."""

from coterie.flower import server_app

app = server_app()  # with your own model: server_app(model=lambda shape, outputs: MyNetwork(shape, outputs))
'''

CLIENT_APP = '''"""A site: it trains on its own data and keeps its state on its own disk."""

from coterie.flower import client_app

# With your own model and data: client_app(model=the same factory as the server's, data=read), where
# read(node_config) returns this site's (inputs, targets) as tensors.
app = client_app()
'''

PYPROJECT_HEAD = """# A Flower app that runs a method of Coterie. Run it with `flwr run .`, in simulation or deployment.
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "1.0.0"
description = "A federation of Coterie: {method} on {data}"
license = "Apache-2.0"
# Empty: every machine has Coterie and Flower (pip install 'coterie[flower]', for a simulation 'coterie[ray]').
# Flower installs what is listed here in each run; add what your own model or data function imports.
dependencies = []

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "coterie"

[tool.flwr.app.components]
serverapp = "{package}.server_app:app"
clientapp = "{package}.client_app:app"

# Coterie's settings: see 'coterie run --help' and 'coterie methods {method}'. "" means not set.
# Settings of the simulator (engine, compile, workers, debug, memory, checkpoint_every) do not apply here.
# To change any of them for one run: flwr run . --run-config "rounds=5 hyper.x=1"
[tool.flwr.app.config]
"""


def write(out: Path, config: Config, deploy: Mapping[str, Any]) -> Path:
    """Write pyproject.toml and a package of two modules to `out`; `deploy` has keys of the deploy table."""
    if (out / "pyproject.toml").exists():
        raise ConfigError([f"'{out}' already contains an app: choose another folder"])
    package = re.sub(r"\W", "_", out.name).lower()
    if not package.isidentifier():
        package = f"federation_{package}"
    federation = {"federation": re.sub(r"[^A-Za-z0-9_.-]", "-", out.name)}
    chosen = Deploy(**{**federation, **deploy}).model_dump()
    text = PYPROJECT_HEAD.format(
        name=package.replace("_", "-"), package=package, method=config.method, data=config.data
    )
    files.write_text(out / "pyproject.toml", text + _tables(config, chosen))
    files.write_text(out / package / "__init__.py", "")
    files.write_text(out / package / "server_app.py", SERVER_APP)
    files.write_text(out / package / "client_app.py", CLIENT_APP)
    return out


def _tables(config: Config, deploy: Mapping[str, Any]) -> str:
    flat = flatten(config)
    lines = [f"{key} = {toml_value(value)}" for key, value in flat.items() if "." not in key]
    for table in ("hyper", "optimizer"):
        mine = {key.partition(".")[2]: value for key, value in flat.items() if key.startswith(f"{table}.")}
        if mine:
            lines += [
                "",
                f"[tool.flwr.app.config.{table}]",
                *(f"{key} = {toml_value(value)}" for key, value in mine.items()),
            ]
    lines += ["", "[tool.flwr.app.config.deploy]"]
    for key, value in deploy.items():
        lines += [f"# {Deploy.model_fields[key].description}", f"{key} = {toml_value(value)}"]
    return "\n".join(lines) + "\n"
