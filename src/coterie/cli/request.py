"""What the user asked for: the values of a file, overridden by flags.

Values stay as they were typed. They are checked together with all other settings, so that the user sees every problem
at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import typer

from coterie.cli.flags import is_switch
from coterie.core.errors import ConfigError
from coterie.core.extensions import suggest
from coterie.core.toml import read_toml
from coterie.experiment.config import Config
from coterie.experiment.settings import RIVALS, named_by
from coterie.methods import METHODS
from coterie.methods.fields import Hyper, find_method, hyper_parameters
from coterie.methods.named import optimizer_fields


class Request:
    """The settings that a file and the flags of a command give.

    Attributes:
        values: The settings by name.
        problems: What is wrong with the words themselves, to be reported together with wrong settings.
        method_flags: Flags that the command does not declare: those of a method, or mistakes.
    """

    def __init__(self, ctx: typer.Context, declared: Mapping[str, Any]) -> None:
        self.problems: list[str] = []
        self._flags = [name for option in ctx.command.params for name in option.opts]
        self.method_flags: dict[str, Any] = {}
        flags = {key: value for key, value in declared.items() if value is not None and value != []}
        files = self._sort_words(ctx.args)
        if "silos" in flags:  # the shell expands hospitals/*.csv into many words
            flags["silos"] = [*flags["silos"], *(file for file in files if not file.endswith(".toml"))]
            files = [file for file in files if file.endswith(".toml")]
        self.values = _merged(self._read_files(files), flags)

    def take(self, key: str, default: Any) -> Any:
        """Remove a setting and return its value."""
        return self.values.pop(key, default)

    def method(self) -> str:
        """Return the method that is asked for, or else that of the setting, or else the default."""
        default = named_by(self.values.get("setting"), "method", Config.model_fields["method"].default)
        return str(self.values.get("method", default))

    def add_method_flags(self, methods: Iterable[str]) -> None:
        """Add the flags that one of the methods has to `values`; the others become problems."""
        methods = list(methods)
        theirs = [_hyper_parameters(name) for name in methods]
        of_optimizer = optimizer_fields(self.values.get("optimizer"))  # which may be the user's own
        known = {each.key: each for each in of_optimizer}
        known |= {name: hyper for each in theirs for name, hyper in (each or {}).items()}
        for key, value in self.method_flags.items():
            name, is_no = key.removeprefix("no_"), key.startswith("no_")
            if key in known and value is not None:
                self._set(key, value)
            elif value is None and name in known and is_switch(known[name]):
                self._set(name, not is_no)
            elif key in known:
                self.problems.append(f"{_flag(key)} needs a value")
            elif None not in theirs or not _methods_with(key):  # the flags of a method that does not exist are unknown
                self.problems.append(self._unknown(key, methods, known))

    def _set(self, key: str, value: Any) -> None:
        self.values.pop(key, None)  # the last one wins
        self.values[key] = value

    def _unknown(self, key: str, methods: list[str], known: Iterable[str]) -> str:
        if owners := _methods_with(key):
            return f"{_flag(key)} is a flag of {', '.join(owners)}, not of {', '.join(methods)}"
        close = suggest(_flag(key), [*self._flags, *map(_flag, known)])
        return f"there is no flag {_flag(key)}{close}; see --help or, for the flags of a method, 'coterie methods NAME'"

    def _sort_words(self, rest: list[str]) -> list[str]:
        """Sort undeclared words into files, which are returned, and `method_flags`, which are None without a value."""
        files: list[str] = []
        switches = {each.key for cls in METHODS.values() for each in hyper_parameters(cls) if is_switch(each)}
        words = deque(rest)
        while words:
            word = words.popleft()
            if not word.startswith("-"):
                files.append(word)
                continue
            name, equals, value = word.lstrip("-").partition("=")
            key = name.replace("-", "_")
            alone = key.removeprefix("no_") in switches or not words or words[0].startswith("--")
            self.method_flags[key] = value if equals else None if alone else words.popleft()
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


def _merged(file: dict[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
    """Merge a file's values with flags, which win; also where two settings exclude each other.

    The hyper-parameters that a file has for its method, or for its optimiser, do not apply to another one.
    """
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
    return {key: value for key, value in values.items() if key not in flags} | flags  # the last one wins


def _hyper_parameters(method: str) -> dict[str, Hyper] | None:
    """Return a method's hyper-parameters by name, or None if there is no such method."""
    try:
        cls, _ = find_method(method)
    except ConfigError:
        return None
    return None if cls is None else {hyper.key: hyper for hyper in hyper_parameters(cls)}


def _methods_with(key: str) -> list[str]:
    return [name for name in METHODS if key in (_hyper_parameters(name) or {})]


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")
