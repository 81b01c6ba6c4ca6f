import json

import numpy as np
import pytest
import torch

from coterie.core.errors import DataError
from coterie.data.tables.preprocessing import apply_preprocessing, find_misfits, fit, targets
from coterie.data.tables.schema import Column, Schema
from tests.data.tables.test_schema import table

SCHEMA = Schema("y", "classification", (Column("age", "number"), Column("sex", "category", ("f", "m"))), ("no", "yes"))


def own(**changes):
    columns = {"age": ["10", "20", None, "60", "1000"], "sex": ["m", "m", "f", None, "f"], "y": ["no"] * 4 + ["yes"]}
    return table(**{**columns, **changes})


def test_the_closed_form_of_training_rows_only():
    record = fit(SCHEMA, own(), [0, 1, 2, 3])
    imputed = np.array([10, 20, 20, 60.0])  # the median of 10, 20, 60 is 20
    assert record["columns"]["age"] == {
        **{"kind": "number", "missing": 1, "median": 20.0},
        **{"mean": imputed.mean(), "std": imputed.std()},
    }
    assert record["columns"]["sex"]["mode"] == "m"
    x = apply_preprocessing(own(), record)
    assert x.dtype == torch.float32
    expected = (np.array([10, 20, 20, 60, 1000]) - imputed.mean()) / imputed.std()
    np.testing.assert_allclose(x[:, 0], expected, rtol=1e-6)
    assert x[:, 1:].tolist() == [[0, 1], [0, 1], [1, 0], [0, 1], [1, 0]]
    assert record["features"] == ["age", "sex=f", "sex=m"]


def test_nothing_is_lost_in_json():
    record = fit(SCHEMA, own(age=["0.1", "0.7", None, "1e-3", "3.3333"]), [0, 1, 2])
    back = json.loads(json.dumps(record))
    assert back == record
    assert torch.equal(apply_preprocessing(own(), record), apply_preprocessing(own(), back))


def test_a_column_never_filled_in_and_one_that_never_changes():
    empty = own(age=[None] * 5, sex=[None] * 5)
    assert apply_preprocessing(empty, fit(SCHEMA, empty, [0, 1, 2])).abs().sum() == 0
    same = own(age=["7"] * 5)
    assert apply_preprocessing(same, fit(SCHEMA, same, [0, 1, 2]))[:, 0].abs().sum() == 0


def test_targets():
    assert targets(SCHEMA, own(y=["no", None, "yes", "no", "no"])) == [0, None, 1, 0, 0]
    above = Schema("y>1", "classification", SCHEMA.columns, ("low", "high"))
    assert targets(above, own(y=["1", "2", None, "0", "3"])) == [0, 1, None, 0, 1]
    number = Schema("y", "regression", SCHEMA.columns)
    assert targets(number, own(y=["1.5", "2", None, "0", "3"])) == [1.5, 2, None, 0, 3]


def test_each_misfit_is_told_with_column_line_and_why():
    bad = own(age=["10", "old", "x", "y", "z"], sex=["m", "w", "f", "f", "f"], y=["no", "maybe", "yes", "no", "no"])
    assert find_misfits(SCHEMA, bad) == [
        "'a.csv' column 'age', line 3 ('old'), line 4 ('x'), line 5 ('y') and 1 more: the schema says number",
        "'a.csv' column 'sex', line 3 ('w'): the schema allows f, m",
        "'a.csv' column 'y', line 3 ('maybe'): the schema's classes are no, yes",
    ]
    assert find_misfits(SCHEMA, table(sex=["m"], y=["no"])) == ["'a.csv' has no column 'age'; it has sex, y"]
    assert find_misfits(SCHEMA, table(sex=["m"], age=["1"])) == [
        "'a.csv' has no column 'y', the target; it has sex, age"
    ]
    assert find_misfits(SCHEMA, table(sex=["m"], age=["1"]), target=False) == []
    assert find_misfits(Schema("y", "regression", SCHEMA.columns), own(y=["1", "2", "3", "4", "b"]))[0].endswith(
        "line 6 ('b'): the target must be a number"
    )
    assert (
        "cannot be compared as y>1 says"
        in find_misfits(Schema("y>1", "classification", SCHEMA.columns, ("a", "b")), own())[0]
    )


def test_new_files_must_fit_too():
    record = fit(SCHEMA, own(), [0, 1, 2])
    with pytest.raises(DataError, match=r"column 'age', line 2 \('abc'\): the schema says number"):
        apply_preprocessing(table(age=["abc"], sex=["m"]), record)
    with pytest.raises(DataError, match=r"a\.csv' line 2, column 'age': the number is too large"):
        apply_preprocessing(table(age=["1e300"], sex=["m"]), record)
