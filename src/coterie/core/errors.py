"""What users are told when something is wrong: in words, naming the file, key or client, and what to do."""

from __future__ import annotations

from collections.abc import Sequence


class CoterieError(Exception):
    """A problem that the user can solve; the command line prints it without a stack trace."""


class ConfigError(CoterieError):
    """Everything that is wrong with a configuration, at once."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(f"- {problem}" for problem in self.problems))


class DataError(CoterieError):
    """A client's data cannot be used; names the client."""


class CheckpointError(CoterieError):
    """A run folder or checkpoint cannot be read or written; names the file."""


class CoterieWarning(UserWarning):
    """Something worth knowing that does not stop the run."""
