"""Recommends a method for a federation of real sites: the panel is trained there, and only scores come back.

The search, the comparison and the choice are those of `coterie.recommend`; this is the place where candidates train.
The server knows names, sizes and shapes, and works on a federation without data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from coterie.core.decode import Decode
from coterie.core.errors import ConfigError
from coterie.core.toml import to_toml
from coterie.deploy.federation_facts import Declaration, federation_without_data, gather_facts
from coterie.deploy.joining import Joining
from coterie.deploy.ledger import Ledger
from coterie.deploy.messenger import Messenger
from coterie.deploy.panel_at_sites import AtSites
from coterie.deploy.server import Server
from coterie.deploy.settings import Deploy
from coterie.experiment.config import PARTITION_SETTINGS
from coterie.experiment.silos import OPTIONS
from coterie.experiment.tuning.recommend import Panel, prepare_panel, run_panel
from coterie.experiment.tuning.recommendation import Recommendation
from coterie.methods import METHODS
from coterie.storage.run_folder import RunFolder

# Settings that say where data are, or how a simulation is done: the server has no data.
NOT_AT_A_SERVER = (
    *("method", "data", "model", "head", "hyper", "optimizer", "reference", "references", "setting", "holdout"),
    *("silos", *OPTIONS, *PARTITION_SETTINGS, "class_weights", "validation", "test", "report", "track"),
    *("engine", "compile", "workers", "memory", "device", "checkpoint_every"),
    *("take_home", "take_home_errors", "take_home_folds", "calibrate", "threshold"),
)


def recommend_over(server: Server, ledger: Ledger, deploy: Deploy) -> Recommendation:
    """Recommend a method to the sites that join, or go on with that: what `server.out` has is not done again."""
    config, out = server.config, server.out
    if config.topology != "server":
        raise ConfigError([f"topology = {config.topology!r}: a recommendation over Flower needs a server"])
    folder = RunFolder(out)
    if not (out / "config.toml").exists():
        folder.create(to_toml(config.to_file()))
    joining = Joining(ledger, server.transport, server.identity, server.known, server.rules, server.say)
    if ledger.declared:
        ledger.life += 1
        ledger.save(out)
    joining.wait(out)
    panel = panel_of(server, ledger.declared, deploy)
    ledger.metric = panel.setup.metric
    ledger.save(out)
    place = AtSites(server, ledger, Messenger(server, ledger, joining), panel)
    found = run_panel(panel, out, progress=Said(server), place=place)
    place.close()
    ledger.finished = True
    ledger.save(out)
    return found


def panel_of(server: Server, declared: Mapping[str, Declaration], deploy: Deploy) -> Panel:
    """Return all that is to be tried, checked, on a federation of these sites without its data."""
    config = server.config
    names = deploy.panel()
    if unknown := [name for name in names if name not in METHODS]:
        raise ConfigError([f"deploy.recommend: sites have no method {', '.join(unknown)}"])
    facts = gather_facts(config, declared)
    blank = federation_without_data(config, declared, facts)
    decode = None if facts.decode is None else Decode(facts.decode.mean, facts.decode.std)
    y = blank.y.expand(2, *facts.y_shape)
    given = deploy.given_values()
    values = {key: value for key, value in config.to_file().items() if key not in NOT_AT_A_SERVER and value is not None}
    optimizer = {key: value for key, value in config.optimizer.items() if key not in given}
    settings = {**values, "optimizer": optimizer, "engine": "loop", "compile": False, "workers": 1, **given}
    panel = prepare_panel(
        dataclasses.replace(blank, name=config.data, x=facts.blank(2), y=y, decode=decode),
        names,
        trials=deploy.trials,
        folds=deploy.folds,
        model=server.model,
        head=config.head,
        fixed=list(given),
        **settings,
    )
    where = {key: getattr(config, key) for key in ("data", "silos", *OPTIONS, *PARTITION_SETTINGS, "class_weights")}
    first = panel.prepared.first
    about = first.config.model_copy(update={**where, "validation": config.validation, "test": config.test})
    named = about if isinstance(server.model, str) else about.model_copy(update={"model": config.model})
    prepared = dataclasses.replace(panel.prepared, first=dataclasses.replace(first, config=named))
    return dataclasses.replace(panel, prepared=prepared, own_data=False)


@dataclasses.dataclass(frozen=True)
class Said:
    """Passes on news of the panel to the server's log."""

    server: Server

    def say(self, text: str) -> None:
        self.server.say(text)

    def start(self, label: str, done: int, rounds: int) -> None:
        self.server.say(f"{label}: {rounds - done} rounds of all candidates together")

    def round(self, record: dict[str, Any], metric: str) -> None: ...
    def stop(self) -> None: ...
