"""What the user asked for: a file's values and, over them, the flags. Values stay as they were typed: they are checked
where all settings are, so that everything that is wrong is told at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import typer

from coterie.cli.flags import is_switch
from coterie.errors import ConfigError
from coterie.experiment.config import Config, read_toml
from coterie.experiment.settings import RIVALS, named_by
from coterie.hyper import Hyper, find_method, hyper_parameters, suggest
from coterie.methods import METHODS


class Asked:
    """`values` are settings; `problems` are told together with those that checking the settings finds."""

    def __init__(self, ctx: typer.Context, declared: Mapping[str, Any]) -> None:
        self.problems: list[str] = []
        self._flags = [name for option in ctx.command.params for name in option.opts]
        self.own: dict[str, Any] = {}  # flags that were not declared
        flags = {key: value for key, value in declared.items() if value is not None and value != []}
        files = self._read_rest(ctx.args)
        if "silos" in flags:  # the shell makes many words of hospitals/*.csv
            flags["silos"] = [*flags["silos"], *(file for file in files if not file.endswith(".toml"))]
            files = [file for file in files if file.endswith(".toml")]
        self.values = _over(self._read_files(files), flags)

    def take(self, key: str, default: Any) -> Any:
        return self.values.pop(key, default)

    def method(self) -> str:
        """The one that is asked for, or else the setting's, or else the one that runs by default."""
        default = named_by(self.values.get("setting"), "method", Config.model_fields["method"].default)
        return str(self.values.get("method", default))

    def add_own(self, methods: Iterable[str]) -> None:
        """Take over the flags that one of the methods has; complain of the others."""
        methods = list(methods)
        theirs = [_hyper_parameters(name) for name in methods]
        known = {name: hyper for each in theirs for name, hyper in (each or {}).items()}
        for key, value in self.own.items():
            name, is_no = key.removeprefix("no_"), key.startswith("no_")
            if key in known and value is not None:
                self._put(key, value)
            elif value is None and name in known and is_switch(known[name]):
                self._put(name, not is_no)
            elif key in known:
                self.problems.append(f"{_flag(key)} needs a value")
            elif None not in theirs or not _owners(key):  # of a method that does not exist, who knows its flags
                self.problems.append(self._unknown(key, methods, known))

    def _put(self, key: str, value: Any) -> None:
        self.values.pop(key, None)  # what comes last counts
        self.values[key] = value

    def _unknown(self, key: str, methods: list[str], known: Iterable[str]) -> str:
        if owners := _owners(key):
            return f"{_flag(key)} is a flag of {', '.join(owners)}, not of {', '.join(methods)}"
        close = suggest(_flag(key), [*self._flags, *map(_flag, known)])
        return f"there is no flag {_flag(key)}{close}; see --help and, for a method's own, 'coterie methods NAME'"

    def _read_rest(self, rest: list[str]) -> list[str]:
        """Sorts what was not declared into files (returned) and flags (kept in `own`; None where no value follows)."""
        files: list[str] = []
        switches = {each.name for cls in METHODS.values() for each in hyper_parameters(cls) if is_switch(each)}
        words = deque(rest)
        while words:
            word = words.popleft()
            if not word.startswith("-"):
                files.append(word)
                continue
            name, equals, value = word.lstrip("-").partition("=")
            key = name.replace("-", "_")
            alone = key.removeprefix("no_") in switches or not words or words[0].startswith("--")
            self.own[key] = value if equals else None if alone else words.popleft()
        return files

    def _read_files(self, files: list[str]) -> dict[str, Any]:
        if len(files) > 1:
            self.problems.append(f"give one TOML file, not {len(files)}: {', '.join(files)}")
        values: dict[str, Any] = {}
        for file in files[:1]:
            if file.lower().endswith((".csv", ".tsv", ".parquet")):
                self.problems.append(f"'{file}' is a data file: name it after --silos")
                continue
            try:
                values = read_toml(Path(file))
            except ConfigError as error:
                self.problems += error.problems
        for key in ("method", "data", "model"):
            if not isinstance(values.get(key, ""), str):
                self.problems.append(f"{key} = {values.pop(key)!r}: give its name, as text")
        return values


def _over(file: dict[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
    """A flag beats the file's value, also where the two exclude each other. The hyper-parameters that a file has for
    its method, or optimiser, do not carry over to another one."""
    values = dict(file)
    for one, other in RIVALS.items():
        for given, beaten in ((one, other), (other, one)):
            if given in flags:
                values.pop(beaten, None)
    if "method" in flags and flags["method"] != file.get("method", flags["method"]):
        values.pop("hyper", None)
    table = values.get("optimizer")
    if "optimizer" in flags and isinstance(table, dict):
        same = table.get("name", flags["optimizer"]) == flags["optimizer"]
        flags = {**flags, "optimizer": {**(table if same else {}), "name": flags["optimizer"]}}
    return {key: value for key, value in values.items() if key not in flags} | flags  # what comes last counts


def _hyper_parameters(method: str) -> dict[str, Hyper] | None:
    """A method's, by name; None if there is no such method."""
    try:
        cls, _ = find_method(method)
    except ConfigError:
        return None
    return None if cls is None else {hyper.name: hyper for hyper in hyper_parameters(cls)}


def _owners(key: str) -> list[str]:
    return [name for name in METHODS if key in (_hyper_parameters(name) or {})]


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")
