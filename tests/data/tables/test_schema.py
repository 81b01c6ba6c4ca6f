import tomllib

import pytest

from coterie.core.errors import CoterieWarning, DataError
from coterie.data.tables.infer import infer
from coterie.data.tables.reading import Table
from coterie.data.tables.schema import Column, Schema, parse_target, read_schema, schema_from_dict


def table(file="a.csv", **columns):
    size = len(next(iter(columns.values())))
    return Table(file, {name: list(cells) for name, cells in columns.items()}, list(range(2, size + 2)))


def test_kinds_are_inferred_over_all_files():
    one = table(age=["40", None, "51"], sex=["m", "f", "m"], code=["1", "2", "1.0"], y=["0", "1", "0"])
    two = table("b.csv", age=["1", "2.5", "3"], sex=["f", "x", None], code=["1", "2", "3"], y=["2", "1.0", "0"])
    schema = infer([one, two], "y")
    assert schema.columns == (
        Column("age", "number"),
        Column("sex", "category", ("f", "m", "x")),
        Column("code", "number"),
    )
    assert (schema.kind, schema.classes) == ("classification", ("0", "1", "2"))
    assert schema.features == ("age", "sex=f", "sex=m", "sex=x", "code")
    assert schema.describe() == ["target y: 3 classes (0, 1, 2)", "numbers: age, code", "categories: sex"]


def test_all_problems_are_told_at_once():
    many = [str(i) for i in range(30)]
    one = table(name=[f"patient {i}" for i in range(30)], chol=["abc", *many[1:]], only_here=many, y=["0", "1"] * 15)
    two = table("b.csv", name=many, chol=many, y=["0", "1"] * 15)
    with pytest.raises(DataError) as told:
        infer([one, two], "y", excluded=["id"])
    words = str(told.value)
    assert "column 'chol' has numbers, except in 1 of 60 cells, the first in 'a.csv' line 2: 'abc'" in words
    assert "column 'only_here' is not in 'b.csv'" in words
    assert "no file has a column 'id'; there are name, chol, only_here, y" in words
    assert "--drop only_here" in words
    with pytest.raises(DataError, match=r"column 'name' is text \(30 different values in 30 cells.*--drop name"):
        infer([one], "y", excluded=["chol", "only_here"])


def test_targets():
    x = [str(i) for i in range(60)]
    values = [str(i / 7) for i in range(60)]
    assert infer([table(x=values, y=values)], "y").kind == "regression"
    assert infer([table(x=values, y=values)], "y", regression=False).kind == "classification"
    assert infer([table(x=x[:3], y=["2", "10", "1"])], "y").classes == ("1", "2", "10")
    assert infer([table(x=x[:3], y=["2", "10", "1"])], "y", regression=True).kind == "regression"
    assert infer([table(x=x[:3], y=["2", "10", "1"])], "y > 1").classes == ("y<=1", "y>1")
    with pytest.raises(DataError, match=r"60 different values \(whole numbers\): add --regression"):
        infer([table(x=x, y=x)], "y")
    with pytest.raises(DataError, match=r"'y' is 3 in every row: a classification needs two classes"):
        infer([table(x=x[:3], y=["3", "3.0", "3"])], "y")
    with pytest.raises(DataError, match=r"must be a number, but 'a\.csv' line 3 has 'b'"):
        infer([table(x=x[:2], y=["3", "b"])], "y", regression=True)
    with pytest.raises(DataError, match="true or false, so it cannot be a regression"):
        infer([table(x=x[:2], y=["3", "4"])], "y>3", regression=True)
    with pytest.raises(DataError, match="there are no inputs left"):
        infer([table(x=x[:2], y=["3", "4"])], "y", excluded=["x"])


def test_an_identifier_that_is_an_input_is_told():
    number = [str(i) for i in range(40)]
    with pytest.warns(CoterieWarning, match="column 'id' looks like an identifier.*--drop id"):
        infer([table(id=number, y=["0", "1"] * 20)], "y")
    infer([table(id=number, z=["1.5", *number[1:]], y=["0", "1"] * 20)], "y", excluded=["id"])  # neither is one


@pytest.mark.parametrize(
    ("target", "cell", "holds"),
    [("n>0", "1", True), ("n>0", "0.0", False), ("n >= 2", "2", True), ("n<2", "2", False), ("n<=2", "2", True),
     ("n==a", "a", True), ("n == 'a'", "b", False), ("n!=1", "1.0", False), ("n>0", "a", None)],
)  # fmt: skip
def test_comparisons(target, cell, holds):
    assert parse_target(target).holds(cell) is holds


def test_a_column_with_a_sign_in_its_name_is_a_column():
    assert parse_target("bp>140", ["bp>140"]).sign == ""
    assert parse_target("bp>140", ["bp"]).column == "bp"


def test_a_schema_survives_its_file(tmp_path):
    schema = Schema(
        'say "y"\\n', "classification", (Column("ä", "category", ("1", 'x"y')), Column("b", "number")), ("0", "é\x7f")
    )
    (tmp_path / "schema.toml").write_text(schema.to_toml(), encoding="utf-8")
    assert read_schema(tmp_path / "schema.toml") == schema
    assert schema_from_dict(schema.to_dict(), "here") == schema
    assert tomllib.loads(schema.to_toml())["format"] == 1


def test_everything_wrong_with_a_schema_is_told(tmp_path):
    path = tmp_path / "s.toml"
    path.write_text('kind = "x"\nclasses = [1]\nfoo = 1\n[[columns]]\nname = "a"\nkind = "text"\n[[columns]]\n')
    with pytest.raises(DataError) as told:
        read_schema(path)
    for words in ("no key 'foo'", "target: give", "kind = 'x'", "classes: give a list", "column 'a': kind = 'text'"):
        assert words in str(told.value)
    assert "column 2 has no name" in str(told.value)
    assert str(told.value).count("s.toml") == 6
    with pytest.raises(DataError, match="'coterie data schema' writes one"):
        read_schema(tmp_path / "none.toml")
    path.write_text("a = = 1")
    with pytest.raises(DataError, match="cannot be read as TOML"):
        read_schema(path)
