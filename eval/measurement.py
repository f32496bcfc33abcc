"""`measure`: the reference once, then each method and each checkpoint on the same windows."""

import copy
import dataclasses
import functools
import importlib.metadata
import os
import platform
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantsink.calibration.calibration import Calibration
from quantsink.calibration.text import parse_spec
from quantsink.calibration.text import windows as tokenized
from quantsink.errors import CheckpointError, ModelError, QuantSinkError, UsageError
from quantsink.eval.caches import Weight
from quantsink.eval.divergence import PREFILL, LogProbs, WindowSums, log_probs, score, score_reference
from quantsink.eval.footprint import count_parameters, footprint, payload_on_disk
from quantsink.eval.methods import METHODS, PEERS, Method, NotRunError, quiet_peers
from quantsink.eval.perplexity import EvalText
from quantsink.eval.report import Report
from quantsink.eval.rolling import Stream, check_rolling, measure_rolling, plan_rolling
from quantsink.eval.rows import CalibrationFacts, Conditions, Row, Versions
from quantsink.hf.convert import check_unquantized
from quantsink.hf.sink_cache import SinkCache
from quantsink.models.architecture import Architecture
from quantsink.models.fingerprint import model_fingerprint
from quantsink.models.source import check_length, check_vocabulary
from quantsink.progress import Progress

LoadCheckpoint = Callable[[Path], Any]


@dataclasses.dataclass(frozen=True)
class _Bench:
    """The reference side of every row."""

    model: Any
    architecture: Architecture
    parameters: int
    text: EvalText
    store: LogProbs
    sums: tuple[WindowSums, ...]
    progress: Progress | None


def measure(
    model: Any,
    tokenizer: Any,
    *,
    model_name: str,
    calibration: Calibration | None,
    text: EvalText,
    methods: Sequence[Method],
    checkpoints: Sequence[Path] = (),
    load_checkpoint: LoadCheckpoint | None = None,
    folder_names: Sequence[str] | None = None,
    notes: tuple[str, ...] = (),
    rolling: Stream | None = None,
    progress: Progress | None = None,
) -> Report:
    """Measure methods and checkpoints against the unquantized `model`, which is not changed.

    Args:
        model_name: hub id or path; of a path the report shows only the last part.
        calibration: of this model; None where no method needs one.
        load_checkpoint: loads the model of a checkpoint folder, in the reference's dtype.
        folder_names: what the report calls each checkpoint's folder; None: the last two parts of its path.
        notes: facts about the model that a reader of the figures must know.
        rolling: the text to run through a rolling cache, sinks kept and dropped; needs a calibration.

    Raises:
        UsageError, CalibrationError, ModelError, ArchitectureError: before any work.
        CheckpointError: a checkpoint of another architecture, vocabulary or dtype than the reference.
        QuantSinkError: a method whose logits are not finite; a row of another toolkit states it instead.

    A method with a cache needs `text` with a context of `PREFILL` tokens: until then the cache adds no error.
    """
    check_unquantized(model)
    architecture, parameters = Architecture.of(model), count_parameters(model)
    if not architecture.causal:
        raise ModelError(f"{type(model).__name__}: an encoder predicts no next token, so there is nothing to report")
    check_length(model, text.length, "--length")
    check_vocabulary(model, max(int(window.ids.max()) for window in text.windows))
    fingerprint = model_fingerprint(model)
    if calibration is not None:
        calibration.check_model(fingerprint, architecture, model_name)
    for method in methods:
        if method.calibrated and calibration is None:
            raise UsageError(f"{method.name}: needs a calibration of {model_name}; give --calibration")
        if method.cache is not None and text.context < PREFILL:
            raise UsageError(
                f"{method.name}: its error shows only after the prefill; read the text with context={PREFILL}"
            )
    if checkpoints and load_checkpoint is None:
        raise UsageError("checkpoints: load_checkpoint is missing; pass a function that loads the model of a folder")
    plans = {}
    if rolling is not None:
        check_vocabulary(model, int(rolling.ids.max()))
        check_rolling(model, rolling)
        if calibration is None:
            raise UsageError(f"--rolling: needs a calibration of {model_name}; give --calibration")
        plans = plan_rolling(model, calibration, rolling)
    payloads = [payload_on_disk(folder) for folder in checkpoints]
    names = [f"checkpoint ({name})" for name in folder_names or _names(checkpoints)]
    conditions = _conditions(model, tokenizer, model_name, fingerprint[0], parameters, text, calibration)
    with log_probs() as store:
        sums = score_reference(model, text.windows, store, progress=progress)
        bench = _Bench(model, architecture, parameters, text, store, sums, progress)
        first = METHODS["reference"]
        size = footprint(model, architecture, parameters)
        rows = [Row.of(first.name, first.description, first.group, size, sums, sums)]
        rows += [_measure_method(bench, method, calibration) for method in methods if method.name != first.name]
        for folder, name, payload in zip(checkpoints, names, payloads, strict=True):
            assert load_checkpoint is not None
            rows.append(_measure_checkpoint(bench, folder, name, payload, load_checkpoint))
    curves = () if rolling is None else measure_rolling(model, plans, rolling, progress)
    return Report(conditions, tuple(rows), notes, curves)


def _measure_method(bench: _Bench, method: Method, calibration: Calibration | None) -> Row:
    weight = Weight()
    try:
        with quiet_peers():
            built = method.build(copy.deepcopy(bench.model), calibration)
            make = None if method.cache is None else method.cache(built, calibration)
            sums = score(
                built,
                bench.text.windows,
                bench.store,
                name=method.name,
                progress=bench.progress,
                cache=make,
                see=weight.see,
            )
    except NotRunError as error:
        return Row(method.name, method.description, method.group, f"not run: {error}")
    except QuantSinkError as error:
        if method.group not in PEERS:
            raise
        return Row(method.name, method.description, method.group, f"failed: {error}")
    size = footprint(built, bench.architecture, bench.parameters)
    if make is not None:
        size = dataclasses.replace(size, bits_kv=weight.bits, kv_bytes=weight.size)
    return Row.of(method.name, method.description, method.group, size, sums, bench.sums)


def _measure_checkpoint(bench: _Bench, folder: Path, name: str, payload: int, load: LoadCheckpoint) -> Row:
    model = load(folder)
    _check_alike(model, bench.model, folder)
    weight, description, make = Weight(), "exported, then loaded again", None
    plan = getattr(model, "kv_cache_plan", None)
    if plan is not None and bench.text.context >= PREFILL:
        description += ", through its own KV cache"
        make = functools.partial(SinkCache, model, plan)
    elif plan is not None:
        description += "; its own KV cache is measured with --kv-bits"
    sums = score(model, bench.text.windows, bench.store, name=name, progress=bench.progress, cache=make, see=weight.see)
    size = footprint(model, bench.architecture, bench.parameters, payload)
    if make is not None:
        size = dataclasses.replace(size, bits_kv=weight.bits, kv_bytes=weight.size)
    return Row.of(name, description, "checkpoint", size, sums, bench.sums)


ALIKE = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
"""Config fields in which a checkpoint must agree with its reference."""


def _check_alike(model: Any, reference: Any, folder: Path) -> None:
    configs = [m.config.get_text_config(decoder=True) for m in (model, reference)]
    for name in ALIKE:
        value, expected = (getattr(config, name, None) for config in configs)
        if value != expected:
            raise CheckpointError(
                f"{folder}: {name} is {value}, the reference's is {expected}; name the model it was exported from"
            )
    if model.dtype != reference.dtype:
        raise CheckpointError(
            f"{folder}: holds {_dtype(model)}, the reference is {_dtype(reference)}, so their rows cannot be compared; "
            f"load the reference with --dtype {_dtype(model)} or export with --dtype {_dtype(reference)}"
        )


def _names(checkpoints: Sequence[Path]) -> list[str]:
    """The last two parts of each path where they differ, else the whole paths."""
    short = [str(Path(*folder.parts[-2:])) for folder in checkpoints]
    folders = short if len(set(short)) == len(short) else [str(folder) for folder in checkpoints]
    if len(set(folders)) < len(folders):
        raise UsageError(f"checkpoint {folders[0]}: named twice; name each folder once")
    return folders


def _conditions(
    model: Any,
    tokenizer: Any,
    name: str,
    fingerprint: str,
    parameters: int,
    text: EvalText,
    calibration: Calibration | None,
) -> Conditions:
    facts = None
    if calibration is not None:
        domains = calibration.domains
        facts = CalibrationFacts(
            tuple(domain.name for domain in domains),
            sum(domain.tokens for domain in domains),
            calibration.settings.seq_len,
            covers_text(calibration, tokenizer, text),
        )
    return Conditions(
        model=Path(name).name if Path(name).exists() else name,
        model_fingerprint=fingerprint,
        parameters=parameters,
        dtype=_dtype(model),
        data=text.name,
        data_fingerprint=text.fingerprint,
        length=text.length,
        stride=text.stride,
        context=text.context,
        bos=text.bos,
        windows=len(text.windows),
        scored=text.scored,
        complete=text.complete,
        calibration=facts,
        device=str(next(model.parameters()).device),
        threads=torch.get_num_threads(),
        versions=_versions(),
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def covers_text(calibration: Calibration, tokenizer: Any, text: EvalText) -> bool:
    """Whether the calibration read this text: the same spec or file, or a copy that begins with the same tokens."""
    if not text.spec:
        return False
    if any(_same(domain.spec, text.spec) for domain in calibration.domains):
        return True
    settings = calibration.settings
    share = settings.max_tokens // len(calibration.domains)
    read = tokenized(
        tokenizer, parse_spec(text.spec), seq_len=settings.seq_len, max_tokens=share, bos=calibration.bos is not None
    )
    return any(domain.fingerprint == read.fingerprint for domain in calibration.domains)


def _same(first: str, second: str) -> bool:
    files = [os.path.realpath(os.path.expanduser(spec)) for spec in (first, second)]
    return first == second or (files[0] == files[1] and os.path.exists(files[0]))


def _dtype(model: nn.Module) -> str:
    return str(model.dtype).removeprefix("torch.")


def _versions() -> Versions:
    def version(package: str) -> str:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return "not installed"

    packages = ("torch", "transformers", "quantsink", "bitsandbytes", "hqq")
    return Versions(platform.python_version(), *(version(package) for package in packages))
