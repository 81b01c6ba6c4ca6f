"""Workers that live for a run: results in order, by whoever; what goes wrong in one is told in words."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch

from coterie.batches import Batches
from coterie.engine.team import Arena, Team
from coterie.engine.workers import can_fork
from coterie.errors import CoterieError

pytestmark = pytest.mark.skipif(not can_fork(), reason="worker processes need Linux")
POOL = torch.arange(6.0)


def rows(number: int, width: int = 3) -> Any:
    """A chunk: one row {"n": number} and the minibatch [number]."""
    positions = torch.full((1, 1, 1, 1), number)
    batches = Batches(POOL, POOL, positions, positions.float(), positions[..., 0], torch.tensor([1.0]))
    return ({"n": torch.full((width,), float(number))}, ()), batches


def squares(given: Any) -> Any:
    (own, _), batches = given
    return {"square": own["n"] ** 2, "x": batches.x[batches.index.flatten() % 6], "pid": torch.tensor([os.getpid()])}


def asked(count: int, **options: Any) -> list[Any]:
    return [lambda n=n: rows(n, **options) for n in range(count)]


def test_results_come_in_order_from_several_processes_that_stay() -> None:
    team, seen = Team(3), list[set[int]]()
    for width in (3, 500_000, 4):  # memory grows with the rows, and is used again
        results = team.map("squares", squares, asked(20, width=width))
        assert [float(each["square"][-1]) for each in results] == [float(n * n) for n in range(20)]
        assert [float(each["x"]) for each in results] == [float(n % 6) for n in range(20)]
        seen.append({int(each["pid"]) for each in results})
    workers = set(team._workers.values())
    assert len(workers) == 2
    assert set.union(*seen) <= {os.getpid(), *workers}
    team.close()
    for child in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)


def test_two_chunks_again_and_again() -> None:
    """Nobody waits for a chunk that was taken back."""
    team = Team(2)
    for _ in range(200):
        assert [float(each["square"][0]) for each in team.map("squares", squares, asked(2))] == [0.0, 1.0]


def test_another_function_or_structure_or_pool_makes_a_new_team() -> None:
    team = Team(2)
    team.map("squares", squares, asked(4))
    first = set(team._workers.values())
    team.map("squares", squares, asked(4))
    assert set(team._workers.values()) == first
    cubes = team.map("cubes", lambda given: {"cube": given[0][0]["n"] ** 3}, asked(4))
    assert [float(each["cube"][0]) for each in cubes] == [0.0, 1.0, 8.0, 27.0]
    second = set(team._workers.values())
    assert second != first
    team.map("squares", squares, asked(4))  # which these know, too
    assert set(team._workers.values()) == second

    def elsewhere(n: int) -> Any:
        parts, batches = rows(n)
        return parts, batches._replace(x=POOL + 10, y=POOL)

    there = team.map("squares", squares, [lambda n=n: elsewhere(n) for n in range(4)])
    assert [float(each["x"]) for each in there] == [10.0, 11.0, 12.0, 13.0]


def sleepy(act: Any) -> Any:
    """Work that leaves the other chunks to the workers, where `act` is done."""
    parent = os.getpid()

    def work(given: Any) -> Any:
        if os.getpid() == parent:
            time.sleep(0.3)
        else:
            act()
        return {"n": given[0][0]["n"]}

    return work


def test_a_failing_worker_is_told_with_its_words() -> None:
    def fail() -> None:
        raise RuntimeError("the disk is on fire")

    team = Team(2)
    with pytest.raises(CoterieError, match="the disk is on fire"):
        team.map("fail", sleepy(fail), asked(6))
    assert not team._workers
    assert len(team.map("squares", squares, asked(3))) == 3  # and it can go on


def test_a_killed_worker_is_told() -> None:
    with pytest.raises(CoterieError, match="killed by signal 9"):
        Team(2).map("die", sleepy(lambda: os.kill(os.getpid(), signal.SIGKILL)), asked(6))


def test_no_worker_outlives_an_interrupt() -> None:
    def interrupt(given: Any) -> Any:
        if float(given[0][0]["n"][0]) == 1 and os.getpid() == parent:
            raise KeyboardInterrupt
        time.sleep(0.0 if os.getpid() == parent else 30)
        return {"n": given[0][0]["n"]}

    parent, team = os.getpid(), Team(2)
    team.map("squares", squares, asked(3))
    children = set(team._workers.values())
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        team.map("interrupt", interrupt, [*asked(1), *[lambda: rows(1)] * 5])
    assert time.monotonic() - begin < 10
    assert not team._workers
    for child in children:
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)


def test_an_arena_holds_all_kinds_of_tensors() -> None:
    arena = Arena()
    given = [
        torch.tensor([True, False]),
        torch.zeros(0, 3),
        torch.tensor(7),
        torch.arange(12.0).reshape(3, 4).T,
        torch.ones(1).expand(5, 1000).to(torch.bfloat16),
    ]
    arena.write({"name": "x"}, given)
    about, got = arena.read()
    assert about["name"] == "x"
    for ours, theirs in zip(got, given, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


def test_what_is_given_twice_is_written_once_and_comes_out_alike() -> None:
    arena, value, nothing = Arena(), torch.randn(1000), torch.empty(0)
    given = [nothing, value, value[:500], nothing, value, value.view(10, 100), value.expand(4, -1)]
    arena.write({}, given)
    _, found = arena.read()
    assert all(torch.equal(a, b) for a, b in zip(found, given, strict=True))
    assert found[1].data_ptr() == found[4].data_ptr() != found[2].data_ptr()


def test_results_hold_while_their_memory_is_used_for_other_chunks() -> None:
    team = Team(2)
    for _ in range(3):
        results = team.map("squares", squares, asked(30, width=1000))
        assert all(bool((each["square"] == n * n).all()) for n, each in enumerate(results))
    team.close()


def test_a_row_and_the_same_row_for_all_come_back_from_a_slot_that_is_used_again() -> None:
    def both(given: Any) -> Any:
        row = given[0][0]["n"]
        time.sleep(0.005)  # so that the worker has some of them, too, while others wait
        return {"row": row, "all": row.expand(4, -1), "none": row[:0]}

    team = Team(2)
    for number, each in enumerate(team.map("both", both, asked(20))):
        assert bool((each["row"] == number).all())
        assert each["all"].shape == (4, 3)
        assert bool((each["all"] == number).all())
        assert each["none"].shape == (0,)
    team.close()
