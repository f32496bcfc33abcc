"""One calibration by several processes: each measures every N-th window, and an all-reduce adds their statistics.

`torchrun` or `accelerate launch` starts the processes. Statistics are float64 on the CPU whatever the model runs on, so
the all-reduce goes through gloo. A failure ends every process and is reported once: the first process that fails marks
it in torch.distributed's key-value store, and the others exit silently. None waits in a collective for one that ended.
"""

import contextlib
import datetime
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from quantsink.calibration.statistics import MAXIMA, Fields
from quantsink.errors import CalibrationError, UsageError

T = TypeVar("T")

FAILED = "quantsink/failed"
PATIENCE = datetime.timedelta(days=30)
"""How long a process waits for slower ones; a failure is noticed at once."""
GRACE = 2.0
"""Seconds before a silent process exits: a launcher stops all at the first exit, also the one about to report."""


@dataclass(frozen=True)
class Processes:
    """This process and those that calibrate with it; the default is a single process."""

    rank: int = 0
    world: int = 1
    store: Any = None

    @property
    def first(self) -> bool:
        """Whether this is the process that prints and writes."""
        return self.rank == 0

    def device(self, name: str) -> str:
        """`cuda` becomes the GPU of this process; any other name stays as it is."""
        return f"cuda:{os.environ.get('LOCAL_RANK', self.rank)}" if name == "cuda" and self.world > 1 else name

    def stop_if_another_failed(self) -> None:
        """Exit silently if another process has failed."""
        if self.world > 1 and _failed(self.store):
            _end_quietly()

    def check_same(self, facts: Mapping[str, str]) -> None:
        """Refuse processes that do not read the same model, text and settings.

        Raises:
            CalibrationError: names what differs, and in which process.
        """
        if self.world == 1:
            return
        everyone: list[Any] = [None] * self.world
        with _in_touch(self):
            dist.all_gather_object(everyone, dict(facts))
        for rank, theirs in enumerate(everyone):
            for key, value in everyone[0].items():
                if theirs.get(key) != value:
                    raise CalibrationError(
                        f"process {rank}: another {key} than process 0's; give all the same files and versions"
                    )

    def from_first(self, value: T) -> T:
        """The first process's `value`, in every process."""
        if self.world == 1:
            return value
        box: list[Any] = [value]
        with _in_touch(self):
            dist.broadcast_object_list(box, src=0)
        return cast(T, box[0])

    def merge(self, parts: Sequence[Fields]) -> None:
        """Replace this process's statistics by those of all: sums are added, of extremes the largest is taken."""
        if self.world == 1:
            return
        for extremes, operation in ((False, dist.ReduceOp.SUM), (True, dist.ReduceOp.MAX)):
            places = [(fields, name) for fields in parts for name in fields if (name in MAXIMA) is extremes]
            tensors = [fields[name] for fields, name in places]
            flat = torch.cat([tensor.flatten() for tensor in tensors])
            with _in_touch(self):
                dist.all_reduce(flat, operation)
            for (fields, name), like, total in zip(
                places, tensors, flat.split([t.numel() for t in tensors]), strict=True
            ):
                fields[name] = total.view(like.shape).clone()


ALONE = Processes()


@contextlib.contextmanager
def launched() -> Iterator[Processes]:
    """The processes that `torchrun` or `accelerate launch` started, or this one alone.

    An exception in one process ends all: the first that fails raises it, the others exit with status 1.

    Raises:
        UsageError: a launcher that torch.distributed does not understand, or torch.distributed is already in use.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield ALONE
        return
    if dist.is_initialized():
        raise UsageError("torch.distributed is already in use; calibrate in separate processes")
    try:
        store, rank, world = next(rendezvous("env://"))
    except (ValueError, RuntimeError) as error:
        raise UsageError(
            f"{str(error).splitlines()[0]}; start several processes with torchrun or accelerate launch"
        ) from error
    processes = Processes(rank, world, store)
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=PATIENCE)
        yield processes
    except (Exception, KeyboardInterrupt):
        if _claim(store):
            raise
        _end_quietly()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@contextlib.contextmanager
def _in_touch(processes: Processes) -> Iterator[None]:
    """A collective that breaks off means that another process ended."""
    try:
        yield
    except RuntimeError as error:
        raise CalibrationError(
            f"process {processes.rank}: another process ended early, perhaps out of memory; continue with --resume"
        ) from error


def _failed(store: Any) -> bool:
    try:
        return bool(store.check([FAILED]))
    except RuntimeError:  # the store ended with the process that held it
        return True


def _claim(store: Any) -> bool:
    """Whether this process is the first to fail."""
    try:
        return int(store.add(FAILED, 1)) == 1
    except RuntimeError:
        return False


def _end_quietly() -> NoReturn:
    time.sleep(GRACE)
    raise SystemExit(1)


__all__ = ["ALONE", "Processes", "launched"]
