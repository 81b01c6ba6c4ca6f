"""The words and tables of a model card."""

import json

import pytest

import coterie
from coterie.experiment.take_home.card_text import to_markdown
from tests.experiment.conftest import QUICK, two_kinds


@pytest.mark.parametrize(
    ("verdict", "words"),
    [("gains", "it is better than training"), ("loses", "is the better choice"), ("undecided", "do not show which")],
)
def test_the_verdict_is_told_in_words(joined, verdict, words, tmp_path):
    result = joined("fedavg")
    card = json.loads((result.path / "clients" / result.names[0] / "card.json").read_text())
    gain = {"gain": 0.1234, "low": -0.01, "high": 0.2, "local": 0.5, "verdict": verdict}
    told = to_markdown({**card, "benefit": gain}, tmp_path)
    assert words in told
    assert "gives 0.500: the gain is +0.123 (95% interval -0.010 to +0.200)" in told


def test_names_cannot_break_the_tables(tmp_path):
    data = dict(zip(["a|b", "c\nd"], two_kinds(2).values(), strict=True))
    result = coterie.run("fedamp", data, out=tmp_path / "run", reference=False, **QUICK)
    for folder in (result.path / "clients").iterdir():
        assert "a\\|b" in (folder / "card.md").read_text()
