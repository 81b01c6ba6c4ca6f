"""Where tensors live. The data is moved to the device once; states are made there and stay.

Methods make small tensors as they go (`torch.zeros(())`). Inside `with on(device):` these are made on the device, so a
method's file says nothing of devices. Random numbers are drawn on the CPU and moved: draws are equal everywhere.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

KINDS = ("cpu", "cuda", "mps")


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make new tensors there. The CPU is where they are made anyway, at no cost."""
    return contextlib.nullcontext() if device.type == "cpu" else torch.device(device)


def parse(text: str) -> torch.device:
    """Raises `ValueError` in words if it is no device that a run can use, here or elsewhere."""
    kind, _, number = text.partition(":")
    if kind not in KINDS or (number and not (number.isdecimal() and kind == "cuda")) or text.endswith(":"):
        raise ValueError("choose from cpu, cuda (or cuda:1, ... where there are several), mps")
    return torch.device(text)


def is_known(text: object) -> bool:
    try:
        return isinstance(text, str) and bool(parse(text))
    except ValueError:
        return False


def missing(text: str) -> str | None:
    """Why this machine cannot use the device, in words; None if it can."""
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
