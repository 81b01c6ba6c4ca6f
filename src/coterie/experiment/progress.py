"""Tell whoever started a run how it proceeds."""

from __future__ import annotations

from typing import Any, Protocol

from coterie.evaluation.metrics import mean


class Progress(Protocol):
    """Receive news of a run as it proceeds; `coterie.cli.progress` shows it on a terminal."""

    def say(self, text: str) -> None:
        """Receive a remark, such as which engine was picked."""

    def start(self, label: str, done: int, rounds: int) -> None:
        """Receive the start of training: what is trained, the rounds done before, and all rounds."""

    def round(self, record: dict[str, Any], metric: str) -> None:
        """Receive the record of a round, and the metric that selects rounds."""

    def stop(self) -> None:
        """Receive the end of training, whether it was completed or not."""


class Silent:
    """Ignore all news of a run."""

    def say(self, text: str) -> None: ...
    def start(self, label: str, done: int, rounds: int) -> None: ...
    def round(self, record: dict[str, Any], metric: str) -> None: ...
    def stop(self) -> None: ...


def scores(record: dict[str, Any], metric: str) -> str:
    """Format a round's scores, such as 'loss 0.61 validation balanced_accuracy 0.698'; missing ones are left out."""
    words = []
    if "loss" in record["info"]:
        words.append(f"loss {mean(record['info']['loss']):.4g}")
    if "validation" in record:
        words.append(f"validation {metric} {mean(record['validation'][metric]):.3f}")
    return " ".join(words)
