import plotly.graph_objects as go
import pytest

from coterie.report.figure import Figure, merge
from coterie.report.style import figure


def test_a_figure_is_what_plotly_would_make_of_it():
    made = figure(height=300, showlegend=False)
    made.add("scatter", x=[0, 1], y=[1, 2], mode="lines")
    made.add_annotation(x=0, y=1, text="here")
    made.add_hline(y=1.5, line={"dash": "dot"})
    made.add_vline(x=0.5, line={"width": 2})
    made.update_xaxes(title={"text": "round"}, showgrid=False)
    theirs = go.Figure(vars(figure(height=300, showlegend=False)))
    theirs.add_scatter(x=[0, 1], y=[1, 2], mode="lines")
    theirs.add_annotation(x=0, y=1, text="here")
    theirs.add_hline(y=1.5, line={"dash": "dot"})
    theirs.add_vline(x=0.5, line={"width": 2})
    theirs.update_xaxes(title_text="round", showgrid=False)
    expected = theirs.to_plotly_json()
    expected["layout"].pop("template", None)
    assert {"data": [dict(trace) for trace in expected["data"]], "layout": expected["layout"]} == vars(made)


def test_axes_of_two_figures_share_nothing():
    one, other = figure(), figure()
    one.update_xaxes(title={"text": "round"})
    assert "text" not in one.layout["yaxis"]["title"]
    assert "text" not in other.layout["xaxis"]["title"]
    assert one.layout["xaxis"]["title"]["standoff"] == 8


def test_plotly_finds_a_property_that_does_not_exist():
    """So a test that asks it about a whole page can fail."""
    made = Figure()
    made.add("bar", colour="red")
    with pytest.raises(ValueError, match="colour"):
        go.Figure(vars(made))


def test_merging_changes_what_is_named_at_every_depth():
    into = {"a": {"b": 1, "c": 2}, "d": 3}
    merge(into, {"a": {"b": {"e": 4}}, "d": 5})
    assert into == {"a": {"b": {"e": 4}, "c": 2}, "d": 5}
