"""What a target is read from: a column, or a comparison such as `num>0`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from coterie.data.tables.reading import canonical, number

_COMPARISON = re.compile(r"(.+?)\s*(>=|<=|==|!=|>|<)\s*(.+)")
_OPPOSITE = {">": "<=", ">=": "<", "<": ">=", "<=": ">", "==": "!=", "!=": "=="}


@dataclass(frozen=True)
class Source:
    """What to predict: a column, or a comparison such as `num>0`, which is true or false."""

    column: str
    sign: str = ""
    value: str = ""

    def classes(self) -> tuple[str, str]:
        """Return the names of the two classes of a comparison, (false, true)."""
        return f"{self.column}{_OPPOSITE[self.sign]}{self.value}", f"{self.column}{self.sign}{self.value}"

    def holds(self, cell: str) -> bool | None:
        """Return whether the comparison is true of a cell; None if the cell cannot be compared."""
        if self.sign in ("==", "!="):
            return (canonical(cell) == canonical(self.value)) == (self.sign == "==")
        left, right = number(cell), number(self.value)
        if left is None or right is None:
            return None
        return {">": left > right, ">=": left >= right, "<": left < right, "<=": left <= right}[self.sign]


def parse_target(text: str, columns: Sequence[str] = ()) -> Source:
    """Parse the name of a column (which may contain a sign, if there is such a column) or a comparison."""
    match = _COMPARISON.fullmatch(text.strip())
    if text in columns or not match:
        return Source(text)
    return Source(match[1], match[2], match[3].strip("'\""))
