"""Evaluation: every client's metrics, how they are spread, and who gains by taking part."""

from coterie.evaluation.benefit import Benefit
from coterie.evaluation.metrics import BETTER, Scorer, Scores, score
from coterie.evaluation.predictions import Predictions

__all__ = ["BETTER", "Benefit", "Predictions", "Scorer", "Scores", "score"]
