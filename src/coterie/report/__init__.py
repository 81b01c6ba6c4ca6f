"""Reports: one HTML file made from run folders alone, and its figures as images."""

from coterie.report.write import write, write_figures

__all__ = ["write", "write_figures"]
