"""Outputs that appear whole or not at all: written to a temporary sibling, flushed, then renamed."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from quantsink.errors import OutputError, UsageError


@contextlib.contextmanager
def whole_folder(target: Path, marks: Collection[str], *, force: bool = False) -> Iterator[Path]:
    """Give a temporary folder beside `target` and rename it to `target` when the block ends without an error.

    Args:
        marks: file names by which quantsink knows its own output; `force` replaces a folder only if it holds one.

    Raises:
        UsageError: the target is taken, and `force` is not given or it is not quantsink's.
        OutputError: the disk is full or the place cannot be written; nothing is left behind.
    """
    check_free(target, marks, force=force)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent))
    except OSError as error:
        raise OutputError(f"{target}: cannot be written: {error.strerror}") from error
    try:
        with disk_errors(target):
            yield work
            os.chmod(work, 0o755)
            _flush(work)
            _swap(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def check_free(target: Path, marks: Collection[str], *, force: bool = False) -> None:
    """Refuse a taken output before any work is done."""
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target}: a file stands where the output folder should go; choose another -o")
    if not target.is_dir() or not any(target.iterdir()):
        return
    if not force:
        raise UsageError(f"{target}: the folder is not empty; choose another -o or pass --force to replace it")
    if not any((target / mark).exists() for mark in marks):
        raise UsageError(f"{target}: not written by quantsink, so --force does not replace it; choose another -o")


def write_text(path: Path, text: str) -> None:
    """Replace one file whole."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, data: bytes) -> None:
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
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
    """Turn what the operating system (or the safetensors writer, which words it itself) says into one line."""
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
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".old", dir=target.parent))
    os.rename(target, old / "old")
    os.rename(work, target)
    shutil.rmtree(old, ignore_errors=True)
