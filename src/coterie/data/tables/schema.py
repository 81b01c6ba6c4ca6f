"""The schema that sites agree on: the target, the inputs, and their possible values. Stored as a TOML file."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from coterie.core.errors import ConfigError, DataError
from coterie.core.targets import Ordered, Target, known
from coterie.core.toml import toml_value
from coterie.data.tables.outcomes import OF_SEVERAL_COLUMNS, Outcome, described, target_of
from coterie.data.tables.reading import MISSING, canonical
from coterie.data.tables.source import parse_target

ColumnKind = Literal["number", "category"]
FORMAT = 1
SCHEMA_KINDS = ("classification", "regression", "ordinal", *OF_SEVERAL_COLUMNS)


@dataclass(frozen=True)
class Column:
    """An input; `categories` are the values that a category may have."""

    name: str
    kind: ColumnKind
    categories: tuple[str, ...] = ()


@dataclass(frozen=True)
class Schema:
    """What all sites' files have in common."""

    target: str
    kind: str
    columns: tuple[Column, ...]  # the inputs, in their order
    classes: tuple[str, ...] = ()  # of a classification, or levels in their order
    missing: tuple[str, ...] = MISSING
    names: tuple[str, ...] = ()  # the columns of files that have no header, in their order
    outcomes: tuple[Outcome, ...] = ()  # of a task whose target is not one class or number

    def target_columns(self, columns: Sequence[str]) -> list[str]:
        """Return the columns that the target is read from; `columns` are those of a table."""
        texts = [text for each in self.outcomes for text in each.columns] or [self.target]
        return [parse_target(text, columns).column for text in texts]

    def to_predict(self) -> Target:
        """Return what is to be predicted."""
        if self.outcomes:
            return target_of(self.kind, self.outcomes)
        if self.kind == "ordinal":
            return Ordered(len(self.classes))
        return known(None if self.kind == "regression" else len(self.classes))

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
        whole = Outcome(self.target, self.kind, (self.target,), self.classes)
        lines = [f"target {described(each)}" for each in self.outcomes or [whole]]
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
        columns, outcomes = values.pop("columns"), values.pop("outcomes")
        lines = [
            "# The schema that the sites agree on. To make a column of codes a category, give it categories = [...]."
        ]
        if self.classes and parse_target(self.target).sign:
            lines.append(f"# classes are the names for the rows where {self.target} is false, and where it is true.")
        lines += [f"{key} = {toml_value(value)}" for key, value in values.items() if value != []]
        for heading, tables in (("outcomes", outcomes), ("columns", columns)):
            for each in tables:
                own = (f"{key} = {toml_value(value)}" for key, value in each.items() if value != [])
                lines += ["", f"[[{heading}]]", *own]
        return "\n".join(lines) + "\n"


def schema_from_dict(values: Any, where: str) -> Schema:
    """Read a schema from the values of a file or a record; raise `DataError` with everything that is wrong."""
    if not isinstance(values, dict):
        raise DataError(f"{where}: a schema must be a table")
    problems = []
    if values.get("format", FORMAT) != FORMAT:
        problems.append(f"format = {values['format']!r}: this version reads {FORMAT}")
    keys = {"format", "target", "kind", "columns", "classes", "missing", "names", "outcomes"}
    problems += [f"there is no key '{key}'; there are {', '.join(sorted(keys))}" for key in values.keys() - keys]
    if not isinstance(values.get("target"), str):
        problems.append("target: give the name of a column")
    if values.get("kind") not in SCHEMA_KINDS:
        problems.append(f"kind = {values.get('kind')!r}: give one of {', '.join(SCHEMA_KINDS)}")
    lists = {key: values.get(key, default) for key, default in (("classes", []), ("missing", MISSING), ("names", []))}
    problems += [f"{key}: give a list of text" for key, value in lists.items() if not _is_texts(value)]
    columns, more = _columns(values.get("columns"))
    outcomes, others = _outcomes(values.get("outcomes", []), values.get("kind"))
    problems += others
    if values.get("kind") in ("classification", "ordinal") and _is_texts(lists["classes"]):
        number_of = len(set(lists["classes"]))
        if number_of < 2:
            problems.append("classes: a classification needs at least two")
        elif number_of > 2 and parse_target(str(values.get("target"))).sign:
            problems.append("classes: a comparison has exactly two, for false and for true")
    if problems or more:
        raise DataError("\n".join(f"{where}: {problem}" for problem in [*problems, *more]))
    texts = {key: tuple(v) for key, v in lists.items()}
    return Schema(values["target"], values["kind"], tuple(columns), **texts, outcomes=outcomes)


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


def _outcomes(values: Any, kind: Any) -> tuple[tuple[Outcome, ...], list[str]]:
    """Read the outcomes of a task of several columns."""
    if kind not in OF_SEVERAL_COLUMNS:
        return (), [f"outcomes: a {kind} has none"] if values else []
    found, problems = list[Outcome](), list[str]()
    for place, value in enumerate(values if isinstance(values, list) else [], 1):
        where = f"outcome {place}"
        texts = isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("name", "kind"))
        lists = texts and all(_is_texts(value.get(key, [])) for key in ("columns", "classes"))
        times = value.get("times", []) if lists else []
        weight: Any = value.get("weight", 1.0) if lists else None
        if not lists or not isinstance(times, list) or not all(isinstance(t, int | float) for t in [weight, *times]):
            problems.append(f"{where}: give name, kind, columns and, if it needs them, classes, times and weight")
            continue
        made = Outcome(
            *(value["name"], value["kind"], tuple(value.get("columns", [])), tuple(value.get("classes", []))),
            tuple(map(float, times)),
            float(weight),
        )
        problems += made.problems(f"outcome '{made.name}'")
        found.append(made)
    if not problems:
        try:
            target_of(kind, found) if found else problems.append(f"outcomes: a {kind} task needs at least one")
        except ConfigError as error:
            problems += error.problems
    return tuple(found), problems


def _is_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)
