"""The schema that sites agree on: the target, the inputs, and their possible values. Stored as a TOML file."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from coterie.core.errors import DataError
from coterie.core.toml import toml_value
from coterie.data.tables.reading import MISSING, canonical, number

ColumnKind = Literal["number", "category"]
FORMAT = 1

_COMPARISON = re.compile(r"(.+?)\s*(>=|<=|==|!=|>|<)\s*(.+)")
_OPPOSITE = {">": "<=", ">=": "<", "<": ">=", "<=": ">", "==": "!=", "!=": "=="}


@dataclass(frozen=True)
class Column:
    """An input; `categories` are the values that a category may have."""

    name: str
    kind: ColumnKind
    categories: tuple[str, ...] = ()


@dataclass(frozen=True)
class Target:
    """What to predict: a column, or a comparison such as `num>0`, which is true or false."""

    column: str
    sign: str = ""
    value: str = ""

    def classes(self) -> tuple[str, str]:
        """Return the names of the two classes of a comparison, (false, true)."""
        return f"{self.column}{_OPPOSITE[self.sign]}{self.value}", f"{self.column}{self.sign}{self.value}"

    def holds(self, cell: str) -> bool | None:
        """Return whether the comparison is true of a cell; None if the cell cannot be compared."""
        if self.sign in ("==", "!="):
            return (canonical(cell) == canonical(self.value)) == (self.sign == "==")
        left, right = number(cell), number(self.value)
        if left is None or right is None:
            return None
        return {">": left > right, ">=": left >= right, "<": left < right, "<=": left <= right}[self.sign]


@dataclass(frozen=True)
class Schema:
    """What all sites' files have in common."""

    target: str
    kind: Literal["classification", "regression"]
    columns: tuple[Column, ...]  # the inputs, in their order
    classes: tuple[str, ...] = ()  # of a classification
    missing: tuple[str, ...] = MISSING
    names: tuple[str, ...] = ()  # the columns of files that have no header, in their order

    @property
    def features(self) -> tuple[str, ...]:
        """The inputs of a model: one feature for a number, and one for each category."""
        return tuple(
            feature
            for column in self.columns
            for feature in (
                [column.name] if column.kind == "number" else [f"{column.name}={each}" for each in column.categories]
            )
        )

    def describe(self) -> list[str]:
        """Describe the schema in a few lines, for people."""
        target = f"target {self.target}: "
        target += (
            "a number" if self.kind == "regression" else f"{len(self.classes)} classes ({', '.join(self.classes)})"
        )
        lines = [target]
        for kind, plural in (("number", "numbers"), ("category", "categories")):
            of_kind = [column for column in self.columns if column.kind == kind]
            if of_kind:
                lines.append(f"{plural}: {', '.join(column.name for column in of_kind)}")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Return the schema as JSON values."""
        return json.loads(json.dumps({"format": FORMAT, **asdict(self)}))  # type: ignore[no-any-return]

    def to_toml(self) -> str:
        """Return the text of a schema file, with comments."""
        values = self.to_dict()
        columns = values.pop("columns")
        lines = [
            "# The schema that the sites agree on. To make a column of codes a category, give it categories = [...]."
        ]
        if parse_target(self.target).sign:
            lines.append(f"# classes are the names for the rows where {self.target} is false, and where it is true.")
        lines += [f"{key} = {toml_value(value)}" for key, value in values.items() if value != []]
        for column in columns:
            lines += [
                "",
                "[[columns]]",
                *(f"{key} = {toml_value(value)}" for key, value in column.items() if value != []),
            ]
        return "\n".join(lines) + "\n"


def parse_target(text: str, columns: Sequence[str] = ()) -> Target:
    """Parse the name of a column (which may contain a sign, if there is such a column) or a comparison."""
    match = _COMPARISON.fullmatch(text.strip())
    if text in columns or not match:
        return Target(text)
    return Target(match[1], match[2], match[3].strip("'\""))


def schema_from_dict(values: Any, where: str) -> Schema:
    """Read a schema from the values of a file or a record; raise `DataError` with everything that is wrong."""
    if not isinstance(values, dict):
        raise DataError(f"{where}: a schema must be a table")
    problems = []
    if values.get("format", FORMAT) != FORMAT:
        problems.append(f"format = {values['format']!r}: this version reads {FORMAT}")
    known = {"format", "target", "kind", "columns", "classes", "missing", "names"}
    problems += [f"there is no key '{key}'; there are {', '.join(sorted(known))}" for key in values.keys() - known]
    if not isinstance(values.get("target"), str):
        problems.append("target: give the name of a column")
    if values.get("kind") not in ("classification", "regression"):
        problems.append(f"kind = {values.get('kind')!r}: give classification or regression")
    lists = {key: values.get(key, default) for key, default in (("classes", []), ("missing", MISSING), ("names", []))}
    problems += [f"{key}: give a list of text" for key, value in lists.items() if not _is_texts(value)]
    columns, more = _columns(values.get("columns"))
    if values.get("kind") == "classification" and _is_texts(lists["classes"]):
        number_of = len(set(lists["classes"]))
        if number_of < 2:
            problems.append("classes: a classification needs at least two")
        elif number_of > 2 and parse_target(str(values.get("target"))).sign:
            problems.append("classes: a comparison has exactly two, for false and for true")
    if problems or more:
        raise DataError("\n".join(f"{where}: {problem}" for problem in [*problems, *more]))
    return Schema(values["target"], values["kind"], tuple(columns), **{key: tuple(v) for key, v in lists.items()})


def read_schema(path: str | Path) -> Schema:
    """Read a schema file; raise `DataError` with everything that is wrong."""
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"there is no schema '{path}': 'coterie data schema' writes one") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"'{path}' cannot be read as TOML: {error}") from error
    return schema_from_dict(values, f"'{path}'")


def _columns(values: Any) -> tuple[list[Column], list[str]]:
    if not isinstance(values, list) or not values:
        return [], ["columns: at least one input is needed, as a table [[columns]]"]
    columns: list[Column] = []
    problems = []
    for place, value in enumerate(values, 1):
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(name, str):
            problems.append(f"column {place} has no name")
            continue
        kind, categories = value.get("kind"), value.get("categories", [])
        if kind not in ("number", "category"):
            problems.append(f"column '{name}': kind = {kind!r}: give number or category")
        elif not _is_texts(categories) or (kind == "category" and len(set(map(canonical, categories))) < 1):
            problems.append(f"column '{name}': a category needs a list of text, categories = [...]")
        elif name in {column.name for column in columns}:
            problems.append(f"column '{name}' occurs twice")
        else:
            columns.append(Column(name, kind, tuple(dict.fromkeys(map(canonical, categories)))))
    return columns, problems


def _is_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)
