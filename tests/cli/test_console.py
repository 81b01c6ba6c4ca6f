import io

from rich.console import Console

from coterie.cli.console import stderr, stdout
from coterie.cli.progress import Lines, watch
from coterie.cli.tables import print_comparison
from coterie.experiment.several.comparison import Comparison


def test_a_table_in_a_file_is_as_wide_as_it_needs_to_be():
    names = tuple(f"a-method-{i:02d}" for i in range(12))
    rows = [{"method": name, "seed": 0, "client": "[bold]", "train": 9, "test": 4, "test_rmse": 0.5} for name in names]
    text = io.StringIO()
    print_comparison(Console(file=text, width=80, markup=False), Comparison("rmse", names, (0,), rows), quiet=True)
    lines = text.getvalue().splitlines()
    assert lines[0].startswith("Test rmse, seed 0")
    assert all(name in lines[2] for name in names)
    assert "[bold]" in lines[4]


def test_a_notebooks_cell_is_no_terminal(monkeypatch):
    """Its kernel says FORCE_COLOR, but a cell that runs !coterie moves no cursor."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    assert stdout().is_terminal
    assert stderr().is_terminal
    monkeypatch.setenv("JPY_PARENT_PID", "7")
    assert not stdout().is_terminal
    assert not stderr().is_terminal
    with watch(False, measures=False) as told:
        assert isinstance(told, Lines)
