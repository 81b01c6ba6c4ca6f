"""What is searched: ranges come from markers and types, and what the user asks for is checked in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import pytest
from pydantic import Field

from coterie.core.errors import ConfigError
from coterie.core.optimizers import SGD, Adam, Optimizer
from coterie.core.search import UNSEARCHED, Search
from coterie.experiment.tuning.space import (
    Numbers,
    Options,
    check_names,
    parse_wanted,
    space_of,
    with_values,
)
from coterie.methods import METHODS
from coterie.methods.fields import hyper_parameters
from coterie.methods.local import Local


@dataclass(frozen=True)
class Everything(Local):
    optimizer: Optimizer = SGD()
    marked: Annotated[float, Search(0.1, 10), Field(gt=0)] = 1.0
    count: Annotated[int, Search(1, 8, log=False), Field(ge=1)] = 2
    share: Annotated[float, Field(gt=0, le=1)] = 0.5
    open: Annotated[float, Field(gt=0)] = 1.0
    word: Annotated[Literal["a", "b"], Field()] = "a"
    other: Annotated[Literal["a", "b"], UNSEARCHED, Field()] = "a"
    switch: Annotated[bool, Field()] = True
    automatic: Annotated[Literal["auto"] | Annotated[float, Field(gt=0)], Field()] = "auto"


def test_ranges_come_from_markers_and_else_from_types() -> None:
    assert space_of(Everything()) == {
        "lr": Numbers(1e-3, 1, log=True),
        "marked": Numbers(0.1, 10, log=True),
        "count": Numbers(1, 8, log=False, whole=True),
        "share": Numbers(0.01, 1, log=False),
        "word": Options(("a", "b")),
    }
    assert space_of(Everything(Adam()))["lr"] == Numbers(1e-4, 3e-2, log=True)


def test_what_is_given_is_not_searched_and_what_is_asked_for_is() -> None:
    wanted = parse_wanted(["other", "open=0.5..2", "lr=0.01..0.02:linear", "model=mlp|linear"])
    space = space_of(Everything(), ["marked", "share", "count", "word", "open"], wanted)
    assert space == {
        "lr": Numbers(0.01, 0.02, log=False),
        "open": Numbers(0.5, 2, log=False),
        "other": Options(("a", "b")),
        "model": Options(("mlp", "linear")),
    }
    assert parse_wanted(["open=0.1..1"]) == {"open": Numbers(0.1, 1, log=True)}  # it spans a factor of ten
    assert parse_wanted(["--first-passes=1|2"]) == {"first_passes": Options((1, 2))}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lr=1..0.1", "--search lr=1..0.1: the range is empty: give the smaller number first"),
        ("lr=1..1", "the range is empty"),
        ("lr=0..1:log", "a log range begins above 0"),
        ("lr=0.1..1:wide", "'wide' is no scale"),
        ("lr=fast..slow", "give a range of numbers"),
        ("lr=0.1", "give a range of numbers"),
        ("word=a|a", "at least two different values"),
    ],
)
def test_a_range_that_makes_no_sense_is_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_wanted([text, "fine=1..2"])
    assert words in raised.value.problems[0]
    assert len(raised.value.problems) == 1


def test_a_range_must_suit_the_field() -> None:
    with pytest.raises(ConfigError) as raised:
        space_of(Everything(), [], parse_wanted(["marked=-1..1", "count=1.5..3", "word=a|c", "open"]))
    problems = "\n".join(raised.value.problems)
    assert "--search marked = -1.0: Everything needs a number > 0" in problems
    assert "--search count=1.5..3: give whole numbers" in problems
    assert "word = 'c': Everything needs a | b" in problems
    assert "open has no range of its own: give one, such as --search open=0.1..10" in problems


def test_an_unknown_name_is_refused_with_what_was_probably_meant() -> None:
    methods = {"ditto": METHODS["ditto"](), "local": Local()}
    with pytest.raises(ConfigError, match=r"none of ditto, local has a 'lamm' \(did you mean 'lam'\?\)"):
        check_names({"lamm": None}, methods)
    with pytest.raises(ConfigError, match="name the models, such as"):
        check_names({"model": None}, methods)
    with pytest.raises(ConfigError, match="there is no model 'mpl'"):
        check_names({"model": Options(("mlp", "mpl"))}, methods)
    check_names({"lam": None, "lr": None}, methods)


def test_values_go_to_the_method_and_to_its_optimiser() -> None:
    made = with_values(METHODS["ditto"](), {"lam": 3.0, "lr": 0.2, "momentum": 0.5, "model": "mlp"})
    assert made == METHODS["ditto"](SGD(0.2, momentum=0.5), lam=3.0)


@pytest.mark.parametrize("name", METHODS)
def test_the_ranges_of_every_method_are_allowed_and_hold_its_default(name: str) -> None:
    method = METHODS[name]()
    fields = {hyper.name: hyper for hyper in hyper_parameters(METHODS[name])}
    for key, found in space_of(method).items():
        ends = found.values if isinstance(found, Options) else (found.low, found.high)
        for end in ends:
            with_values(method, {key: end})
        if key in fields and fields[key].search is not None and isinstance(found, Numbers):
            space_of(method, (), {key: found})  # the ends are what the field allows
            default = getattr(method, key)
            assert default == "auto" or found.holds(default), f"{name}: {key} = {default} is outside {found}"
