"""Sections of users and of installed packages: `--section my_package.report:calibration:bins=5`.

A section is a function of what a run folder holds. Its first parameter says what it is given: `run`, a `RunData`, if it
shows one run; `runs`, a list of them, if it can also show the runs of a comparison. All other parameters are options.
It returns a `Section`; or blocks (`Note`, `Table`, `Picture`, text, or plotly figures), whose heading is then the first
line of its docstring; or None, if it has nothing to show. Text and cells of tables are escaped, so they cannot be HTML.
"""

from __future__ import annotations

import dataclasses
import functools
import html
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from coterie.core.errors import ConfigError, CoterieWarning
from coterie.core.extensions import with_options
from coterie.core.options import parameters, with_given_options
from coterie.core.user_code import in_user_code
from coterie.report.block import Note, Picture, Section, Table
from coterie.report.figure import Figure, merge
from coterie.report.style import figure

if TYPE_CHECKING:
    from coterie.report.read import RunData

KIND = "report section"
OWN: Mapping[str, Callable[..., Any]] = {}  # the library has none with a name
HEIGHT = 340  # of a figure that does not say


def problems_of(names: Sequence[str]) -> list[str]:
    """Return what is wrong with the sections that a configuration names."""
    problems: list[str] = []
    for name in names:
        try:
            find_section(name)
        except ConfigError as error:
            problems += error.problems
    return problems


def find_section(name: str) -> Callable[..., Any]:
    """Return a section, with its options.

    Raises:
        ConfigError: there is none, or it does not have these options; it lists every problem.
    """
    found, words = with_options(KIND, name, OWN)
    if not inspect.isroutine(found) or _takes(found) not in ("run", "runs"):
        raise ConfigError([f"{KIND} '{name}' is not a function whose first parameter is `run` or `runs`"])
    return with_given_options(KIND, name, found, words, ("run", "runs"))


def users_sections(names: Sequence[str], runs: Sequence[RunData]) -> list[Section]:
    """Return the sections of a report; one that fails is left out, with a warning.

    Args:
        names: their names or import paths, with options.
        runs: the runs that the report shows.
    """
    made = []
    for place, name in enumerate(names, 1):
        try:
            made += _made(f"own-{place}", name, runs)
        except Exception as error:
            why = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            words = f"{KIND} '{name}' is missing from the report: {why.removeprefix('- ')}{in_user_code(error)}"
            warnings.warn(words, CoterieWarning, stacklevel=2)
    return made


def _made(prefix: str, name: str, runs: Sequence[RunData]) -> list[Section]:
    function = find_section(name)
    one = _takes(function) == "run"
    if one and len(runs) > 1:
        raise ConfigError(["it shows one run, and this report compares several: call its first parameter `runs`"])
    found = function(runs[0] if one else list(runs))
    if found is None:
        return []
    if isinstance(found, Section):
        return [Section(found.heading, _blocks(prefix, found.heading, found.blocks))]
    plain = function.func if isinstance(function, functools.partial) else function
    heading = (inspect.getdoc(plain) or plain.__name__.replace("_", " ").capitalize()).split("\n")[0].rstrip(".")
    return [Section(heading, _blocks(prefix, heading, found if isinstance(found, list | tuple) else [found]))]


def _takes(function: Callable[..., Any]) -> str:
    return next(iter(parameters(function)), "")


def _blocks(prefix: str, heading: str, given: Sequence[Any]) -> list[Picture | Table | Note]:
    if not given:
        raise ConfigError(["it returned no blocks; return None for no section"])
    return [_block(f"{prefix}-{place}", heading, each) for place, each in enumerate(given, 1)]


def _block(name: str, heading: str, given: Any) -> Picture | Table | Note:
    if isinstance(given, str):
        return Note(given)
    if isinstance(given, Table):
        wrong = [row for row in [*given.rows, *given.foot] if len(row) != len(given.columns)]
        if wrong:
            raise ConfigError([f"table '{given.name}' has {len(given.columns)} columns, but {len(wrong[0])} in a row"])
        return dataclasses.replace(given, name=name)
    if isinstance(given, Note):
        return given
    if isinstance(given, Picture):
        states = [dataclasses.replace(state, label=html.escape(str(state.label))) for state in given.states]
        return dataclasses.replace(given, name=name, figure=_drawn(given.figure), states=states)
    if hasattr(given, "to_plotly_json"):
        content = given.to_plotly_json()
        layout = {key: value for key, value in content.get("layout", {}).items() if key != "template"}
        title = layout.pop("title", {})
        title = title.get("text", "") if isinstance(title, dict) else title
        return Picture(name, str(title) or heading, "", _drawn(Figure(list(content.get("data", ())), layout)))
    what = "Note, Table, Picture, text or a plotly figure"
    raise ConfigError([f"it returned a {type(given).__name__}; a block is a {what}"])


def _drawn(given: Figure) -> Figure:
    """Return a figure with the look of the others, as far as it does not say otherwise."""
    made = figure(HEIGHT)
    merge(made.layout, given.layout)
    return Figure([dict(trace) for trace in given.data], made.layout)
