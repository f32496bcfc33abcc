"""`quantsink lab`: the attention laboratory from the command line."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from quantsink.cli.console import Debug, Device, Dtype, Force, Json, Out, TrustRemoteCode, loading, progress_bar, stderr
from quantsink.errors import UsageError
from quantsink.progress import Progress

app = typer.Typer(
    rich_markup_mode="markdown",
    help="The attention laboratory: why sinks form, which attention avoids them, what 8 bits does to each.\n\n"
    "Each experiment writes its tables (Markdown), pictures and figures (JSON) into one folder.",
)

Seeds = Annotated[
    int | None, typer.Option(metavar="N", help="Trainings of each variant. [default: 5, or 1 with --quick]", min=1)
]
Quick = Annotated[
    bool, typer.Option("--quick", help="A small run that shows that everything works; its figures mean little.")
]
Workers = Annotated[
    int | None,
    typer.Option(metavar="N", help="Trainings at a time. [default: one per core]", min=1, show_default=False),
]
Models = Annotated[
    list[str] | None,
    typer.Argument(metavar="MODEL", help="Hub ids, local folders or .gguf files.", show_default=False),
]
Data = Annotated[str, typer.Option(metavar="SPEC", help="Text that the real models read.")]


@app.callback(invoke_without_command=True)
def help_without_command(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), nl=False)


@app.command(epilog="Example: quantsink lab trigger -o trigger")
def trigger(
    output: Out,
    seeds: Seeds = None,
    quick: Quick = False,
    workers: Workers = None,
    force: Force = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train one- and four-layer models on the trigger task with each normalizer, a gate, a sink bias and a learnable
    sink. Measure their weights, their error in 8 bits, and what quantsink's calibration finds."""
    from quantsink.eval.lab import experiments

    _run(output, force, as_json, [lambda progress: experiments.trigger(seeds, quick, workers, progress)])


@app.command(epilog="Example: quantsink lab language -o language")
def language(
    output: Out,
    seeds: Seeds = None,
    quick: Quick = False,
    workers: Workers = None,
    force: Force = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train small language models: softmax1 against softmax, sinks and 8 bits, and a learnable sink for streaming."""
    from quantsink.eval.lab import experiments

    _run(output, force, as_json, [lambda progress: experiments.language(seeds, quick, workers, progress)])


@app.command(epilog="Example: quantsink lab vision -o vision")
def vision(
    output: Out,
    seeds: Seeds = None,
    quick: Quick = False,
    workers: Workers = None,
    force: Force = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a small ViT on scikit-learn's digits, with and without a gate: the weight on [CLS] and border patches."""
    from quantsink.eval.lab import experiments

    experiments.check_vision()
    _run(output, force, as_json, [lambda progress: experiments.vision(seeds, quick, workers, progress)])


@app.command(epilog="Example: quantsink lab profile HuggingFaceTB/SmolLM2-135M -o profile")
def profile(
    output: Out,
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL", help="Hub ids, local folders or .gguf files.", show_default=False),
    ],
    data: Data = "builtin:prose",
    quick: Quick = False,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    trust_remote_code: TrustRemoteCode = False,
    force: Force = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Profile real models: where their attention goes by position, text and token, and what a window loses."""
    _run(output, force, as_json, _profiles(models, data, quick, device, dtype, trust_remote_code))


@app.command("all", epilog="Example: quantsink lab all HuggingFaceTB/SmolLM2-135M -o laboratory")
def everything(
    output: Out,
    models: Models = None,
    data: Data = "builtin:prose",
    seeds: Seeds = None,
    quick: Quick = False,
    workers: Workers = None,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    trust_remote_code: TrustRemoteCode = False,
    force: Force = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """The whole laboratory and a profile of each MODEL: a quarter of an hour on two cores with small models."""
    from quantsink.eval.lab import experiments

    experiments.check_vision()
    trained = [
        lambda progress: experiments.trigger(seeds, quick, workers, progress),
        lambda progress: experiments.language(seeds, quick, workers, progress),
        lambda progress: experiments.vision(seeds, quick, workers, progress),
    ]
    # Real models first, so that an error in one is reported before the long trainings.
    _run(output, force, as_json, [*_profiles(models or [], data, quick, device, dtype, trust_remote_code), *trained])


Experiment = Callable[[Progress], Any]


def _profiles(
    models: Sequence[str], data: str, quick: bool, device: str, dtype: str, trust_remote_code: bool
) -> list[Experiment]:
    """Names of models and of the text are checked before any model runs."""
    from quantsink.calibration.text import check_not_empty, parse_spec
    from quantsink.eval.lab import experiments
    from quantsink.models.source import find

    sources = [find(model) for model in models]
    labels = [Path(source.name).name for source in sources]
    repeated = next((label for label in labels if labels.count(label) > 1), None)
    if repeated is not None:
        raise UsageError(
            f"lab: two models are called {repeated}, so their pictures would be too; profile one at a time"
        )
    if data == "self":
        raise UsageError("lab: --data self: a profile reads the same text with every model; name a text")
    check_not_empty(parse_spec(data))

    def run(source: Any, progress: Progress) -> Any:
        with loading(f"loading {source.name}"):
            tokenizer = source.tokenizer(trust_remote_code)
            model = source.model(dtype, device, trust_remote_code)
        label = Path(source.name).name
        return experiments.profile(model, tokenizer, label, data, quick, source.notes, progress)

    return [lambda progress, source=source: run(source, progress) for source in sources]  # type: ignore[misc]


def _run(output: Path, force: bool, as_json: bool, experiments: Sequence[Experiment]) -> None:
    from quantsink.eval.lab.output import is_laboratory, save
    from quantsink.files import check_free, whole_folder

    check_free(output, is_laboratory, force=force)
    findings = []
    with progress_bar() as progress:
        for experiment in experiments:
            findings.append(experiment(progress))
    with whole_folder(output, is_laboratory, force=force) as work:
        save(findings, work)
    if as_json:
        print(json.dumps({"experiments": [finding.facts() for finding in findings], "written": str(output)}))
        return
    out = Console()
    for finding in findings:
        out.print(f"\n{finding.title}", style="bold")
        for table in finding.tables:
            out.print(table.rich())
    total = sum(finding.seconds for finding in findings)
    stderr.print(f"written in {total:.0f} s: {output}", soft_wrap=True)
