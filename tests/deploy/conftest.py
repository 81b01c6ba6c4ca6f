import os
from importlib.util import find_spec

import pytest

from coterie.storage import run_folder

if find_spec("flwr") is None or find_spec("cryptography") is None:
    collect_ignore_glob = ["test_*.py"]  # `make test` has them: pip install 'coterie[flower]'


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch):
    """These tests kill no machine: what was written is there without waiting for the disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(run_folder, "environment", dict)  # nor for the list of versions, which is the same every time
