import builtins

import pytest

from coterie.core.errors import DataError
from coterie.data.tables.reading import MISSING, canonical, number, read_table


def write(path, text, encoding="utf-8"):
    path.write_bytes(text.encode(encoding))
    return path


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_the_delimiter_is_found(tmp_path, delimiter):
    rows = [["id", "age", "town"], ["1", "40", "a b"], ["2", "?", ""], ["3", "NaN", "null"]]
    table = read_table(write(tmp_path / "a.csv", "\n".join(delimiter.join(row) for row in rows) + "\n"))
    assert table.columns == {"id": ["1", "2", "3"], "age": ["40", None, None], "town": ["a b", None, None]}
    assert table.lines == [2, 3, 4]


def test_quotes_blank_lines_and_a_byte_order_mark(tmp_path):
    path = write(tmp_path / "a.csv", '\ufeffname,age\r\n\r\n"Doe, ""J""\nx",40\r\nRoe, 41 \r\n')
    table = read_table(path)
    assert table.columns == {"name": ['Doe, "J"\nx', "Roe"], "age": ["40", "41"]}
    assert table.lines == [4, 5]


def test_decimal_commas_only_where_semicolons_part_the_cells(tmp_path):
    assert read_table(write(tmp_path / "a.csv", "a;b\n1,5;x,y\n")).columns == {"a": ["1.5"], "b": ["x,y"]}
    assert read_table(write(tmp_path / "b.csv", 'a,b\n"1,5",2\n')).columns["a"] == ["1,5"]


def test_files_without_a_header(tmp_path):
    path = write(tmp_path / "a.data", "1,?\n2,3\n")
    with pytest.raises(DataError, match=r"a\.data' line 1 has data instead of column names.*--columns"):
        read_table(path)
    table = read_table(path, columns=["a", "b"])
    assert table.columns == {"a": ["1", "2"], "b": [None, "3"]}
    assert table.lines == [1, 2]
    named = read_table(write(tmp_path / "b.data", "a,b\n1,2\n"), columns=["a", "b"])
    assert named.columns == {"a": ["1"], "b": ["2"]}


def test_own_marks_for_missing(tmp_path):
    path = write(tmp_path / "a.csv", "a,b\n-9,?\n,NONE\n")
    assert read_table(path, missing=["-9", "none"]).columns == {"a": [None, None], "b": ["?", None]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"a,b\n", "has no rows"),
        (b"a,b\n1,2\n1,2,3\n1\n", "line 3 has 3 cells, but the header has 2 columns, and 1 more lines"),
        (b"a,a\n1,2\n", "two columns are called 'a'"),
        (b"a,\n1,2\n", "column 2 has no name"),
        (b"name,b\n1,2\ncaf\xe9,3\n", r"line 3 is not UTF-8 \(byte 0xe9\): save the file as UTF-8"),
        (b"a,b\n1,\x002\n", "line 2 has a zero byte"),
    ],
)
def test_bad_files_are_named_with_the_line(tmp_path, content, words):
    (tmp_path / "bad.csv").write_bytes(content)
    with pytest.raises(DataError, match=rf"bad\.csv'.*{words}"):
        read_table(tmp_path / "bad.csv")


def test_no_such_file(tmp_path):
    with pytest.raises(DataError, match=r"there is no file .*a\.csv"):
        read_table(tmp_path / "a.csv")


def test_parquet_gives_the_same_cells(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    values = {"a": [0.1, None, 3.0], "b": ["x", "?", "y "], "c": [1, 2, None], "d": [True, False, None]}
    parquet.write_table(arrow.table(values), tmp_path / "a.parquet")
    table = read_table(tmp_path / "a.parquet")
    assert table.columns == {
        **{"a": ["0.1", None, "3.0"], "b": ["x", None, "y"]},
        **{"c": ["1", "2", None], "d": ["true", "false", None]},
    }
    parquet.write_table(arrow.table({"a": [[1, 2]]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match="column 'a' has list values"):
        read_table(tmp_path / "b.parquet")
    (tmp_path / "c.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-9])
    with pytest.raises(DataError, match=r"c\.parquet' cannot be read as Parquet"):
        read_table(tmp_path / "c.parquet")


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    real = builtins.__import__

    def missing(name, *rest):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *rest)

    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(DataError, match=r"pip install 'coterie\[parquet\]'"):
        read_table(tmp_path / "a.parquet")


def test_numbers_and_their_one_spelling():
    assert [number(cell) for cell in ("1.5", " 2", "1e3", "x", "1_0", "inf", "nan")] == [1.5, 2, 1000, *[None] * 4]
    assert [canonical(cell) for cell in ("1", "1.0", "01", "-0.50", "1e20", "b")] == [
        "1",
        "1",
        "1",
        "-0.5",
        "1e+20",
        "b",
    ]
    assert "" in MISSING
