"""Sites on their own machines with privacy: their noise is their own, and nothing else of theirs is sent."""

from __future__ import annotations

import math

import pytest
import torch
from inprocess import NAMES, ledger, make  # noqa: F401

