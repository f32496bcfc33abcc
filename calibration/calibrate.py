"""`calibrate`: text in, statistics out; resumable to the same bits, by one process or several."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from quantsink.calibration.calibration import Calibration
from quantsink.calibration.collect import FIRST_ROW, Collector, collecting
from quantsink.calibration.partial import Inputs, PartialState, groups
from quantsink.calibration.processes import ALONE, Processes
from quantsink.calibration.records import Domain, Settings, Statistics
from quantsink.calibration.text import Windows, parse_spec, sample_self, tensors, windows
from quantsink.errors import DataError, UsageError
from quantsink.hf.convert import check_unquantized
from quantsink.models.architecture import Architecture
from quantsink.models.fingerprint import model_fingerprint, tokenizer_fingerprint
from quantsink.models.inputs import input_device
from quantsink.models.source import check_length, check_vocabulary
from quantsink.progress import Progress

DEFAULT_DATA = ("builtin:prose", "builtin:code")


def read_windows(
    model: Any,
    tokenizer: Any,
    data: Sequence[str],
    *,
    seq_len: int,
    max_tokens: int,
    bos: bool,
    seed: int,
    encoder: bool = False,
) -> list[tuple[str, Windows]]:
    """(spec, windows) of each domain; `max_tokens` is shared evenly. `model` is only used for the spec `self`."""
    sources = [parse_spec(spec) for spec in data]
    names = [source.name for source in sources]
    if len(set(names)) < len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise UsageError(f"--data: two texts are called {twice}; rename one, or leave it out if it is the same")
    if not sources:
        raise UsageError("--data: no text given")
    share = max_tokens // len(sources)
    if share < seq_len:
        raise UsageError(f"--max-tokens {max_tokens}: less than one window of {seq_len} tokens for each text")
    texts = []
    for source in sources:
        if source.spec == "self":
            if encoder:
                raise UsageError("--data self: an encoder writes no text; name another")
            text = sample_self(model, tokenizer, tokens=share, seq_len=seq_len, seed=seed, bos=bos)
        else:
            text = windows(tokenizer, source, seq_len=seq_len, max_tokens=share, bos=bos, encoder=encoder)
        texts.append((source.spec, text))
    return texts


def calibrate(
    model: Any,
    tokenizer: Any,
    data: str | Sequence[str] | torch.Tensor = DEFAULT_DATA,
    *,
    seq_len: int = 512,
    max_tokens: int = 65536,
    sink_size: int = 1,
    query_rows: int | None = 64,
    error_windows: int = 4,
    bos: bool = True,
    seed: int = 0,
    folder: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    name: str | None = None,
    processes: Processes = ALONE,
) -> Calibration:
    """Measure every attention head and linear layer of `model` on text; `quantize` decides by what is measured.

    Example:
        calibration = quantsink.calibrate(model, tokenizer, ["builtin:prose", "my.txt"], max_tokens=16384)
        calibration.save("calibration")  # the folder that `quantsink export --calibration` reads

    Args:
        model: a transformers model in eval mode, not quantized. It is not changed.
        tokenizer: the model's own; None where `data` is a tensor.
        data: one text or several: builtin:prose, builtin:code, self, a .txt, .jsonl or .parquet file, or a hub data
            set (docs/cli.md). Each is a domain of its own. Without a tokenizer: `[N, C, H, W]` for a model of pictures,
            `[N, L, K]` for one whose main input is `inputs_embeds`.
        seq_len: tokens per window, BOS included.
        max_tokens: tokens in all, shared evenly by the domains.
        sink_size: sink tokens at the start of each sequence.
        query_rows: query rows measured per window, evenly spaced; None measures every row.
        error_windows: windows per domain on which each head's INT8 error is measured too.
        bos: False leaves the BOS token out, for models that were trained without one.
        seed: of the text that `self` samples.
        folder: holds the partial state, from which `resume` continues after a kill. The result is not saved here.
        resume: continue from the partial state in `folder`.
        progress: called after each window with `(domain, done, total)`.
        name: the model's name in the result; by default the name it was loaded by.
        processes: from `launched()`, where several share the windows; each returns the whole calibration.

    Returns:
        the `Calibration`. `quantize` and `SinkCache.from_calibration` take it, `heads()` lists what was measured.

    Raises:
        UsageError, DataError: invalid options or unreadable text.
        ArchitectureError, ModelError: a model of unknown architecture, or already quantized.
        CalibrationError: `resume` with another model, text, settings or number of processes than the partial state's;
            processes that do not read the same model or text.
    """
    check_unquantized(model)
    architecture = Architecture.of(model)
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    settings = Settings(seq_len, max_tokens, sink_size, query_rows, error_windows, bos, seed, dtype)
    _check(settings)
    texts = _read(model, tokenizer, data, settings, encoder=not architecture.causal)
    inputs = Inputs(model_fingerprint(model), tokenizer_fingerprint(tokenizer), settings, tuple(_domains(texts)))
    state = PartialState(Path(folder) if folder is not None else None, inputs, processes)
    processes.check_same(state.identity)
    collectors = {
        text.name: Collector(
            model,
            architecture,
            sink_size=sink_size,
            query_rows=query_rows,
            error_windows=error_windows,
            first=processes.rank,
            step=processes.world,
        )
        for _, text in texts
    }
    if resume:
        finished = processes.from_first(state.finished() if processes.first else None)
        if finished is not None:
            return finished
        state.read(collectors)
    device = input_device(model)
    for _, text in texts:
        collector = collectors[text.name]
        with collecting(collector):
            for ids in text.ids[processes.rank :: processes.world][collector.windows :]:
                collector.run(ids[None].to(device))
                state.save(collectors)
                processes.stop_if_another_failed()
                if progress is not None and processes.first:
                    progress(text.name, min(collector.windows * processes.world, len(text.ids)), len(text.ids))
    for collector in collectors.values():
        processes.merge([fields for group in groups(collector) for fields in group.values()])
    for domain, collector in collectors.items():
        if not any(bool(fields["rows"].any()) for fields in collector.heads.values()):
            raise DataError(f"data {domain!r}: no window is longer than {FIRST_ROW} tokens; give longer text")
    return Calibration(
        architecture.model_type,
        name or model.config._name_or_path or type(model).__name__,
        inputs.model,
        inputs.tokenizer,
        texts[0][1].bos,
        settings,
        architecture.attentions,
        inputs.domains,
        {domain: Statistics(c.heads, c.linears, c.experts) for domain, c in collectors.items()},
    )


def _check(settings: Settings) -> None:
    if not 1 <= settings.sink_size < settings.seq_len:
        raise UsageError(f"--sink-size {settings.sink_size}: at least 1 and below --seq-len {settings.seq_len}")
    if settings.query_rows is not None and settings.query_rows < 1:
        raise UsageError(f"--query-rows {settings.query_rows}: 1 or more")
    if settings.seq_len <= FIRST_ROW:
        raise UsageError(f"--seq-len {settings.seq_len}: queries before position {FIRST_ROW} do not count; give more")
    if settings.error_windows < 0:
        raise UsageError(f"--error-windows {settings.error_windows}: 0 or more")


def _read(
    model: Any, tokenizer: Any, data: str | Sequence[str] | torch.Tensor, settings: Settings, *, encoder: bool
) -> list[tuple[str, Windows]]:
    """(spec, windows) of each domain, of lengths and ids that the model takes."""
    if isinstance(data, torch.Tensor):
        vectors = tensors(model, data)
        return [(vectors.name, vectors)]
    if model.main_input_name != "input_ids":
        raise UsageError(f"{type(model).__name__} takes {model.main_input_name}; give a tensor of them as data")
    check_length(model, settings.seq_len, "--seq-len")
    texts = read_windows(
        model,
        tokenizer,
        [data] if isinstance(data, str) else data,
        seq_len=settings.seq_len,
        max_tokens=settings.max_tokens,
        bos=settings.bos,
        seed=settings.seed,
        encoder=encoder,
    )
    for _, text in texts:
        check_vocabulary(model, max(int(ids.max()) for ids in text.ids))
    return texts


def _domains(texts: Sequence[tuple[str, Windows]]) -> Iterator[Domain]:
    for spec, t in texts:
        yield Domain(t.name, spec, t.tokens, len(t.ids), t.documents, t.removed_bos, t.complete, t.fingerprint)


__all__ = ["DEFAULT_DATA", "calibrate", "read_windows"]
