"""The command line. Each command takes --json (one object on stdout, everything else on stderr) and --debug.

Exit codes: 0 done, 1 failed, 2 wrong usage. An error is one line; --debug adds the traceback. Torch and transformers
are imported inside the commands, so that --help and a refused option take a fraction of a second.
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


def _print_version(requested: bool) -> None:
    if requested:
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
            help="Text to calibrate on; repeat the option for several: builtin:prose, builtin:code, self (sampled "
            "from the model), a .txt, .jsonl or .parquet file, or a hub data set NAME[:CONFIG][:SPLIT]. "
            "[default: builtin:prose and builtin:code]",
            show_default=False,
        ),
    ] = None,
    seq_len: Annotated[int, typer.Option(help="Tokens per window, BOS included.")] = 512,
    max_tokens: Annotated[int, typer.Option(help="Tokens in all, shared evenly by the texts.")] = 65536,
    sink_size: Annotated[int, typer.Option(help="Sink tokens at the start of each sequence.")] = 1,
    query_rows: Annotated[
        int, typer.Option(help="Query rows measured per window, evenly spaced; 0 measures all.")
    ] = 64,
    error_windows: Annotated[
        int, typer.Option(help="Windows per text on which each head's INT8 error is measured.")
    ] = 4,
    seed: Annotated[int, typer.Option(help="Seed of the text that --data self samples.")] = 0,
    bos: Bos = True,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    trust_remote_code: TrustRemoteCode = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an unfinished calibration in DIR.")] = False,
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
                f"{output}: holds an unfinished calibration; continue it with --resume or start again with --force"
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
        Path, typer.Option(metavar="DIR", help="Folder that `quantsink calibrate` wrote.", show_default=False)
    ],
    recipe: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="Preset (w8a16, w8a8, w8a8-static) or a JSON file.")
    ] = "w8a8",
    native_heads: Annotated[
        int | None, typer.Option(metavar="K", help="Keep the K heads with the largest measured error native.")
    ] = None,
    kv_bits: Annotated[
        float | None,
        typer.Option(
            metavar="B", help="Let the loaded model keep its KV cache in B bits per number on average, 2 to 8."
        ),
    ] = None,
    format_: Annotated[
        str, typer.Option("--format", help="Checkpoint format; the only one is quantsink.")
    ] = "quantsink",
    max_shard_size: Annotated[
        str, typer.Option(help="Largest safetensors shard. Memory use does not depend on it.")
    ] = "5GB",
    measure: Annotated[
        bool,
        typer.Option(
            help="Measure KL and perplexity on held-out text for the model card. Skipped where the model does not "
            "fit into memory twice; nothing else needs it in memory."
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
    if format_ != "quantsink":
        raise UsageError(f"--format {format_}: the only supported format is 'quantsink'")
    from quantsink.export.export import export as run
    from quantsink.models.source import quiet_loading

    with quiet_loading(), progress_bar() as progress:
        exported = run(
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
        print(json.dumps(dataclasses.asdict(exported)))
        return
    for note in exported.notes:
        stderr.print(f"note: {note}", soft_wrap=True)
    out = Console()
    out.print(f"{exported.checkpoint}: {exported.payload_bytes:,} bytes, {exported.bits_weight:.2f} bits per parameter")
    if exported.heads:
        out.print("heads by route: " + ", ".join(f"{count} {route}" for route, count in exported.heads.items()))
    if exported.measured:
        m = exported.measured
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
        str,
        typer.Option(
            metavar="SPEC",
            help="Text to measure on, as in `calibrate --data`; choose text that the calibration did not read.",
        ),
    ] = "builtin:heldout",
    calibration: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Calibration that the methods use. [default: a new one on built-in text]",
            show_default=False,
        ),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="all, none, or names separated by commas. [default: all; none with --kv-bits or --rolling]",
            show_default=False,
        ),
    ] = None,
    kv_bits: Annotated[
        str | None,
        typer.Option(
            "--kv-bits",
            metavar="WIDTHS",
            help="Measure KV caches of 8, 4, 3 or 2 bits, separated by commas. Each cache is filled with the first 128 "
            "tokens of a window, then 32 at a time; in every row, only tokens after the first 128 are scored.",
            show_default=False,
        ),
    ] = None,
    rolling: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Also run N tokens as one sequence through a rolling cache, with sinks kept and with sinks dropped, "
            "in 8 bits or the first of --kv-bits. A multiple of 4096, from 8192.",
            show_default=False,
        ),
    ] = None,
    rolling_length: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Tokens in the rolling cache, sinks included. [default: 2048]", show_default=False
        ),
    ] = None,
    length: Annotated[int, typer.Option(help="Tokens per window, BOS included.")] = 1024,
    stride: Annotated[
        int | None,
        typer.Option(help="Tokens from one window's start to the next. [default: no overlap]", show_default=False),
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
    """Measure what quantization costs: perplexity, KL and true bits, next to baselines and controls."""
    if rolling is None and rolling_length is not None:
        raise UsageError("--rolling-length needs --rolling")
    from quantsink.calibration import Calibration
    from quantsink.calibration import calibrate as run_calibration
    from quantsink.calibration.text import check_not_empty, parse_spec
    from quantsink.checkpoint.save_load import load
    from quantsink.eval import (
        PREFILL,
        cache_methods,
        check_rolling,
        measure,
        parse_methods,
        parse_widths,
        read,
        read_stream,
    )
    from quantsink.eval.report import is_report
    from quantsink.eval.rolling import check_tokens
    from quantsink.files import check_free
    from quantsink.models.architecture import Architecture
    from quantsink.models.fingerprint import model_fingerprint
    from quantsink.models.source import find

    widths = parse_widths(kv_bits) if kv_bits is not None else ()
    if methods is None:
        methods = "none" if widths or rolling is not None else "all"
    if rolling is not None:
        check_tokens(rolling)
    check_free(output, is_report, force=force)
    check_not_empty(parse_spec(data))
    measured = (*parse_methods(methods), *cache_methods(widths))
    source = find(model)
    statistics = Calibration.load(calibration) if calibration is not None else None
    if statistics is not None and source.gguf is None:
        statistics.check_config(source.config(trust_remote_code), model)
    stream = None
    with loading(f"loading {model}"):
        tokenizer = source.tokenizer(trust_remote_code)
        text = read(
            tokenizer,
            data,
            length=length,
            stride=stride,
            max_windows=max_windows or None,
            bos=bos,
            context=PREFILL if any(method.cache is not None for method in measured) else 0,
        )
        if rolling is not None:
            bits, kept = widths[0] if widths else 8, 2048 if rolling_length is None else rolling_length
            stream = read_stream(tokenizer, data, tokens=rolling, bits=bits, max_length=kept, bos=bos)
        reference = source.model(dtype, device, trust_remote_code)
    if stream is not None:
        check_rolling(reference, stream)
    if statistics is not None:
        statistics.check_model(model_fingerprint(reference), Architecture.of(reference), model)
    with progress_bar() as progress:
        if statistics is None and (stream is not None or any(method.calibrated for method in measured)):
            statistics = run_calibration(reference, tokenizer, bos=bos, max_tokens=16384, progress=progress, name=model)
        result = measure(
            reference,
            tokenizer,
            model_name=model,
            calibration=statistics,
            text=text,
            methods=measured,
            checkpoints=checkpoints or [],
            load_checkpoint=lambda path: load(path, device=device, trust_remote_code=trust_remote_code),
            notes=source.notes,
            rolling=stream,
            progress=progress,
        )
    result.save(output, force=force)
    if as_json:
        print(json.dumps(result.to_dict()))
    else:
        _print_report(result)
        stderr.print(f"written: {output}", soft_wrap=True)


def _print_report(result: Any) -> None:
    out = Console()
    out.print(result.table())
    if result.rolling:
        out.print(result.rolling_table())
    for line in result.lines():
        out.print(line, highlight=False)


@app.command(epilog="Example: quantsink inspect smollm2-w8a8")
def inspect(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="A calibration or a checkpoint folder.", show_default=False)
    ],
    cache: Annotated[
        bool, typer.Option("--cache", help="Show the size of the KV cache: bytes per token, next to bfloat16's.")
    ] = False,
    recipe: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="With --cache on a calibration: recipe whose kv_cache is shown."),
    ] = None,
    kv_bits: Annotated[
        float | None,
        typer.Option(
            metavar="B", help="With --cache on a calibration: bits per number on average, 2 to 8. [default: 4]"
        ),
    ] = None,
    length: Annotated[
        list[int] | None,
        typer.Option(
            help="With --cache: tokens of a sequence; repeat the option for several. [default: 1024, 8192, 32768]"
        ),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what a calibration or a checkpoint holds, without loading the model."""
    if not cache and (recipe or kv_bits is not None or length):
        raise UsageError("--recipe, --kv-bits and --length need --cache")
    if cache:
        from quantsink.cli.inspect_cache import describe_cache

        facts, table = describe_cache(path, recipe, kv_bits, length or [1024, 8192, 32768])
    else:
        from quantsink.cli.inspect import describe

        facts, table = describe(path)
    if as_json:
        print(json.dumps(facts))
    else:
        Console().print(table)


@app.command(epilog="Example: quantsink recipe w8a8 > my.json, edit it, quantsink export ... --recipe my.json")
def recipe(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME|FILE", help="Preset (w8a16, w8a8, w8a8-static) or a JSON file to check.", show_default=False
        ),
    ],
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Print a preset as JSON for editing, or check a recipe file and print it with every default."""
    from quantsink.recipe import Recipe

    print(Recipe.load(name).to_json(), end="")


@app.command(epilog="Example: quantsink demo -o demo")
def demo(
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Folder to write.")] = Path("demo"),
    force: Force = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Try everything on SmolLM2-135M: calibrate, export, load, generate, report. A few minutes on two cores."""
    from quantsink.cli.demo import PROMPT, run
    from quantsink.models.source import quiet_loading

    started = time.monotonic()
    with quiet_loading(), progress_bar() as progress:
        exported, result, words = run(
            output, force=force, say=lambda text: stderr.print(text, soft_wrap=True), progress=progress
        )
    seconds = time.monotonic() - started
    if as_json:
        parts = {"checkpoint": dataclasses.asdict(exported), "report": result.to_dict(), "generated": words}
        print(json.dumps({**parts, "seconds": round(seconds, 1)}))
        return
    out = Console()
    out.print(f"{PROMPT!r} continues: {words!r}", highlight=False)
    _print_report(result)
    page = output / "report" / "report.html"
    stderr.print(f"written in {seconds:.0f} s: {output}; open {page}", soft_wrap=True)


@dataclasses.dataclass(frozen=True)
class Failure:
    """The error that ended a command. `--json` prints these fields."""

    type: str
    message: str
    exit_code: int

    @classmethod
    def of(cls, error: Exception) -> "Failure":
        name = type(error).__name__
        if isinstance(error, QuantSinkError):
            return cls(name, str(error), error.exit_code)
        if not hasattr(error, "format_message"):
            text = " ".join(str(error).split())[:300]
            return cls(name, f"{name}: {text}; --debug shows the traceback", 1)
        # Only typer's own errors about the command line have this method.
        text = " ".join(error.format_message().split())
        context = getattr(error, "ctx", None)
        command = "quantsink" if context is None else context.command_path
        stop = "" if text.endswith((".", "?", "!")) else "."
        return cls("UsageError", f"{text}{stop} See {command} --help.", 2)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    for noisy in ("transformers", "huggingface_hub"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    try:
        code = app(words or ["--help"], prog_name="quantsink", standalone_mode=False)
        if code != 130:  # typer returns 130 after Ctrl-C
            return code if isinstance(code, int) else 0
        failure = Failure("KeyboardInterrupt", "stopped; an unfinished calibrate continues with --resume", 130)
    except Exception as error:
        if "--debug" in words:
            traceback.print_exc()
        failure = Failure.of(error)
    print(f"quantsink: {failure.message}", file=sys.stderr)
    if "--json" in words:
        print(json.dumps({"error": dataclasses.asdict(failure)}))
    return failure.exit_code


if __name__ == "__main__":
    sys.exit(main())
