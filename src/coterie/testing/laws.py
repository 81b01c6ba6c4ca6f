"""The twelve laws, by number, and what asks a method for all of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Literal, NamedTuple

from coterie.core.errors import ConfigError
from coterie.methods.fields import AnyMethod
from coterie.testing import engine_laws, method_laws
from coterie.testing.kit import DoesNotApply, LawBroken

Outcome = Literal["held", "broken", "does not apply"]
Test = Callable[[AnyMethod], str | None]  # raises LawBroken or DoesNotApply; may return words about how the law held


class Law(NamedTuple):
    """What must hold for every method, whatever it does."""

    number: int
    name: str
    test: Test


class Row(NamedTuple):
    """What became of one law."""

    number: int
    name: str
    outcome: Outcome
    words: str  # the complaint, the reason why the law does not apply, or how it held


_TESTS: list[tuple[str, Test]] = [
    ("stacked = one at a time", engine_laws.stacked_equals_one_at_a_time),
    ("server = peers", method_laws.server_equals_peers),
    ("inputs are not modified", method_laws.inputs_are_not_modified),
    ("options act, and it learns", method_laws.options_act_and_the_method_learns),
    ("padding is ignored", method_laws.padding_is_ignored),
    ("relabelling relabels", method_laws.relabelling_relabels),
    ("packing keeps everything", method_laws.packing_keeps_everything),
    ("own data only", method_laws.updates_use_own_data_only),
    ("one client, own solution", method_laws.one_client_gets_its_own_solution),
    ("resuming changes nothing", engine_laws.resuming_changes_nothing),
    ("workers change nothing", engine_laws.workers_change_nothing),
    ("every engine agrees", engine_laws.every_engine_agrees),
]
LAWS = {number: Law(number, name, test) for number, (name, test) in enumerate(_TESTS, start=1)}


def check(method: AnyMethod, only: Collection[int] = ()) -> list[Row]:
    """Ask a method for all laws (or `only` for some, by number).

    Returns:
        One row a law, none of them broken.

    Raises:
        LawBroken: some are broken; the message names each of them with its complaint.
        ConfigError: the method is exempt from a law that does not exist, or does not say why.
    """
    rows = list(examine(method, only))
    broken = [row for row in rows if row.outcome == "broken"]
    if broken:
        told = "\n".join(f"  law {row.number}, {row.name}: {row.words}" for row in broken)
        raise LawBroken(f"{type(method).__name__} breaks {len(broken)} of {len(rows)} laws:\n{told}")
    return rows


def examine(method: AnyMethod, only: Collection[int] = ()) -> Iterator[Row]:
    """Do the same without an error: yield what became of each law, one after another."""
    reasons = exemptions(method)
    if unknown := sorted(set(only) - LAWS.keys()):
        raise ConfigError([f"there is no law {number}: laws are 1 to {len(LAWS)}" for number in unknown])
    return (_row(law, method, reasons) for law in LAWS.values() if not only or law.number in only)


def exemptions(method: AnyMethod) -> dict[int, str]:
    """Return the laws that do not apply to a method as it says itself, with its reasons.

    Raises:
        ConfigError: a law that does not exist, or no reason.
    """
    owner, problems = type(method).__name__, []
    for number, reason in method.exempt.items():
        if number not in LAWS:
            problems.append(f"{owner}.exempt names law {number!r}: laws are 1 to {len(LAWS)}")
        elif not isinstance(reason, str) or not reason.strip():
            problems.append(f"{owner}.exempt does not say why law {number} does not apply")
    if problems:
        raise ConfigError(problems)
    return dict(method.exempt)


def _row(law: Law, method: AnyMethod, reasons: dict[int, str]) -> Row:
    if law.number in reasons:
        return Row(law.number, law.name, "does not apply", reasons[law.number])
    try:
        words = law.test(method)
    except DoesNotApply as reason:
        return Row(law.number, law.name, "does not apply", str(reason))
    except LawBroken as complaint:
        return Row(law.number, law.name, "broken", str(complaint))
    except Exception as error:  # what a law did not expect is a complaint too, and the others are still asked
        return Row(law.number, law.name, "broken", f"{type(error).__name__}: {error}")
    return Row(law.number, law.name, "held", words or "")
