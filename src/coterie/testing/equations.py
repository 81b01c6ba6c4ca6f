"""Equations of docstrings as a page shows them: theta_i becomes a Greek letter with an index, ^2 is raised, and so on.

Docstrings have plain text, for terminals and editors. The site shows the same lines in HTML, without a library in the
browser and without another host.
"""

from __future__ import annotations

import html
import re

GREEK = (
    *("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "kappa", "lambda", "mu", "nu", "xi"),
    *("pi", "rho", "sigma", "tau", "phi", "chi", "psi", "omega"),
)
LETTERS = {name: html.unescape(f"&{name};") for name in GREEK}
LETTERS |= {name.capitalize(): html.unescape(f"&{name.capitalize()};") for name in GREEK}
WORDS = {"sum": "∑", "prod": "∏", "grad": "∇", "sqrt": "√", "argmin": "arg min", "argmax": "arg max", "lam": "λ"}
SIGNS = {
    "<-": "←",
    "->": "→",
    ">=": "≥",
    "!=": "≠",
    "<=": "≤",
    "||": "‖",
    "~=": "≈",
    "...": "…",
    " * ": " · ",
    " x ": " × ",
}
SIGN = re.compile("|".join(re.escape(sign) for sign in SIGNS))
WORD = re.compile(r"[A-Za-z]+")
INDEX = re.compile(r"[-+]?[A-Za-z0-9]+'?|[*+']")
GAP = re.compile(r" {2,}")
BRACKETS = {"(": ")", "{": "}"}
CODE = re.compile(r"`([^`]*)`")
NOTE = re.compile(r"(?<=\S) {2,}(?=\(`)")  # what stands before the function that computes the line
BLOCK = re.compile(r"^```text\n(.*?)^```\n", re.MULTILINE | re.DOTALL)


def with_equations(markdown: str) -> str:
    """Return a document in which blocks of plain text are shown as equations."""
    return BLOCK.sub(lambda block: f"{as_html(block.group(1))}\n", markdown)


def as_html(block: str) -> str:
    """Return the lines of a block as rows: an equation, and which function computes it."""
    rows = []
    for line in block.splitlines():
        equation, *note = NOTE.split(line, 1)
        indent = len(equation) - len(equation.lstrip())
        shown = f'<span style="padding-left: {min(indent, 8) / 2:g}em">{_line(equation.strip())}</span>'
        rows.append(f'<div>{shown}<span class="where">{_line(note[0], mathematics=False) if note else ""}</span></div>')
    return f'<div class="equations">{"".join(rows)}</div>\n'


def _line(text: str, mathematics: bool = True) -> str:
    """Return a line in HTML, with names in backticks as code."""
    parts = CODE.split(text)  # what is between backticks has odd places
    shown = [
        f"<code>{html.escape(part)}</code>" if place % 2 else _formula(part) if mathematics else html.escape(part)
        for place, part in enumerate(parts)
    ]
    return "".join(shown)


def _formula(text: str) -> str:
    shown, place = "", 0
    while place < len(text):
        if text[place] in "_^" and shown:
            inner, end = _index(text, place + 1)
            tag = "sub" if text[place] == "_" else "sup"
            inside = f"<i>{inner}</i>" if len(inner) == 2 and inner.isalpha() else _formula(inner)  # two indices
            shown, place = shown + (f"<{tag}>{inside}</{tag}>" if inner else text[place]), end
        elif gap := GAP.match(text, place):
            shown, place = shown + "&emsp;", gap.end()
        elif sign := SIGN.match(text, place):
            shown, place = shown + SIGNS[sign.group()], sign.end()
        elif word := WORD.match(text, place):
            name = word.group()
            shown, place = shown + (LETTERS.get(name) or WORDS.get(name) or _name(name)), word.end()
        else:
            shown, place = shown + html.escape(text[place]), place + 1
    return shown


def _name(name: str) -> str:
    """Return a variable, which is one letter, in italics; words as they are."""
    return f"<i>{name}</i>" if len(name) == 1 else name


def _index(text: str, start: int) -> tuple[str, int]:
    """Return what is an index or a power from `start` on, without its brackets, and where it ends."""
    opening = text[start : start + 1]
    if opening not in BRACKETS:
        found = INDEX.match(text, start)
        return (found.group(), found.end()) if found else ("", start)
    depth = 0
    for end in range(start, len(text)):
        depth += (text[end] == opening) - (text[end] == BRACKETS[opening])
        if depth == 0:
            return text[start + 1 : end], end + 1
    return "", start
