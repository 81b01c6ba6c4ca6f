"""The picture: one HTML file from run folders, and its figures as images. Nothing but the folders is read."""

from coterie.report.write import write, write_figures

__all__ = ["write", "write_figures"]
