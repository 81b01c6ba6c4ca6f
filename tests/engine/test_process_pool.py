"""Workers that live for a run: results come in order, whoever computed them, and what goes wrong is told in words."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch

from coterie.core.errors import CoterieError
from coterie.engine.process_pool import ProcessPool, can_fork

pytestmark = pytest.mark.skipif(not can_fork(), reason="worker processes need Linux")


def rows(number: int, width: int = 3) -> Any:
    return {"n": torch.full((width,), float(number))}, ()


def squares(given: Any) -> Any:
    own, _ = given
    return {"square": own["n"] ** 2, "pid": torch.tensor([os.getpid()])}


def asked(count: int, **options: Any) -> list[Any]:
    return [lambda n=n: rows(n, **options) for n in range(count)]


def test_results_come_in_order_from_several_processes_that_stay() -> None:
    pool, seen = ProcessPool(3), list[set[int]]()
    for width in (3, 500_000, 4):  # memory grows with the rows, and is used again
        results = pool.map("squares", squares, asked(20, width=width))
        assert [float(each["square"][-1]) for each in results] == [float(n * n) for n in range(20)]
        seen.append({int(each["pid"]) for each in results})
    workers = set(pool._workers.values())
    assert len(workers) == 2
    assert set.union(*seen) <= {os.getpid(), *workers}
    pool.close()
    for child in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)


def test_two_chunks_again_and_again() -> None:
    """Nobody waits for a chunk that was taken back."""
    pool = ProcessPool(2)
    for _ in range(200):
        assert [float(each["square"][0]) for each in pool.map("squares", squares, asked(2))] == [0.0, 1.0]


def test_another_function_or_structure_makes_new_workers() -> None:
    pool = ProcessPool(2)
    pool.map("squares", squares, asked(4))
    first = set(pool._workers.values())
    pool.map("squares", squares, asked(4))
    assert set(pool._workers.values()) == first
    cubes = pool.map("cubes", lambda given: {"cube": given[0]["n"] ** 3}, asked(4))
    assert [float(each["cube"][0]) for each in cubes] == [0.0, 1.0, 8.0, 27.0]
    second = set(pool._workers.values())
    assert second != first
    pool.map("squares", squares, asked(4))  # which these know, too
    assert set(pool._workers.values()) == second

    deeper = pool.map(
        "squares", lambda given: {"n": given[0]["n"]}, [lambda: ({"n": torch.ones(1)}, (torch.ones(1),))] * 2
    )
    assert [each["n"].tolist() for each in deeper] == [[1.0], [1.0]]
    assert set(pool._workers.values()).isdisjoint(second)


def test_workers_can_be_forked_before_the_first_work(workers_keep_their_work: None) -> None:
    pool, parent = ProcessPool(2), os.getpid()

    def where(_: Any) -> Any:
        return torch.tensor(os.getpid())

    pool.fork("where", where, rows(0))
    workers = set(pool._workers.values())
    assert {int(each) for each in pool.map("where", where, asked(4))} == {parent, *workers}
    assert set(pool._workers.values()) == workers
    pool.close()


def in_workers(act: Any) -> Any:
    """Work that is `act` in workers, and nothing here."""
    parent = os.getpid()

    def work(given: Any) -> Any:
        if os.getpid() != parent:
            act()
        return {"n": given[0]["n"]}

    return work


def test_a_failing_worker_is_told_with_its_words(workers_keep_their_work: None) -> None:
    def fail() -> None:
        raise RuntimeError("the disk is on fire")

    pool = ProcessPool(2)
    with pytest.raises(CoterieError, match="the disk is on fire") as told:
        pool.map("fail", in_workers(fail), asked(6))
    assert not pool._workers
    first, where = str(told.value).splitlines()[1:3]  # the line of whoever wrote it, before the whole traceback
    assert first == "RuntimeError in your code: the disk is on fire"
    assert "test_process_pool.py" in where
    assert len(pool.map("squares", squares, asked(3))) == 3  # and it can go on


def test_a_killed_worker_is_told(workers_keep_their_work: None) -> None:
    with pytest.raises(CoterieError, match="killed by signal 9"):
        ProcessPool(2).map("die", in_workers(lambda: os.kill(os.getpid(), signal.SIGKILL)), asked(6))


def test_no_worker_outlives_an_interrupt() -> None:
    def interrupt(given: Any) -> Any:
        if float(given[0]["n"][0]) == 1 and os.getpid() == parent:
            raise KeyboardInterrupt
        time.sleep(0.0 if os.getpid() == parent else 600)
        return {"n": given[0]["n"]}

    parent, pool = os.getpid(), ProcessPool(2)
    pool.map("squares", squares, asked(3))
    children = set(pool._workers.values())
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        pool.map("interrupt", interrupt, [*asked(1), *[lambda: rows(1)] * 5])
    assert time.monotonic() - begin < 300, "nobody waits for them"
    assert not pool._workers
    for child in children:
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)


def test_results_hold_while_their_memory_is_used_for_other_chunks() -> None:
    pool = ProcessPool(2)
    for _ in range(3):
        results = pool.map("squares", squares, asked(30, width=1000))
        assert all(bool((each["square"] == n * n).all()) for n, each in enumerate(results))
    pool.close()


def test_a_row_and_the_same_row_for_all_come_back_from_a_slot_that_is_used_again(workers_keep_their_work: None) -> None:
    def both(given: Any) -> Any:
        row = given[0]["n"]
        return {"row": row, "all": row.expand(4, -1), "none": row[:0]}

    pool = ProcessPool(2)
    for number, each in enumerate(pool.map("both", both, asked(20))):
        assert bool((each["row"] == number).all())
        assert each["all"].shape == (4, 3)
        assert bool((each["all"] == number).all())
        assert each["none"].shape == (0,)
    pool.close()
