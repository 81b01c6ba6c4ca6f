import numpy as np
import pytest
import torch

from coterie.core.errors import DataError
from coterie.experiment.take_home.input_files import class_names, read_examples, read_inputs

ABOUT = {"input_shape": [3], "kind": "classification", "num_classes": 2, "classes": ["well", "ill"]}


def written(tmp_path, text):
    path = tmp_path / "rows.csv"
    path.write_text(text)
    return path


def inputs(path, about=ABOUT):
    return read_inputs(path, path.parent / "nobody", about)


def test_columns_by_name_wherever_they_stand(tmp_path):
    found = inputs(written(tmp_path, "id,x3,x1,x2\na,3,1,2\nb,6,4,5\n"))
    assert torch.equal(found, torch.tensor([[1.0, 2, 3], [4, 5, 6]]))


def test_other_names_in_their_order(tmp_path):
    found = inputs(written(tmp_path, "\ufeffage,bp,chol\n1, 2,3e2\n"))
    assert torch.equal(found, torch.tensor([[1.0, 2, 300]]))


def test_images_may_be_flat(tmp_path):
    path = written(tmp_path, "a,b,c,d\n1,2,3,4\n")
    assert inputs(path, {**ABOUT, "input_shape": [1, 2, 2]}).tolist() == [[[[1, 2], [3, 4]]]]


def test_arrays(tmp_path):
    x = np.arange(6).reshape(2, 3)
    np.savez(tmp_path / "a.npz", x=x, y=np.array([0, 1]))
    np.save(tmp_path / "a.npy", x)
    for name in ("a.npz", "a.npy"):
        assert torch.equal(inputs(tmp_path / name), torch.from_numpy(x).float())
    x, y = read_examples(tmp_path / "a.npz", None, ABOUT)
    assert (len(x), y.tolist()) == (2, [0, 1])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b\n1,2\n", r"rows.csv' has 2 columns \(a, b\), but this model was trained on 3 inputs"),
        ("x1,x3,z\n1,2,3\n", "lacks the columns x2 of x1 to x3"),
        ("1,2,3\n4,5,6\n", "has no header: its first line should name the columns"),
        ("a,b,c\n", "has no rows"),
        ("", "has no rows"),
        ("a,b,a\n1,2,3\n", "more than one column called a"),
        ("a,b,c\n1,2,3\n4,5\n", "line 3 has 2 cells, but the header has 3 columns"),
        ("a,b,c\n1,2,3\n4,,5\n", "line 3, column 'b' is empty"),
        ("a,b,c\n1,two,3\n", "line 2, column 'b' holds 'two', not a finite number"),
        ("a,b,c\n1,nan,3\n", "column 'b' holds 'nan'"),
        ("a,b,c\n1,inf,3\n", "column 'b' holds 'inf'"),
    ],
)
def test_what_is_wrong_with_rows_is_told(tmp_path, text, words):
    with pytest.raises(DataError, match=words):
        inputs(written(tmp_path, text))


def test_what_is_wrong_with_arrays_is_told(tmp_path):
    cases = {
        "shape": (np.zeros((2, 4)), r"x is float64 \(2, 4\); this model takes numbers of shape \(rows, \*\(3,\)\)"),
        "nan": (np.array([[0, 0, 0], [0, np.nan, 0]]), "row 1 of x has a missing or infinite value"),
        "text": (np.array([["a", "b", "c"]]), "takes numbers"),
        "none": (np.zeros((0, 3)), "takes numbers"),
    }
    for name, (x, words) in cases.items():
        np.savez(tmp_path / f"{name}.npz", x=x)
        with pytest.raises(DataError, match=words):
            inputs(tmp_path / f"{name}.npz")
    np.savez(tmp_path / "z.npz", z=np.zeros((2, 3)))
    with pytest.raises(DataError, match="has no array 'x'; it has z"):
        inputs(tmp_path / "z.npz")
    np.save(tmp_path / "pickled.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match=r"pickled.npy' cannot be read"):
        inputs(tmp_path / "pickled.npy")
    (tmp_path / "broken.npz").write_bytes(b"PK nothing")
    with pytest.raises(DataError, match=r"broken.npz' cannot be read"):
        inputs(tmp_path / "broken.npz")
    for missing in ("no.csv", "no.npz"):
        with pytest.raises(DataError, match="there is no file"):
            inputs(tmp_path / missing)


def test_the_target_by_name_number_or_place(tmp_path):
    path = written(tmp_path, "state,a,b,c\nill,1,2,3\n0,4,5,6\n")
    x, y = read_examples(path, "state", ABOUT)
    assert torch.equal(x, torch.tensor([[1.0, 2, 3], [4, 5, 6]]))
    assert y.tolist() == [1, 0]
    assert read_examples(written(tmp_path, "y,a,b,c\n1,1,2,3\n"), None, ABOUT)[1].tolist() == [1]
    assert read_examples(written(tmp_path, "a,b,c,state\n1,2,3,well\n"), None, ABOUT)[1].tolist() == [0]
    regression = {**ABOUT, "kind": "regression", "num_classes": None, "classes": None}
    assert read_examples(path.parent / "rows.csv", None, {**regression, "input_shape": [3]} | {"classes": ["well"]})
    assert class_names(regression) == []
    assert class_names({**ABOUT, "classes": None}) == ["0", "1"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x1,x2,x3\n1,2,3\n", "has inputs only: name the column to predict with --target, or call it y"),
        ("a,b,c,y\n1,2,3,2\n", "row 1 has class 2; classes are numbered 0 to 1"),
        ("a,b,c,y\n1,2,3,0.5\n", "the classes are well, ill, or their numbers from 0"),
        ("a,b,c,y\n1,2,3,sick\n", r"column 'y' holds 'sick', not a finite number \(or one of well, ill\)"),
    ],
)
def test_what_is_wrong_with_targets_is_told(tmp_path, text, words):
    with pytest.raises(DataError, match=words):
        read_examples(written(tmp_path, text), None, ABOUT)


def test_more_that_is_wrong_with_targets(tmp_path):
    with pytest.raises(DataError, match=r"has no column 'z' \(the target\); it has a, b, c, y"):
        read_examples(written(tmp_path, "a,b,c,y\n1,2,3,1\n"), "z", ABOUT)
    np.savez(tmp_path / "a.npz", x=np.zeros((2, 3)), y=np.zeros(3, int))
    with pytest.raises(DataError, match="2 rows of x, but 3 of y"):
        read_examples(tmp_path / "a.npz", None, ABOUT)
    np.save(tmp_path / "a.npy", np.zeros((2, 3)))
    with pytest.raises(DataError, match="holds inputs only"):
        read_examples(tmp_path / "a.npy", None, ABOUT)
