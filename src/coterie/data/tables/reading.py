"""Reads tables from CSV and Parquet files: named columns of text cells, in which a missing value is None.

A schema decides what a cell means (a number, a category), so that an error can name the file, line and column of a
wrong cell. Numbers from Parquet become text too, with enough digits to be restored exactly.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.core.errors import DataError

Cells = list[str | None]

MISSING = ("", "?", "NA", "NaN", "null")
MAX_CELLS = 10**8  # of a Parquet file, which can be much smaller than what it holds
DELIMITERS = ",;\t"
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")


@dataclass(frozen=True)
class Table:
    """A table as text; `lines` remembers where each row is in the file."""

    file: str  # for messages
    columns: dict[str, Cells]
    lines: list[int]  # line number of each row in the file, from 1

    def __len__(self) -> int:
        return len(self.lines)

    def take(self, rows: Sequence[int]) -> Table:
        """Return a table of some rows."""
        return Table(
            self.file,
            {name: [cells[row] for row in rows] for name, cells in self.columns.items()},
            [self.lines[row] for row in rows],
        )


def read_table(path: str | Path, *, columns: Sequence[str] = (), missing: Sequence[str] = MISSING) -> Table:
    """Read a CSV file (comma, semicolon or tab; UTF-8) or, if its name ends in .parquet or .pq, a Parquet file.

    Args:
        path: The file.
        columns: The column names, if the file has no header.
        missing: Cells that mean a missing value, in upper or lower case; empty cells always do.

    Raises:
        DataError: The file is missing, empty or malformed; the message names file and line.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"there is no file '{path}'")
    read = _read_parquet if path.suffix.lower() in (".parquet", ".pq") else _read_csv
    header, rows, lines = read(path, list(columns))
    if not rows:
        raise DataError(f"'{path}' has no rows")
    absent = {"", *(marker.strip().lower() for marker in missing)}
    cleaned = [[None if cell is None or cell.lower() in absent else cell for cell in row] for row in rows]
    return Table(str(path), {name: list(cells) for name, *cells in zip(header, *cleaned, strict=True)}, lines)


def number(cell: str) -> float | None:
    """Parse a finite number; return None if the cell is something else."""
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if math.isfinite(value) and "_" not in cell else None


def canonical(cell: str) -> str:
    """Return one spelling for a category or class: 1, 1.0 and 01 are the same."""
    value = number(cell)
    if value is None:
        return cell
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(value)


def short(cell: str) -> str:
    """Shorten a cell for messages."""
    return cell if len(cell) <= 30 else cell[:27] + "..."


def _read_csv(path: Path, columns: list[str]) -> tuple[list[str], list[Cells], list[int]]:
    text = _text(path)
    delimiter = _sniff(text)
    rows: list[Cells] = []
    lines: list[int] = []
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True)
    try:
        for row in reader:
            if any(cell.strip() for cell in row):
                rows.append([cell.strip() for cell in row])
                lines.append(reader.line_num)
    except csv.Error as error:
        raise DataError(f"'{path}' line {reader.line_num}: {error}") from error
    if not rows:
        raise DataError(f"'{path}' is empty")
    first = [cell or "" for cell in rows[0]]
    if not columns or first == columns:
        header, rows, lines = first, rows[1:], lines[1:]
        _check_header(path, header)
    else:
        header = columns
    uneven = [(line, len(row)) for line, row in zip(lines, rows, strict=True) if len(row) != len(header)]
    if uneven:
        line, width = uneven[0]
        more = f", and {len(uneven) - 1} more lines" if len(uneven) > 1 else ""
        named = "--columns gives" if columns else "the header has"
        raise DataError(f"'{path}' line {line} has {width} cells, but {named} {len(header)} columns{more}")
    if delimiter == ";":  # then a comma inside a number is a decimal point
        rows = [[c.replace(",", ".") if c and _DECIMAL_COMMA.fullmatch(c) else c for c in row] for row in rows]
    return header, rows, lines


def _text(path: Path) -> str:
    try:
        content = path.read_bytes()
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"'{path}' cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        wrong = content[error.start]
        raise DataError(f"'{path}' line {line} is not UTF-8 (byte 0x{wrong:02x}): save the file as UTF-8") from None
    if "\0" in text:
        line = text[: text.index("\0")].count("\n") + 1
        raise DataError(f"'{path}' line {line} has a zero byte: this is not a CSV file")
    return text


def _sniff(text: str) -> str:
    """Return the delimiter that splits the first lines into the most cells, all equally many; else a comma."""
    sample = [line for line in text[:65536].splitlines()[:21] if line.strip()]
    sample = sample[:-1] if len(sample) > 20 or (len(text) > 65536 and len(sample) > 1) else sample  # may be cut short

    def score(delimiter: str) -> tuple[bool, int]:
        widths = [len(row) for row in csv.reader(sample, delimiter=delimiter, skipinitialspace=True)]
        return min(widths) == max(widths) > 1, max(widths)

    return max(DELIMITERS, key=score) if sample else ","


def _check_header(path: Path, header: list[str]) -> None:
    if all(number(cell) is not None or cell.lower() in {m.lower() for m in MISSING} for cell in header):
        raise DataError(
            f"'{path}' line 1 has data instead of column names: give the names, in order, with --columns a,b,c"
        )
    for place, name in enumerate(header, 1):
        if not name:
            raise DataError(f"'{path}' line 1: column {place} has no name")
        if name in header[: place - 1]:
            raise DataError(f"'{path}' line 1: two columns are called '{name}'")


def _read_parquet(path: Path, columns: list[str]) -> tuple[list[str], list[Cells], list[int]]:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise DataError(f"'{path}': Parquet files need pyarrow: pip install 'coterie[parquet]'") from None
    try:
        file = parquet.ParquetFile(path)
        claimed = file.metadata.num_rows * file.metadata.num_columns
        if claimed > MAX_CELLS:
            raise DataError(f"'{path}' claims {claimed:,} cells, but at most {MAX_CELLS:,} are read as a table")
        found = file.read()
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"'{path}' cannot be read as Parquet: {error}") from error
    header = list(map(str, found.column_names))
    if columns and columns != header:
        raise DataError(f"'{path}' already has column names: {', '.join(header)}; leave out --columns")
    cells = [[_cell(path, name, value) for value in found.column(i).to_pylist()] for i, name in enumerate(header)]
    rows: list[Cells] = [list(row) for row in zip(*cells, strict=True)]
    return header, rows, list(range(1, len(rows) + 1))


def _cell(path: Path, column: str, value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value if value is None else value.strip()
    if isinstance(value, bytes | list | dict):
        raise DataError(f"'{path}' column '{column}' has {type(value).__name__} values: cells must be numbers or text")
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, float) else str(value)
