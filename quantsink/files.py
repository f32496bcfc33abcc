"""Outputs that appear whole or not at all: written next to their place, flushed, then renamed."""

import contextlib
import ctypes
import glob
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from quantsink.errors import OutputError, UsageError

PART = ".part"
"""Suffix of unfinished files and folders."""

Ours = Callable[[Path], bool]
"""Whether quantsink wrote everything in a folder; `--force` replaces only such a folder."""


@contextlib.contextmanager
def whole_folder(target: Path, ours: Ours, *, force: bool = False) -> Iterator[Path]:
    """Give a temporary folder next to `target`; rename it to `target` when the block ends without an error.

    Args:
        ours: whether quantsink wrote all of an existing folder.
        force: replace such a folder.

    Raises:
        UsageError: `target` is not empty, and `force` is not set or quantsink did not write all of it.
        OutputError: the disk is full or the place is not writable. Nothing is left behind.
    """
    check_free(target, ours, force=force)
    target = target.resolve()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(target)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.{os.getpid()}.", suffix=PART, dir=target.parent))
    except OSError as error:
        raise OutputError(f"{target}: cannot be written: {error.strerror}; choose another -o") from error
    try:
        with disk_errors(target):
            yield work
            os.chmod(work, 0o755)
            _flush(work)
            _swap(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def check_free(target: Path, ours: Ours, *, force: bool = False) -> None:
    """Refuse an output folder that is not empty or not writable, before any work is done."""
    if target.resolve() == Path.cwd():
        raise UsageError(f"-o {target}: the current folder cannot be replaced; choose a folder in it")
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target}: is a file, not a folder; choose another -o")
    parent = next(folder for folder in target.resolve().parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UsageError(f"{target}: {parent} is not a writable folder; choose another -o")
    if not target.is_dir() or not contents(target):
        return
    if not force:
        raise UsageError(f"{target}: the folder is not empty; choose another -o or pass --force to replace it")
    if not ours(target):
        raise UsageError(
            f"{target}: holds files that quantsink did not write, so --force does not replace it; choose another -o"
        )


def contents(folder: Path) -> set[str]:
    """Names in a folder, without the unfinished files of a killed quantsink process."""
    return {path.name for path in folder.iterdir() if not (path.name.startswith(".") and path.name.endswith(PART))}


def _remove_stale(target: Path) -> None:
    for path in target.parent.glob(f".{glob.escape(target.name)}.*{PART}"):
        pid = path.name.removeprefix(f".{target.name}.").partition(".")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists() and Path("/proc/self").exists():
            shutil.rmtree(path, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Replace one file whole; a killed process leaves the old file."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, data: bytes) -> None:
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=PART, dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise


def write_json(path: Path, data: Any) -> None:
    write_text(path, json.dumps(data, indent=2, allow_nan=False) + "\n")


@contextlib.contextmanager
def disk_errors(place: Path) -> Iterator[None]:
    """Turn an error of the operating system or of the safetensors writer into one line."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{place}: cannot be written: {error.strerror or error}; free some space or choose another -o"
        ) from error
    except Exception as error:
        if type(error).__module__.startswith("safetensors"):
            raise OutputError(f"{place}: cannot be written: {error}; free some space or choose another -o") from error
        raise


def _flush(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _swap(work: Path, target: Path) -> None:
    if not target.exists():
        os.rename(work, target)
    elif not _exchange(work, target):
        old = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".old", dir=target.parent))
        os.rename(target, old / "old")
        try:
            os.rename(work, target)
        except OSError:
            os.rename(old / "old", target)
            raise
        shutil.rmtree(old, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two folders in one step (Linux), so that a kill leaves the old one or the new one, never none."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return renameat2 is not None and renameat2(here, os.fsencode(first), here, os.fsencode(second), exchange) == 0
