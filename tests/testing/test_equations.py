"""Equations of docstrings in HTML."""

import re
from pathlib import Path

import pytest

from coterie.testing.equations import as_html, with_equations

PAGE = Path(__file__).resolve().parents[2] / "docs" / "methods.md"


@pytest.mark.parametrize(
    ("plain", "shown"),
    [
        ("theta_i <- w", "θ<sub><i>i</i></sub> ← <i>w</i>"),
        ("||w||^2 >= 1", "‖<i>w</i>‖<sup>2</sup> ≥ 1"),
        ("e^(s_i / tau) + 1", "<i>e</i><sup><i>s</i><sub><i>i</i></sub> / τ</sup> + 1"),
        ("Lambda_-i mu_(i,k)", "Λ<sub>-<i>i</i></sub> μ<sub><i>i</i>,<i>k</i></sub>"),
        ("sum_i p < q & r", "∑<sub><i>i</i></sub> <i>p</i> &lt; <i>q</i> &amp; <i>r</i>"),
        ("over `finetune_epochs` epochs", "over <code>finetune_epochs</code> epochs"),
        ("sum_{j != i} xi_ij", "∑<sub><i>j</i> ≠ <i>i</i></sub> ξ<sub><i>ij</i></sub>"),
        ("(a - s)_+   b", "(<i>a</i> - <i>s</i>)<sub>+</sub>&emsp;<i>b</i>"),
        ("f_ (x", "<i>f</i>_ (<i>x</i>"),
        ("w^(x", "<i>w</i>^(<i>x</i>"),
    ],
)
def test_a_line_is_shown_as_mathematics(plain, shown):
    assert f">{shown}</span>" in as_html(plain)


def test_the_function_that_computes_a_line_stands_beside_it():
    found = as_html("w <- 1     (`aggregate`; eq. 2)\n  + b_i\n")
    assert '<span class="where">(<code>aggregate</code>; eq. 2)</span>' in found
    assert '<span style="padding-left: 1em">+ <i>b</i>' in found
    assert found.count("<div>") == 2


def test_all_cards_of_the_page_are_shown_so():
    plain = PAGE.read_text(encoding="utf-8")
    shown = with_equations(plain)
    assert shown.count('class="equations"') == plain.count("```text") >= 37
    assert "```text" not in shown
    blocks = re.findall(r'<div class="equations">.*?\n', shown)
    assert not [
        block for block in blocks if re.search(r"\b(theta|lambda|sigma|mu|xi)\b", re.sub("<code>.*?</code>", "", block))
    ]
    assert "and" in shown
