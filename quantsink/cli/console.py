"""What the commands share: options that mean the same everywhere, and what goes to stderr while work is done."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

stderr = Console(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, everything else on stderr.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an output that is there already.")]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="Hub id, local folder or .gguf file.", show_default=False)]
Out = Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Folder to write.", show_default=False)]
Device = Annotated[str, typer.Option(help="Device to run on: cpu, cuda, cuda:1, ...")]
Dtype = Annotated[str, typer.Option(help="auto (the checkpoint's own; float32 for GGUF), float32, bfloat16, float16.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the code that MODEL's repository brings along.")
]
Bos = Annotated[bool, typer.Option("--bos/--no-bos", help="Start each window with the BOS token, where there is one.")]


@contextlib.contextmanager
def loading(what: str) -> Iterator[Callable[[str], None]]:
    """A line on stderr that says what goes on; a spinner on a terminal."""
    from quantsink.models.source import quiet_loading

    with quiet_loading(), stderr.status(what) as status:
        if not stderr.is_terminal:
            stderr.print(what, soft_wrap=True)

        def say(text: str) -> None:
            status.update(text)
            if not stderr.is_terminal:
                stderr.print(text, soft_wrap=True)

        yield say


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A bar with an estimate on stderr; `progress(name, done, total)` moves it, one line per name."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=stderr) as bar:
        tasks: dict[str, Any] = {}

        def progress(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=total)
            bar.update(tasks[name], completed=done, total=total)

        yield progress
