"""Options that several commands share, and the progress lines on stderr."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import progress as bars
from rich.console import Console

from quantsink.progress import Progress, Say

stderr = Console(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, everything else on stderr.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing output, if quantsink wrote all of it.")]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="Hub id, local folder or .gguf file.", show_default=False)]
Out = Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Folder to write.", show_default=False)]
Device = Annotated[str, typer.Option(help="Device to run on: cpu, cuda, cuda:1, ...")]
Dtype = Annotated[
    str, typer.Option(help="auto (the type in the checkpoint; float32 for GGUF), float32, bfloat16, float16.")
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run custom code from MODEL's repository; review it first.")
]
Bos = Annotated[
    bool, typer.Option("--bos/--no-bos", help="Start each window with the BOS token, if the tokenizer has one.")
]


@contextlib.contextmanager
def loading(what: str) -> Iterator[Say]:
    """A line on stderr while something is loaded; a spinner on a terminal. Gives a function that replaces the line."""
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
def progress_bar() -> Iterator[Progress]:
    """Progress bars with time estimates on stderr, one per name."""
    columns = (
        bars.TextColumn("{task.description}"), bars.BarColumn(), bars.MofNCompleteColumn(), bars.TimeElapsedColumn(),
        bars.TextColumn("left"), bars.TimeRemainingColumn(),
    )  # fmt: skip
    with bars.Progress(*columns, console=stderr) as bar:
        tasks: dict[str, Any] = {}

        def progress(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=total)
            bar.update(tasks[name], completed=done, total=total)

        yield progress
