"""`--profile`: where the time went, as a table."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from coterie.cli.console import say, show
from coterie.spans import MEANING, Profile


def print_profile(console: Console, profile: Profile) -> None:
    show(console, profile_table(profile))
    say(console, f"Of the rounds' time, {100 * profile.share_of_work():.0f} % is local training and evaluation.")


def profile_table(profile: Profile) -> Table:
    """Every line is what was spent there and nowhere else: the lines add up."""
    whole, rounds = profile.table(), {row.name: row for row in profile.table(rounds=True)}
    elsewhere = any(row.elsewhere for row in whole)
    table = Table(title="Where the time went", title_justify="left", title_style="bold")
    table.add_column("")
    for name in ("seconds", *["workers"] * elsewhere, "share", "in rounds"):
        table.add_column(name, justify="right")
    table.add_column("doing what")
    for row in whole:
        inside = rounds[row.name].share if row.name in rounds else 0.0
        seconds = [f"{row.seconds:.2f}", *[f"{row.elsewhere:.2f}"] * elsewhere]
        shares = [f"{100 * row.share:.1f} %", f"{100 * inside:.1f} %" if inside else ""]
        table.add_row(row.name, *seconds, *shares, MEANING[row.name])
    table.add_section()
    seconds = [f"{sum(row.seconds for row in whole):.2f}", *[f"{sum(r.elsewhere for r in whole):.2f}"] * elsewhere]
    table.add_row("all", *seconds, "100 %", "100 %", "", style="bold")
    return table
