import pytest

from coterie.engine.process_pool import ProcessPool


@pytest.fixture
def workers_keep_their_work(monkeypatch):
    """What a worker was handed stays with it, however late it begins.

    Else this process takes back what no worker has begun: on a busy machine it may do everything itself, and a test of
    what workers do would depend on luck.
    """
    monkeypatch.setattr(ProcessPool, "_take_back", lambda self: None)
    monkeypatch.setattr(ProcessPool, "_work_waits", lambda self: False)
