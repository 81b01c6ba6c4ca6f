"""Jobs that are done once, shared out among worker processes that end with them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from coterie.compute.cpu import cores
from coterie.core.tree import Tree
from coterie.engine.process_pool import SLOTS_PER_WORKER, ProcessPool, can_fork
from coterie.profiling import timed

MIN_SLOTS = 16  # jobs that lie ready for the workers while this process does a long one

DoJobs = Callable[[Sequence[Callable[[], None]]], None]  # does jobs that change nothing but files


@timed("workers")
def fan_out(jobs: Sequence[Callable[[], Tree]], workers: int) -> list[Tree]:
    """Do jobs in several processes, each of which begins with all that this process has.

    Args:
        jobs: functions whose results have all the same structure. What else they change, other than files, is lost if
            they run in a worker.
        workers: how many processes to use, including this one, which always takes the first job.

    Returns:
        The results, in the order of the jobs.

    Raises:
        CoterieError: a worker failed (its traceback is in the message), or it was killed.
    """
    workers = min(workers, len(jobs))
    if workers < 2:
        return [job() for job in jobs]

    def do(number: Tensor) -> Tree:
        return jobs[int(number)]()

    pool = ProcessPool(workers, slots=min(len(jobs) - 1, max(MIN_SLOTS, SLOTS_PER_WORKER * (workers - 1))))
    try:
        pool.fork("jobs", do, torch.tensor(0))
        return pool.map("jobs", do, [functools.partial(torch.tensor, number) for number in range(len(jobs))])
    finally:
        pool.close()


def do_all(jobs: Sequence[Callable[[], None]]) -> None:
    """Do jobs that change nothing but files, in as many processes as there are cores.

    Raises:
        CoterieError: a job failed in a worker. What a job in this process raises is raised as it is.
    """

    def without_result(job: Callable[[], None]) -> Tree:
        job()
        return ()

    fan_out([functools.partial(without_result, job) for job in jobs], cores() if can_fork() else 1)
