"""What is kept of a measured table: enough to print it again without any run.

`docs/reproduce.json` holds this for every table and size that was measured, and the page is made of it. The results
that it was measured from go beside it, as far as tables need them (`shipped.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from coterie.experiment.reproduce.cache import Cache
from coterie.experiment.reproduce.identity import Record
from coterie.experiment.reproduce.papers import TABLES
from coterie.experiment.reproduce.running import Request
from coterie.experiment.reproduce.scores import Pair, Row, pairs_of, row_of
from coterie.experiment.reproduce.shipped import slim
from coterie.experiment.reproduce.tables import Size


@dataclass(frozen=True)
class Measured:
    """Hold a table as it was measured.

    Attributes:
        name: the table.
        size: at which size.
        rows: what was measured of each row; rows without any result are missing.
        pairs: every two rows compared.
        dates: the first and the last day of a result.
        rounds: of its runs, if fewer than the table has were asked for.
    """

    name: str
    size: Size
    rows: dict[str, Row]
    pairs: list[Pair]
    dates: tuple[str, str]
    rounds: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the same as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Measured:
        """Return what `to_json` wrote."""
        rows = {label: Row(**row) for label, row in value["rows"].items()}
        pairs = [Pair(**{**pair, "sd": float("nan") if pair["sd"] is None else pair["sd"]}) for pair in value["pairs"]]
        first, last = value["dates"]
        return cls(value["name"], value["size"], rows, pairs, (first, last), value["rounds"])


def measure(name: str, request: Request, cache: Cache) -> Measured | None:
    """Return what is in the cache of a table; None if there is nothing."""
    table = request.table
    records = {entry.label: request.records(entry, cache) for entry in table.entries}
    there = [entry for entry in table.entries if records[entry.label]]
    if not there:
        return None
    dates = sorted(record["date"] for found in records.values() for record in found.values())
    rows = {entry.label: row_of(entry, table.protocol, records[entry.label]) for entry in there}
    return Measured(name, request.size, rows, pairs_of(table, records), (dates[0], dates[-1]), request.rounds)


def to_ship(cache: Cache) -> list[Record]:
    """Return the results of all tables that are there, as they are shipped; none of them twice."""
    found: dict[str, Record] = {}
    requests = [Request(table, size) for table in TABLES.values() for size in table.sizes()]
    for request, entry in [(each, entry) for each in requests for entry in each.table.entries]:
        for wanted in request.wanted(entry).values():
            whole = cache.find(wanted, whole=True)
            record = cache.shipped.find(wanted) if whole is None else slim(whole, wanted.config)
            if record is not None:
                found[wanted.config] = record
    return list(found.values())
