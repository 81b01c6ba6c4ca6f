import os

import pytest

pytest.importorskip("cryptography", reason="needs pip install 'coterie[flower]'")


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch):
    """These tests kill no machine: what was written is there without waiting for the disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
