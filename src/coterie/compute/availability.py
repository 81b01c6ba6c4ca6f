"""Whether steps can be compiled on this machine, and if not, why: one sentence that the console, engine.json and
`coterie doctor` show."""

from __future__ import annotations

import functools
import os
import shutil
import sys

from coterie.compute import torch_private
from coterie.core.errors import ConfigError

VARIABLE = "COTERIE_BACKEND"
CHOICES = ("auto", "plain")


def asked_for_plain() -> bool:
    """Tell whether the environment asks for ordinary PyTorch only.

    Raises:
        ConfigError: the variable has a value that is not one of `CHOICES`.
    """
    value = os.environ.get(VARIABLE, "auto") or "auto"
    if value not in CHOICES:
        raise ConfigError([f"{VARIABLE}={value}: choose from {', '.join(CHOICES)}"])
    return value == "plain"


def compiler() -> str | None:
    """Return the C++ compiler that TorchInductor would call, or None if it is not there."""
    return shutil.which(compiler_name())


def compiler_name() -> str:
    return os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")


def unavailable() -> str | None:
    """Return, in words, why nothing can be compiled here; None where it should be possible."""
    if asked_for_plain():
        return f"{VARIABLE}=plain asks for ordinary PyTorch"
    return _unavailable(os.environ.get("PATH", ""), compiler_name())


def no_compiler() -> str | None:
    """Say that there is no C++ compiler; None where there is one. Unlike `unavailable`, it imports nothing."""
    if compiler() is not None:
        return None
    return f"there is no C++ compiler: {compiler_name()} is not on the PATH (CXX names another one)"


@functools.cache  # of what it depends on
def _unavailable(path: str, name: str) -> str | None:
    return no_compiler() or torch_private.missing()


def first_line(error: BaseException) -> str:
    """Return the first line of what an exception says, or its type where it says nothing."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
