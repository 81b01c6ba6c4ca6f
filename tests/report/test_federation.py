import re

import numpy as np
import pytest
import torch

from coterie.data import from_clients
from coterie.report.federation import histogram, page, summary
from coterie.report.page import render


def federation(sizes=(10, 20, 12)):
    clients = {f"<site> {i}": (torch.zeros(n, 2), torch.arange(n) % (i + 1)) for i, n in enumerate(sizes)}
    return from_clients(clients, num_classes=3)


def test_the_page_has_the_figures_and_the_distances():
    made = page("a/b", "about", federation())
    assert [picture.name for picture in made.pictures] == ["labels", "sizes", "size-histogram"]
    bubbles, bars, spread = (picture.figure.data[0] for picture in made.pictures)
    # Client 0 has class 0 only, client 1 two, client 2 three: six bubbles, as large as what they stand for.
    assert sorted(zip(bubbles["x"], bubbles["y"], bubbles["marker"]["size"], strict=True)) == [
        *[(0, 0, 10), (1, 0, 10), (1, 1, 10), (2, 0, 4), (2, 1, 4), (2, 2, 4)]
    ]
    assert list(bars["y"]) == [10, 20, 12]
    assert sum(spread["y"]) == 3
    assert {what for what, *_ in made.tiles} >= {"label distance between two clients", "label distance to all clients"}


def test_the_page_needs_nothing_else_and_names_are_not_mark_up():
    text = render(page("a/b", "about", federation()))
    body = re.sub(r'<script type="text/plain" id="library">.*?</script>', "", text, flags=re.DOTALL)
    assert not re.search(r'(src|href)\s*=\s*"(https?:)?//', body)
    assert "<site>" not in body
    assert "&lt;site&gt; 0" in body


def test_the_summary_in_words():
    lines = summary(federation())
    assert lines[0] == "examples: 42, 10 to 20 per client (median 12)"
    assert lines[1] == "classes: 3, 1 to 3 per client (median 2)"
    # TV of (1,0,0), (1/2,1/2,0), (1/3,1/3,1/3): 1/2, 2/3, 1/3.
    assert lines[2] == "label distance between two clients: mean 0.500, minimum 0.333, maximum 0.667"


def test_a_regression_and_a_single_client_are_told():
    lines = summary(from_clients([(torch.zeros(9, 2), torch.zeros(9))]))
    assert "regression" in lines[-1]
    made = page("a", "", from_clients([(torch.zeros(9, 2), torch.zeros(9))]))
    assert [picture.name for picture in made.pictures] == ["sizes", "size-histogram"]
    assert not any("between two clients" in line for line in summary(federation((10,))))
    assert render(page("a", "", federation((10,))))


@pytest.mark.parametrize("totals", [[5], [5, 5, 5], [1, 2, 3, 1000], list(range(1, 400))])
def test_every_client_is_in_the_histogram(totals):
    assert sum(histogram(np.array(totals)).data[0]["y"]) == len(totals)
