"""`--profile`: prints where the time was spent."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from coterie.cli.console import say, show
from coterie.profiling import MEANING, Profile


def print_profile(console: Console, profile: Profile) -> None:
    """Print the table and the share of time that went into training and evaluation."""
    show(console, profile_table(profile))
    say(console, f"Local training and evaluation take {100 * profile.share_of_work():.0f} % of the time of the rounds.")


def profile_table(profile: Profile) -> Table:
    """Return one row per activity. Time is counted once, so the rows add up to the total."""
    whole, rounds = profile.table(), {row.name: row for row in profile.table(rounds=True)}
    elsewhere = any(row.elsewhere for row in whole)
    table = Table(title="Where the time was spent", title_justify="left", title_style="bold")
    table.add_column("")
    for name in ("seconds", *["workers"] * elsewhere, "share", "in rounds"):
        table.add_column(name, justify="right")
    table.add_column("activity")
    for row in whole:
        inside = rounds[row.name].share if row.name in rounds else 0.0
        seconds = [f"{row.seconds:.2f}", *[f"{row.elsewhere:.2f}"] * elsewhere]
        shares = [f"{100 * row.share:.1f} %", f"{100 * inside:.1f} %" if inside else ""]
        table.add_row(row.name, *seconds, *shares, MEANING[row.name])
    table.add_section()
    seconds = [f"{sum(row.seconds for row in whole):.2f}", *[f"{sum(r.elsewhere for r in whole):.2f}"] * elsewhere]
    table.add_row("all", *seconds, "100 %", "100 %", "", style="bold")
    return table
