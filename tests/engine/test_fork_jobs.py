"""Jobs that are done once, in several processes."""

import multiprocessing
import os
import signal
import time

import pytest
import torch

from coterie import profiling
from coterie.core.errors import CoterieError
from coterie.engine.fork_jobs import MIN_SLOTS, do_all, fan_out
from coterie.engine.process_pool import can_fork

pytestmark = pytest.mark.skipif(not can_fork(), reason="worker processes need Linux")


@pytest.fixture
def children(monkeypatch):
    """The process ids of all that is forked."""
    found, fork = [], os.fork

    def watched():
        child = fork()
        if child:
            found.append(child)
        return child

    monkeypatch.setattr(os, "fork", watched)
    return found


def gone(child):
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    return True


def test_fan_out_gives_results_in_order_from_several_processes(children):
    jobs = [lambda n=n: {"n": torch.tensor([n]), "pid": torch.tensor([os.getpid()])} for n in range(5 * MIN_SLOTS)]
    results = fan_out(jobs, 3)
    assert [int(result["n"]) for result in results] == list(range(5 * MIN_SLOTS))
    assert int(results[0]["pid"]) == os.getpid(), "the first job is done here"
    assert len(children) == 2
    assert {int(result["pid"]) for result in results} <= {os.getpid(), *children}
    assert all(map(gone, children))


def test_all_jobs_are_done_at_the_same_time():
    """The looks of `auto` rely on it: they share the machine as the processes of a round will."""
    both = multiprocessing.get_context("fork").Barrier(2)  # which nobody passes alone
    results = fan_out([lambda: torch.tensor(both.wait(240))] * 2, 2)
    assert sorted(map(int, results)) == [0, 1]


@pytest.mark.parametrize("workers", [1, 4])
def test_few_jobs_fork_no_more_than_they_need(children, workers):
    assert fan_out([], workers) == []
    assert fan_out([lambda: torch.ones(1)], workers)[0].tolist() == [1.0]
    assert not children
    fan_out([lambda: torch.ones(1)] * 2, workers)
    assert len(children) == (workers > 1)


def test_jobs_without_results_are_all_done(tmp_path, monkeypatch):
    monkeypatch.setattr("coterie.engine.fork_jobs.cores", lambda: 2)
    do_all([lambda n=n: (tmp_path / str(n)).write_text(str(n)) for n in range(20)])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(map(str, range(20)))
    with pytest.raises(ZeroDivisionError):
        do_all([lambda: 1 / 0, lambda: None])


def test_a_failing_worker_is_reported_with_its_words(workers_keep_their_work):
    parent = os.getpid()

    def fail():
        if os.getpid() != parent:
            raise RuntimeError("the disk is on fire")
        return torch.zeros(1)

    with pytest.raises(CoterieError, match="the disk is on fire"):
        fan_out([fail] * 3, 2)


def test_a_killed_worker_is_reported(workers_keep_their_work):
    parent = os.getpid()

    def die():
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(1)

    with pytest.raises(CoterieError, match="killed by signal 9"):
        fan_out([die] * 2, 2)


def test_no_worker_outlives_an_interrupt(children):
    """Ctrl-C while the parent works: the workers are stopped and collected, and no file stays open."""

    def interrupt():
        raise KeyboardInterrupt

    def sleep():
        time.sleep(600)
        return torch.zeros(1)

    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(KeyboardInterrupt):
        fan_out([interrupt, sleep, sleep], 3)
    assert len(children) == 2
    assert all(map(gone, children))
    assert set(os.listdir("/proc/self/fd")) <= before


def test_workers_hand_their_spans_over(workers_keep_their_work):
    def job():
        with profiling.span("write"):
            return torch.zeros(1)

    with profiling.recording() as profile, profiling.span("finish", round=3):
        fan_out([job] * 4, 2)
    written = [one for one in profile.spans if one.name == "write"]
    assert len(written) == 4
    assert {one.process for one in written} == {0, 1}
    assert all(one.about == {"round": 3} for one in written)
