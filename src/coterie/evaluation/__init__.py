"""Evaluation: every client's metrics, how they are spread, and who gains by taking part."""

from coterie.evaluation.benefit import Benefit
from coterie.evaluation.metrics import Scores
from coterie.evaluation.predictions import Predictions
from coterie.evaluation.scoring import Scorer, score

__all__ = ["Benefit", "Predictions", "Scorer", "Scores", "score"]
