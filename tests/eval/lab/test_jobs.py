"""Jobs in processes of their own."""

import contextlib
import math
import multiprocessing
import time
from multiprocessing.connection import wait

import pytest
import torch

from quantsink.eval.lab.jobs import one_thread, run_jobs


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_results_come_in_the_order_of_the_jobs_and_each_is_reported(workers: int) -> None:
    steps: list[tuple[str, int, int]] = []
    results = run_jobs(math.sqrt, [4, 9, 16], name="roots", progress=lambda *s: steps.append(s), workers=workers)
    assert results == [2, 3, 4]
    assert steps == [("roots", done, 3) for done in range(4)]


def test_a_failing_job_stops_the_others() -> None:
    """The other job would sleep for an hour; its process is terminated instead."""
    with pytest.raises(ValueError, match="non-negative"):
        run_jobs(time.sleep, [3600, -1], name="naps", workers=2)
    # Sentinels, because the pool's own thread collects the exit codes.
    for worker in multiprocessing.active_children():
        assert wait([worker.sentinel], timeout=300), "still asleep"


def test_one_thread_is_given_back_after_an_error() -> None:
    threads = torch.get_num_threads()
    with contextlib.suppress(RuntimeError), one_thread():
        assert torch.get_num_threads() == 1
        raise RuntimeError
    assert torch.get_num_threads() == threads
