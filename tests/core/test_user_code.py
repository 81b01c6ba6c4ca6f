"""A user's own lines are found among those of Coterie, PyTorch and Python."""

import importlib
import sys

import pytest
import torch

from coterie.core import user_code
from coterie.core.errors import ConfigError, CoterieError
from coterie.core.importing import import_path
from coterie.core.user_code import explain, in_user_code, naming_users_line, user_lines

MINE = """
import torch
from coterie.core import tree

def add(a, b):
    return tree.map(lambda x: x @ torch.zeros(9, 9), a)

def outer(a):
    return [add(a, a) for _ in range(1)]

def chained(a):
    try:
        outer(a)
    except RuntimeError as error:
        raise ValueError("cannot") from error
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    yield importlib.import_module("mine")
    del sys.modules["mine"]


def raised(function, *args):
    """Return what a function raises; its traceback begins in this file, which is a user's as well."""
    try:
        function(*args)
    except Exception as error:
        error.__traceback__ = error.__traceback__.tb_next
        return error


def test_the_innermost_line_of_the_user_comes_first(mine):
    """A lambda or a comprehension is told by the function that it stands in."""
    lines = user_lines(raised(mine.outer, torch.zeros(3, 3)))
    assert [(line.file, line.number, line.function) for line in lines] == [
        ("mine.py", 6, "add"),
        ("mine.py", 9, "outer"),
    ]
    assert lines[0].code == "return tree.map(lambda x: x @ torch.zeros(9, 9), a)"


def test_it_is_explained_from_the_user_on(mine):
    words = explain(raised(mine.outer, torch.zeros(3, 3))).splitlines()
    assert words[0].startswith("RuntimeError in your code: mat1 and mat2")
    assert words[1:3] == ["  mine.py, line 6, in add", "    return tree.map(lambda x: x @ torch.zeros(9, 9), a)"]
    assert "  called in mine.py, line 9, in outer" in words


def test_the_cause_of_an_exception_is_where_it_began(mine):
    assert user_lines(raised(mine.chained, torch.zeros(3, 3)))[0].number == 6


def test_exceptions_of_others_are_not_the_users(mine):
    error = raised(torch.zeros(3).reshape, 4)
    assert user_lines(error) == []
    assert explain(error) == in_user_code(error) == ""


def test_python_prints_the_users_line_last(mine):
    with pytest.raises(RuntimeError) as told, naming_users_line(), naming_users_line():
        mine.outer(torch.zeros(3, 3))
    assert told.value.__notes__ == [f"{user_code.NOTE}mine.py, line 6, in add: {user_lines(told.value)[0].code}"]
    with pytest.raises(CoterieError) as plain, naming_users_line():
        raise CoterieError("in words already")
    assert not hasattr(plain.value, "__notes__")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import nowhere_at_all\n", r"No module named 'nowhere_at_all' \(broken.py, line 1, in <module>: `import"),
        ("def f(:\n", None),
    ],
)
def test_a_module_that_cannot_be_imported_names_its_line(tmp_path, monkeypatch, text, told):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken.py").write_text(text)
    with pytest.raises(ConfigError if told else SyntaxError, match=told) as caught:
        import_path("broken:Method", "method")
    if not told:
        told = {(line.file, line.number, line.code) for line in user_lines(caught.value)}
        assert ("broken.py", 1, "def f(:") in told
