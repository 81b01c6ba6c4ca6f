"""Devices: where tensors live. The data is moved to the device once; states are made there and stay there.

Methods make small tensors as they go (`torch.zeros(())`). Inside `with on(device):` these are made on the device, so a
method's file does not mention devices. Random numbers are drawn on the CPU and moved, so they are equal everywhere.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

KINDS = ("cpu", "cuda", "mps")


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which new tensors are made on `device`; for the CPU it does nothing and costs nothing."""
    return contextlib.nullcontext() if device.type == "cpu" else torch.device(device)


def parse(text: str) -> torch.device:
    """Read a device from its name.

    Raises:
        ValueError: if no machine has a device of that name that a run could use; the message lists the choices.
    """
    kind, _, number = text.partition(":")
    if kind not in KINDS or (number and not (number.isdecimal() and kind == "cuda")) or text.endswith(":"):
        raise ValueError("choose from cpu, cuda (or cuda:1, ... where there are several), mps")
    return torch.device(text)


def is_known(text: object) -> bool:
    """Tell whether `text` names a device that `parse` accepts, whether this machine has it or not."""
    try:
        return isinstance(text, str) and bool(parse(text))
    except ValueError:
        return False


def unavailable_reason(text: str) -> str | None:
    """Explain in a sentence why this machine cannot use the device; return None if it can."""
    device = parse(text)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            why = "this PyTorch is built without CUDA" if torch.version.cuda is None else "PyTorch finds no CUDA device"
            return f"device = {text!r}: {why}; use device = 'cpu'"
        if (device.index or 0) >= torch.cuda.device_count():
            return f"device = {text!r}: there are {torch.cuda.device_count()} CUDA devices, counting from cuda:0"
    if device.type == "mps" and not torch.backends.mps.is_available():
        return f"device = {text!r}: PyTorch finds no Apple GPU; use device = 'cpu'"
    return None
