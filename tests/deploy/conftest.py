import os

import pytest

from coterie.experiment import folder

pytest.importorskip("cryptography", reason="needs pip install 'coterie[flower]'")


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch):
    """These tests kill no machine: what was written is there without waiting for the disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(folder, "environment", dict)  # nor for the list of versions, which is the same every time
