"""Evaluation: every client's metrics, never only their mean."""

from coterie.evaluation.metrics import BETTER, Scores, score

__all__ = ["BETTER", "Scores", "score"]
