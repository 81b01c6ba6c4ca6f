"""What decides the result of a run, so that results can be kept by it.

That is the resolved configuration, the files of the data set (names and sizes), and the code of the method with the
parts it imports (without comments and docstrings).
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from coterie.data import SOURCES
from coterie.experiment.config import Config
from coterie.experiment.given import sort_settings
from coterie.experiment.resolve import resolve
from coterie.experiment.several.compare import SETTINGS_NOT_COMPARED
from coterie.methods.fields import AnyMethod, find_method, values_of
from coterie.methods.named import optimizer_of

FORMAT = 1
SHARED_CODE = ("coterie.parts", "coterie.core.training", "coterie.core.optimizers")  # that a method's own is made of
Record = dict[str, Any]


def settled(method: str, settings: Mapping[str, Any]) -> tuple[Config, AnyMethod]:
    """Return the configuration of a run with all defaults, without reading data.

    Raises:
        ConfigError: settings are wrong; it lists every problem.
    """
    values = sort_settings(method, {**settings, "reference": False, "report": False})
    config, built = resolve({**values, "method": method})
    resolved = {"hyper": values_of(built), "optimizer": optimizer_of(built) or config.optimizer}
    return config.model_copy(update=resolved), built


def decisive(config: Config) -> dict[str, Any]:
    """Return what of a configuration decides the result.

    Settings that are not given are left out, so that results stay those of their configuration when others are added.
    """
    skipped = {*SETTINGS_NOT_COMPARED, "setting", "data_dir", "reference"}
    given = ((key, value) for key, value in config.to_file().items() if key not in skipped)
    return {key: value for key, value in given if value is not None and value is not False}


class Identity(NamedTuple):
    """Say what a result is of. Its key is the name under which it is kept."""

    key: str
    config: str  # a hash of what decides
    files: list[tuple[str, int]]
    code: str


def identify(config: Config) -> Identity:
    """Return what the result of a configuration is of, on this machine and with this code."""
    decides, there, code = decisive(config), data_files(config), code_of(config.method)
    return Identity(_hash([FORMAT, decides, there, code]), _hash(decides), there, code)


def key_of(config: Config) -> str:
    """Return the name under which the result of a configuration is kept."""
    return identify(config).key


def _hash(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=12).hexdigest()


def data_files(config: Config) -> list[tuple[str, int]]:
    """Return the names and sizes of the files that a data set is read from; none if it is generated."""
    source = SOURCES.get(config.data)
    folder = source.files.find(config.data_dir) if source is not None and source.files is not None else None
    if folder is None:
        return []
    return sorted((file.name, file.stat().st_size) for file in folder.iterdir() if file.is_file())


@functools.cache
def code_of(method: str) -> str:
    """Return a hash of a method's code and of the parts it imports; comments and docstrings do not count."""
    cls = find_method(method)[0]
    digest, seen, todo = hashlib.blake2b(digest_size=12), set[str](), [cls.__module__]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        tree = _without_docstrings(_parsed(name))
        todo += [each for each in _imported(tree) if each.startswith(SHARED_CODE)]
    for name in sorted(seen):
        digest.update(ast.unparse(_without_docstrings(_parsed(name))).encode())
    return digest.hexdigest()


def _parsed(module: str) -> ast.Module:
    file = sys.modules[module].__file__ if module in sys.modules else importlib.import_module(module).__file__
    assert file is not None
    return ast.parse(Path(file).read_text(encoding="utf-8"))


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return tree


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yield the modules of the library that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("coterie."):
            yield node.module
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if hasattr(importlib.import_module(node.module), "__path__") and importlib.util.find_spec(name):
                    yield name
