"""Many small trainings, one per process: a model of a few thousand parameters gains nothing from a second thread."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from quantsink.progress import Progress

Job = TypeVar("Job")
Result = TypeVar("Result")


def run_jobs(
    function: Callable[[Job], Result],
    jobs: Sequence[Job],
    *,
    name: str,
    progress: Progress | None = None,
    workers: int | None = None,
) -> list[Result]:
    """`function` of every job, in their order; each runs on one thread, so results do not depend on `workers`.

    Args:
        function: defined in a module, so that another process can import it. Jobs and results must be picklable.
        workers: processes; None: one per core. With 1, everything runs in this process.
    """
    count = min(workers or len(os.sched_getaffinity(0)), len(jobs))
    done = 0
    results: dict[int, Result] = {}

    def finished(index: int, result: Result) -> None:
        nonlocal done
        results[index], done = result, done + 1
        if progress is not None:
            progress(name, done, len(jobs))

    if progress is not None:
        progress(name, 0, len(jobs))
    if count <= 1:
        with one_thread():
            for index, job in enumerate(jobs):
                finished(index, function(job))
    else:
        context: Any = multiprocessing.get_context("spawn")
        others = set(multiprocessing.active_children())
        with ProcessPoolExecutor(count, context, _begin) as pool:
            numbers = {pool.submit(function, job): index for index, job in enumerate(jobs)}
            try:
                for future in as_completed(numbers):
                    finished(numbers[future], future.result())
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for worker in set(multiprocessing.active_children()) - others:
                    worker.terminate()  # or its training would go on for a minute
                raise
    return [results[index] for index in range(len(jobs))]


def _begin() -> None:
    """Start a worker: one thread, and Ctrl-C is left to its parent."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
