"""The tables of the five papers, one file a paper; all of them by name in `TABLES`."""

from __future__ import annotations

from coterie.experiment.reproduce.papers import fedamp, federico, fedmap, pfedbred, pfedvmp
from coterie.experiment.reproduce.tables import Table

TABLES: dict[str, Table] = {
    **fedmap.TABLES,
    **fedamp.TABLES,
    **pfedvmp.TABLES,
    **federico.TABLES,
    **pfedbred.TABLES,
}
