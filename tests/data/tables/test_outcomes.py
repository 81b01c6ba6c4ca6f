"""Tables with several labels, ordered levels, times and events, and several targets."""

import numpy as np
import pytest
import torch

from coterie.core.errors import ConfigError, DataError
from coterie.core.targets import Classes, Cox, Labels, Numbers, Ordered, Part, Several, Survival
from coterie.data.tables.schema import read_schema
from coterie.data.tables.silos import Silos, agree_on_schema, load_silos

HEADER = "age,died,icu,days,los,grade"


def write(folder, rows=30, **changed):
    files = []
    for site in ("a", "b"):
        draw = np.random.default_rng(ord(site))
        lines = []
        for i in range(rows):
            cells = {
                "age": f"{draw.normal(60, 9):.1f}",
                "died": "no" if i % 3 else "yes",
                "icu": str(i % 2),
                "days": f"{draw.exponential(20):.2f}",
                "los": f"{draw.normal(5, 2):.2f}",
                "grade": ("low", "mid", "high")[i % 3],
            }
            cells |= {key: value(i) for key, value in changed.items() if value(i) is not None}
            lines.append(",".join(cells.values()))
        path = folder / f"{site}.csv"
        path.write_text("\n".join([HEADER, *lines]) + "\n")
        files.append(str(path))
    return tuple(files)


def gap(every):
    return lambda i: "" if i % every == 0 else None


@pytest.mark.filterwarnings("ignore:.*are ignored")
def test_labels_are_columns_or_comparisons_and_may_be_missing(tmp_path):
    files = write(tmp_path, icu=gap(5), died=gap(10))  # row 0, 10, 20 have neither; `days` is there always
    made = load_silos(Silos(files, target="died,icu", task="multilabel", drop=("grade", "days", "los")))
    assert made.declared == Labels(("died", "icu"))
    assert made.num_classes is None
    assert made.y.shape == (2 * 27, 2), "rows without any label are left out"
    assert int(made.y[:, 1].isnan().sum()) == 2 * 3
    assert made.y[:, 0].unique().tolist() == [0, 1]
    other = load_silos(Silos(files, target="days>20,icu", task="multilabel", drop=("grade", "died", "los")))
    assert other.declared.names == ("days>20", "icu")
    assert list(made.preprocessing["a"]["columns"]) == ["age"]


@pytest.mark.filterwarnings("ignore:.*are ignored")
def test_a_time_and_its_event_with_given_or_usual_times(tmp_path):
    files = write(tmp_path, died=lambda i: str(int(i % 3 == 0)), days=gap(6))
    silos = {"target": "days,died", "drop": ("grade", "icu", "los")}
    made = load_silos(Silos(files, task="survival", horizons=(5.0, 20.0), **silos))
    assert made.declared == Survival((5.0, 20.0))
    assert made.y.shape == (2 * 25, 2), "rows without a time are left out"
    assert not made.y.isnan().any()
    usual = load_silos(Silos(files, task="survival", **silos)).declared
    assert 2 <= len(usual.times) <= 10
    assert load_silos(Silos(files, task="cox", **silos)).declared == Cox()


def test_levels_need_an_order_that_is_numbers_or_said(tmp_path):
    files = write(tmp_path)
    silos = {"target": "grade", "task": "ordinal", "drop": ("days", "died", "icu", "los")}
    with pytest.raises(DataError, match="say their order with --levels"):
        load_silos(Silos(files, **silos))
    with pytest.raises(DataError, match="not among the levels: high"):
        load_silos(Silos(files, levels=("low", "mid"), **silos))
    made = load_silos(Silos(files, levels=("low", "mid", "high", "extreme"), **silos))
    assert (made.declared, made.num_classes, made.classes[0]) == (Ordered(4), 4, "low")
    assert made.y.dtype == torch.int64


def test_several_targets_of_different_kinds_with_weights(tmp_path):
    files = write(tmp_path, died=lambda i: str(int(i % 3 == 0)), los=gap(4), icu=gap(5))
    text = "icu,los:regression:0.1,days+died:survival,grade:ordinal:2"
    silos = Silos(files, target=text, task="multitask", levels=("low", "mid", "high"), horizons=(10.0, 30.0))
    made = load_silos(silos)
    assert made.declared == Several(
        (
            Part("icu", Classes(2), classes=("0", "1")),
            Part("los", Numbers(()), 0.1),
            Part("days+died", Survival((10.0, 30.0))),
            Part("grade", Ordered(3), 2.0, ("low", "mid", "high")),
        )
    )
    assert made.y.shape == (60, 5)
    assert int(made.y[:, 1].isnan().sum()) == 2 * 8
    schema, _ = agree_on_schema(silos)
    (tmp_path / "schema.toml").write_text(schema.to_toml())
    assert read_schema(tmp_path / "schema.toml") == schema
    again = load_silos(Silos(files, schema=str(tmp_path / "schema.toml")))
    assert again.declared == made.declared
    torch.testing.assert_close(again.y, made.y, equal_nan=True)


@pytest.mark.parametrize(
    ("target", "task", "words"),
    [
        ("died", "survival", "needs a time and an event"),
        ("days,died", "survival", "must be one of 0, 1"),  # yes and no
        ("age,icu", "multilabel", "as 0 or 1"),
        ("died,nothing", "multilabel", "no file has a column 'nothing'"),
        ("died,died", "multilabel", "named twice"),
        ("died:magic", "multitask", "with a kind of"),
        ("los:regression:much", "multitask", "with a kind of"),
        ("los:regression:0", "multitask", "above 0"),
        ("los+icu:survival", "multitask", None),
    ],
)
def test_targets_that_do_not_fit_are_refused_with_the_reason(tmp_path, target, task, words):
    files = write(tmp_path, los=(lambda i: "-1") if words is None else (lambda i: None))
    with pytest.raises((DataError, ConfigError), match=words or "a time must be a number from 0"):
        load_silos(Silos(files, target=target, task=task))


def test_a_schema_with_outcomes_that_make_no_sense_is_refused_with_all_problems(tmp_path):
    path = tmp_path / "schema.toml"
    path.write_text(
        'target = "a,b"\nkind = "multilabel"\n[[outcomes]]\nname = "a"\nkind = "magic"\ncolumns = ["a"]\n'
        '[[outcomes]]\nname = "b"\nkind = "classification"\ncolumns = ["b"]\nclasses = ["x"]\nweight = -1\n'
        '[[columns]]\nname = "age"\nkind = "number"\n'
    )
    with pytest.raises(DataError) as error:
        read_schema(path)
    for words in ("kind = 'magic'", "at least two are needed", "weight = -1"):
        assert words in str(error.value)
