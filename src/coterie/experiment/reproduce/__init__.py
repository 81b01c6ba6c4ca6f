"""Reproduce the tables and figures of the five papers: their numbers and the measured ones side by side.

tables.py     what a table is, and how its numbers are measured
papers/       the tables themselves, one file a paper
identity.py   what decides a result
cache.py      results, kept by that
shipped.py    those that come with the library
running.py    runs what is missing, seeds in lockstep, within a budget of time
scores.py     from results to rows, and tests between rows
measured.py   what is kept of measured tables beside the documentation
markdown.py   a table as Markdown
page.py       docs/reproduce.md, from measured.py's file and the explanations beside it
figures/      the papers' figures, as SVG
"""
