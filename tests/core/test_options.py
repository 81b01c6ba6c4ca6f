from pathlib import Path
from typing import Annotated

import pytest
from pydantic import Field

from coterie.core.errors import ConfigError
from coterie.core.options import with_given_options


def made(owner, scanners: Annotated[int, Field(ge=1)], *, noise=0.1, names=("a",), dry=False, out: Path | None = None):
    return scanners, noise, names, dry, out


def read(*words):
    return with_given_options("partition", ":".join(["ours:made", *words]), made, words, ("owner",))(None)


def test_options_come_in_order_or_by_name_and_are_read_by_their_types():
    assert read("3") == (3, 0.1, ("a",), False, None)
    assert read("3", "0.5") == (3, 0.5, ("a",), False, None)
    assert read("names=x/y", "scanners=4", "dry=true", "out=a/b") == (4, 0.1, ["x", "y"], True, Path("a/b"))


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        ((), r"needs scanners: write ours:made:SCANNERS\[:noise=0.1\]\[:names=a\]\[:dry=false\]\[:out=...\]"),
        (("0",), "scanners = '0': input should be greater than or equal to 1"),
        (("3", "nose=1"), r"has no option 'nose' \(did you mean 'noise'\?\)"),
        (("3", "owner=1"), "has no option 'owner'"),
        (("3", "scanners=4"), "has scanners twice"),
        (("3", "1", "a", "true", "x", "y"), "has an extra value 'y'"),
        (("x", "noise=much"), "(?s)scanners = 'x'.*noise = 'much'"),
    ],
)
def test_what_is_wrong_with_them_is_said_all_at_once(words, wrong):
    with pytest.raises(ConfigError, match=wrong):
        read(*words)


def test_what_cannot_be_called_has_no_options():
    with pytest.raises(ConfigError, match="partition 'ours:three' is a int, not a function or a class"):
        with_given_options("partition", "ours:three", 3, ())


def plain(share, rounds=3, name="x"):
    return share, rounds, name


@pytest.mark.parametrize(
    ("words", "values"),
    [(("0.5",), (0.5, 3, "x")), (("2", "1.5", "7"), (2, 1.5, "7")), (("half", "4"), ("half", 4, "x"))],
)
def test_without_annotations_numbers_are_numbers(words, values):
    found = with_given_options("loss", ":".join(["ours:plain", *words]), plain, words)()
    assert found == values
    assert [type(each) for each in found] == [type(each) for each in values]
