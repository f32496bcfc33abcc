"""The command line. Each command takes --json (one object on stdout, everything else on stderr) and --debug.

Exit 0 done, 1 failed, 2 used wrongly. Errors are one line; a traceback comes only with --debug.
"""

import dataclasses
import json
import logging
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from quantsink import __version__
from quantsink.cli import lab as cli_lab
from quantsink.cli.console import (
    Bos,
    Debug,
    Device,
    Dtype,
    Force,
    Json,
    Model,
    Out,
    TrustRemoteCode,
    loading,
    progress_bar,
    stderr,
)
from quantsink.errors import QuantSinkError, UsageError

app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Quantize transformers to 8 bits without breaking their attention sinks.\n\n"
    "Calibrate a model, export a quantized checkpoint, report what it cost. Try `quantsink demo` first.",
)
app.add_typer(cli_lab.app, name="lab")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"quantsink {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Carries the options of `quantsink` itself."""


@app.command(epilog="Example: quantsink calibrate HuggingFaceTB/SmolLM2-135M -o calibration --data builtin:prose")
def calibrate(
    model: Model,
    output: Out,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC",
            help="Text, repeatable, each a domain of its own: builtin:prose, builtin:code, self (sampled from the "
            "model), a .txt, .jsonl or .parquet file, or a hub data set NAME[:CONFIG][:SPLIT]. "
            "[default: builtin:prose and builtin:code]",
            show_default=False,
        ),
    ] = None,
    seq_len: Annotated[int, typer.Option(help="Tokens a window, BOS included.")] = 512,
    max_tokens: Annotated[int, typer.Option(help="Tokens in all, shared evenly by the texts.")] = 65536,
    sink_size: Annotated[int, typer.Option(help="Sink tokens at the start of each sequence.")] = 1,
    query_rows: Annotated[int, typer.Option(help="Query rows measured a window, evenly spread; 0 measures all.")] = 64,
    error_windows: Annotated[int, typer.Option(help="Windows a text in which each head's INT8 error is measured.")] = 4,
    seed: Annotated[int, typer.Option(help="Seed of --data self.")] = 0,
    bos: Bos = True,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    trust_remote_code: TrustRemoteCode = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an unfinished calibration in DIR.")] = False,
    force: Force = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Find a model's sink heads and measure its heads and linear layers on text."""
    from quantsink.calibration import calibrate as run
    from quantsink.calibration.calibrate import DEFAULT_DATA
    from quantsink.calibration.plots import save_with_pictures
    from quantsink.calibration.processes import launched
    from quantsink.calibration.stored import FACTS, is_calibration, partials
    from quantsink.calibration.summary import as_dict, render
    from quantsink.calibration.text import check_not_empty, parse_spec
    from quantsink.files import check_free, whole_folder
    from quantsink.models.source import find

    specs = data or list(DEFAULT_DATA)
    with launched() as processes:
        stderr.quiet = not processes.first
        unfinished = bool(partials(output))
        if unfinished and not (resume or force):
            raise UsageError(
                f"{output}: holds an unfinished calibration; go on with --resume or start again with --force"
            )
        check_free(output, is_calibration, force=force or resume)
        finished = resume and (output / FACTS).is_file() and not unfinished
        for spec in specs:
            check_not_empty(parse_spec(spec))
        source = find(model)
        with loading(f"loading {model}"):
            tokenizer = source.tokenizer(trust_remote_code)
            loaded = source.model(dtype, processes.device(device), trust_remote_code)
        with progress_bar() as progress:
            calibration = run(
                loaded,
                tokenizer,
                specs,
                seq_len=seq_len,
                max_tokens=max_tokens,
                sink_size=sink_size,
                query_rows=query_rows or None,
                error_windows=error_windows,
                bos=bos,
                seed=seed,
                folder=output,
                resume=resume,
                progress=progress,
                name=model,
                processes=processes,
            )
        if not processes.first:
            return
        if not finished:
            with whole_folder(output, is_calibration, force=True) as work:
                save_with_pictures(calibration, work)
    if as_json:
        print(json.dumps(as_dict(calibration, str(output))))
    else:
        Console().print(render(calibration))
        stderr.print(f"written: {output}", soft_wrap=True)


@app.command(epilog="Example: quantsink export HuggingFaceTB/SmolLM2-135M --calibration calibration -o smollm2-w8a8")
def export(
    model: Model,
    output: Out,
    calibration: Annotated[
        Path, typer.Option(metavar="DIR", help="What `quantsink calibrate` wrote.", show_default=False)
    ],
    recipe: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="w8a16, w8a8, w8a8-static, or a JSON file.")
    ] = "w8a8",
    native_heads: Annotated[
        int | None, typer.Option(metavar="K", help="Keep the K heads with the largest measured error native.")
    ] = None,
    kv_bits: Annotated[
        float | None,
        typer.Option(metavar="B", help="Let the loaded model keep its KV cache in B bits a number, 2 to 8 on average."),
    ] = None,
    format_: Annotated[
        str, typer.Option("--format", help="Checkpoint format; quantsink is the only one.")
    ] = "quantsink",
    max_shard_size: Annotated[
        str, typer.Option(help="Largest safetensors shard. Memory does not depend on it.")
    ] = "5GB",
    measure: Annotated[
        bool,
        typer.Option(
            help="Measure KL and perplexity on held-out text for the model card, if the model fits into memory twice. "
            "Nothing else needs the model in memory."
        ),
    ] = True,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    trust_remote_code: TrustRemoteCode = False,
    force: Force = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Quantize a model by its calibration and write a checkpoint that transformers loads.

    Tensors are read, quantized and written one by one: a model larger than memory is exported like a small one.
    """
    from quantsink.export.export import export as run
    from quantsink.models.source import quiet_loading

    if format_ != "quantsink":
        raise UsageError(f"--format {format_}: only quantsink is there")
    with quiet_loading(), progress_bar() as progress:
        done = run(
            model,
            calibration,
            output,
            recipe,
            native_heads=native_heads,
            kv_bits=kv_bits,
            dtype=dtype,
            device=device,
            force=force,
            measure=measure,
            max_shard_size=max_shard_size,
            trust_remote_code=trust_remote_code,
            say=lambda text: stderr.print(text, soft_wrap=True),
            progress=progress,
        )
    if as_json:
        print(json.dumps(dataclasses.asdict(done)))
        return
    for note in done.notes:
        stderr.print(f"note: {note}", soft_wrap=True)
    out = Console()
    out.print(f"{done.checkpoint}: {done.payload_bytes:,} bytes, {done.bits_weight:.2f} bits a parameter")
    if done.heads:
        out.print("heads by route: " + ", ".join(f"{count} {route}" for route, count in done.heads.items()))
    if done.measured:
        m = done.measured
        out.print(f"on {m.tokens:,} held-out tokens: perplexity {m.ppl_reference:.3f} -> {m.ppl:.3f}, KL {m.kl:.5f}")


@app.command(epilog="Example: quantsink report HuggingFaceTB/SmolLM2-135M smollm2-w8a8 -o report --data test.txt")
def report(
    model: Model,
    output: Out,
    checkpoints: Annotated[
        list[Path] | None,
        typer.Argument(metavar="CHECKPOINT", help="Exported checkpoints to measure.", show_default=False),
    ] = None,
    data: Annotated[
        str, typer.Option(metavar="SPEC", help="Text to measure on, not used for calibration.")
    ] = "builtin:heldout",
    calibration: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Calibration of the measured methods; made on built-in text if left out.",
            show_default=False,
        ),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="all, none, or names separated by commas. [default: all, or none with --kv-bits or --rolling]",
            show_default=False,
        ),
    ] = None,
    kv_bits: Annotated[
        str | None,
        typer.Option(
            "--kv-bits",
            metavar="WIDTHS",
            help="Measure KV caches of 8, 4, 3 or 2 bits, separated by commas, each as it is used: filled by 128 "
            "tokens of a window, then 32 at a time; only the tokens behind the first 128 are scored, in every row.",
            show_default=False,
        ),
    ] = None,
    rolling: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Also run N tokens as one sequence through a rolling cache, sinks kept and dropped, in 8 bits or the "
            "first of --kv-bits. A multiple of 4096.",
            show_default=False,
        ),
    ] = None,
    rolling_length: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Tokens that the rolling cache holds, sinks included. [default: 2048]", show_default=False
        ),
    ] = None,
    length: Annotated[int, typer.Option(help="Tokens a window, BOS included.")] = 1024,
    stride: Annotated[
        int | None, typer.Option(help="Tokens between windows. [default: no overlap]", show_default=False)
    ] = None,
    max_windows: Annotated[int, typer.Option(help="Windows to measure; 0 measures all the text.")] = 4,
    bos: Bos = True,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    force: Force = False,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure what quantization costs: perplexity, KL and true bits, beside baselines and controls."""
    from quantsink.calibration.text import check_not_empty, parse_spec
    from quantsink.eval import cache_methods, parse_methods, parse_widths
    from quantsink.eval.report import is_report
    from quantsink.eval.rolling import check_tokens
    from quantsink.files import check_free
    from quantsink.models.source import find

    widths = parse_widths(kv_bits) if kv_bits is not None else ()
    named = ("none" if widths or rolling is not None else "all") if methods is None else methods
    if rolling is not None:
        check_tokens(rolling)
    elif rolling_length is not None:
        raise UsageError("--rolling-length goes with --rolling")
    stream = (
        None
        if rolling is None
        else {"tokens": rolling, "max_length": 2048 if rolling_length is None else rolling_length}
    )
    if stream is not None and widths:
        stream["bits"] = widths[0]
    check_free(output, is_report, force=force)
    check_not_empty(parse_spec(data))
    found = _report(
        find(model), output, checkpoints or [], data, calibration,
        (*parse_methods(named), *cache_methods(widths)), stream, length, stride,
        max_windows or None, bos, device, dtype, trust_remote_code, force,
    )  # fmt: skip
    if as_json:
        print(json.dumps(found.to_dict()))
    else:
        _print_report(found)
        stderr.print(f"written: {output}", soft_wrap=True)


def _report(
    source: Any,
    output: Path,
    checkpoints: list[Path],
    data: str,
    calibration: Path | None,
    methods: tuple[Any, ...],
    stream: dict[str, int] | None,
    length: int,
    stride: int | None,
    max_windows: int | None,
    bos: bool,
    device: str,
    dtype: str,
    trust_remote_code: bool,
    force: bool,
) -> Any:
    from quantsink.calibration import Calibration
    from quantsink.calibration import calibrate as run
    from quantsink.checkpoint.save_load import load
    from quantsink.eval import PREFILL, check_rolling, measure, read, read_stream
    from quantsink.models.architecture import Architecture
    from quantsink.models.fingerprint import model_fingerprint

    context = PREFILL if any(method.cache is not None for method in methods) else 0
    found = Calibration.load(calibration) if calibration is not None else None
    with loading(f"loading {source.name}"):
        tokenizer = source.tokenizer(trust_remote_code)
        text = read(tokenizer, data, length=length, stride=stride, max_windows=max_windows, bos=bos, context=context)
        rolling = None if stream is None else read_stream(tokenizer, data, bos=bos, **stream)
        loaded = source.model(dtype, device, trust_remote_code)
    if rolling is not None:
        check_rolling(loaded, rolling)
    if found is not None:
        found.check_model(model_fingerprint(loaded), Architecture.of(loaded), source.name)
    with progress_bar() as progress:
        if found is None and (rolling is not None or any(method.calibrated for method in methods)):
            found = run(loaded, tokenizer, bos=bos, max_tokens=16384, progress=progress, name=source.name)
        result = measure(
            loaded,
            tokenizer,
            model_name=source.name,
            calibration=found,
            text=text,
            methods=methods,
            checkpoints=checkpoints,
            load_checkpoint=lambda path: load(path, device=device, trust_remote_code=trust_remote_code),
            notes=source.notes,
            rolling=rolling,
            progress=progress,
        )
    result.save(output, force=force)
    return result


def _print_report(found: Any) -> None:
    out = Console()
    out.print(found.table())
    if found.rolling:
        out.print(found.rolling_table())
    for line in found.lines():
        out.print(line, highlight=False)


@app.command(epilog="Example: quantsink inspect smollm2-w8a8")
def inspect(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="A calibration or a checkpoint folder.", show_default=False)
    ],
    cache: Annotated[
        bool, typer.Option("--cache", help="Show what a KV cache weighs: bytes a token, beside bfloat16's.")
    ] = False,
    recipe: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="With --cache on a calibration: the recipe whose kv_cache is meant."),
    ] = None,
    kv_bits: Annotated[
        float | None,
        typer.Option(metavar="B", help="With --cache on a calibration: bits a number, 2 to 8 on average. [default: 4]"),
    ] = None,
    length: Annotated[
        list[int] | None, typer.Option(help="With --cache: tokens of a sequence; may be given again.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what a calibration or a checkpoint holds, without loading the model."""
    from quantsink.cli.inspect import describe

    if cache:
        from quantsink.cli.inspect_cache import describe_cache

        found, shown = describe_cache(path, recipe, kv_bits, length or [1024, 8192, 32768])
    elif recipe or kv_bits is not None or length:
        raise UsageError("--recipe, --kv-bits and --length go with --cache")
    else:
        found, shown = describe(path)
    if as_json:
        print(json.dumps(found))
    else:
        Console().print(shown)


@app.command(epilog="Example: quantsink recipe w8a8 > my.json, edit it, quantsink export ... --recipe my.json")
def recipe(
    name: Annotated[str, typer.Argument(metavar="NAME|FILE", help="A preset, or a file to check.", show_default=False)],
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Print a preset as JSON, to edit; or check a recipe file and print it with every default."""
    from quantsink.recipe import Recipe

    print(Recipe.load(name).to_json(), end="")


@app.command(epilog="Example: quantsink demo -o demo")
def demo(
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Folder to write.")] = Path("demo"),
    force: Force = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """The whole job on SmolLM2-135M: calibrate, export, load, generate, report. A few minutes on two cores."""
    from quantsink.cli.demo import PROMPT, run
    from quantsink.models.source import quiet_loading

    started = time.monotonic()
    with quiet_loading(), progress_bar() as progress:
        exported, found, words = run(
            output, force=force, say=lambda text: stderr.print(text, soft_wrap=True), progress=progress
        )
    seconds = time.monotonic() - started
    if as_json:
        done = {"checkpoint": dataclasses.asdict(exported), "report": found.to_dict(), "generated": words}
        print(json.dumps({**done, "seconds": round(seconds, 1)}))
        return
    out = Console()
    out.print(f"{PROMPT!r} goes on: {words!r}", highlight=False)
    _print_report(found)
    page = output / "report" / "report.html"
    stderr.print(f"written in {seconds:.0f} s: {output}; open {page}", soft_wrap=True)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    for noisy in ("transformers", "huggingface_hub"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    try:
        code = app(given or ["--help"], prog_name="quantsink", standalone_mode=False)
        if code == 130:
            print("quantsink: stopped; calibrate goes on with --resume", file=sys.stderr)
        return code if isinstance(code, int) else 0
    except QuantSinkError as error:
        if "--debug" in given:
            traceback.print_exc()
        print(f"quantsink: {error}", file=sys.stderr)
        return error.exit_code
    except Exception as error:
        if hasattr(error, "format_message"):  # typer's own complaint about the command line
            print(f"quantsink: {error.format_message()} See quantsink --help.", file=sys.stderr)
            return 2
        if "--debug" in given:
            traceback.print_exc()
        print(
            f"quantsink: {type(error).__name__}: {' '.join(str(error).split())[:300]}; --debug shows where",
            file=sys.stderr,
        )
        return 1


if __name__ == "__main__":
    sys.exit(main())
