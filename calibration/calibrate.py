"""`calibrate`: text in, statistics out; killed at any moment, resumed to the same bits, by one process or several."""

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from quantsink.calibration.calibration import (
    FACTS,
    PARTIAL,
    SCHEMA,
    Calibration,
    Domain,
    Settings,
    Statistics,
    partials,
)
from quantsink.calibration.collect import FIRST_ROW, Collector, collecting
from quantsink.calibration.processes import ALONE, Processes
from quantsink.calibration.statistics import Fields
from quantsink.calibration.text import Windows, parse_spec, sample_self, tensors, windows
from quantsink.errors import CalibrationError, DataError, UsageError
from quantsink.files import write_bytes
from quantsink.hf.convert import check_unquantized
from quantsink.models.architecture import Architecture
from quantsink.models.fingerprint import model_fingerprint, tokenizer_fingerprint
from quantsink.models.inputs import input_device
from quantsink.models.source import check_length, check_vocabulary

DEFAULT_DATA = ("builtin:prose", "builtin:code")
SAVE_EVERY = 10.0
"""Seconds between two saves of the partial statistics, at least."""
SAVE_SHARE = 0.05
"""Largest share of the time that saving may take."""

Progress = Callable[[str, int, int], None]
"""Called with the domain, windows done and windows in all; of several processes by the first alone."""


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
    """(spec, windows) of each domain; `max_tokens` is shared evenly. `model` is only asked for `self` text."""
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
    found = []
    for source in sources:
        if source.spec == "self":
            if encoder:
                raise UsageError("--data self: an encoder writes no text; name another")
            part = sample_self(model, tokenizer, tokens=share, seq_len=seq_len, seed=seed, bos=bos)
        else:
            part = windows(tokenizer, source, seq_len=seq_len, max_tokens=share, bos=bos, encoder=encoder)
        found.append((source.spec, part))
    return found


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
    """Measure every attention head and linear layer of `model` on text.

    Args:
        data: one SPEC or several; each is a domain of its own (docs/cli.md). With `tokenizer` None: `[N, C, H, W]` for
            a model of pictures, `[N, L, K]` for one whose main input is `inputs_embeds`.
        seq_len: tokens a window, BOS included.
        max_tokens: tokens in all, shared evenly by the domains.
        sink_size: sink tokens at the start of each sequence.
        query_rows: query rows measured a window, evenly spread; None measures every row.
        error_windows: windows a domain in which each head's INT8 error is measured too.
        bos: False leaves the BOS token out, for models that were trained without one.
        folder: where the partial state is kept, so that `resume` can go on after a kill; the result is not saved here.
        resume: go on with the partial state in `folder`.
        processes: of `launched()`, where several share the windows; each returns the whole calibration.

    Raises:
        UsageError, DataError: options or text that cannot be used.
        ArchitectureError, ModelError: a model that is not understood, or quantized already.
        CalibrationError: `resume` with another model, text, settings or number of processes than the partial state's;
            processes that do not read the same model or text.
    """
    check_unquantized(model)
    architecture = Architecture.of(model)
    if not 1 <= sink_size < seq_len:
        raise UsageError(f"--sink-size {sink_size}: at least 1 and below --seq-len {seq_len}")
    if query_rows is not None and query_rows < 1:
        raise UsageError(f"--query-rows {query_rows}: 1 or more")
    if seq_len <= FIRST_ROW:
        raise UsageError(f"--seq-len {seq_len}: queries before position {FIRST_ROW} do not count; give more")
    if error_windows < 0:
        raise UsageError(f"--error-windows {error_windows}: 0 or more")
    if isinstance(data, torch.Tensor):
        found = tensors(model, data)
        texts = [(found.name, found)]
    else:
        if model.main_input_name != "input_ids":
            raise UsageError(f"{type(model).__name__} takes {model.main_input_name}; give a tensor of them as data")
        check_length(model, seq_len, "--seq-len")
        specs = [data] if isinstance(data, str) else list(data)
        sizes: dict[str, Any] = {"seq_len": seq_len, "max_tokens": max_tokens, "bos": bos, "seed": seed}
        texts = read_windows(model, tokenizer, specs, encoder=not architecture.causal, **sizes)
        for _, text in texts:
            check_vocabulary(model, max(int(ids.max()) for ids in text.ids))
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    settings = Settings(seq_len, max_tokens, sink_size, query_rows, error_windows, bos, seed, dtype)
    label = name or model.config._name_or_path or type(model).__name__
    facts = _Facts(
        model_fingerprint(model), tokenizer_fingerprint(tokenizer), settings, _domains(texts), texts[0][1].bos
    )
    state = _State(Path(folder) if folder is not None else None, facts, processes)
    processes.check_same(state.identity)
    options = {"sink_size": sink_size, "query_rows": query_rows, "error_windows": error_windows}
    options |= {"first": processes.rank, "step": processes.world}
    collectors = {text.name: Collector(model, architecture, **options) for _, text in texts}  # type: ignore[arg-type]
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
    for part in collectors.values():
        processes.merge([fields for group in _groups(part) for fields in group.values()])
    for name, part in collectors.items():
        if not any(bool(fields["rows"].any()) for fields in part.heads.values()):
            raise DataError(f"data {name!r}: no window is longer than {FIRST_ROW} tokens; give longer text")
    statistics = {name: Statistics(part.heads, part.linears, part.experts) for name, part in collectors.items()}
    return Calibration(
        architecture.model_type,
        label,
        facts.model,
        facts.tokenizer,
        facts.bos,
        settings,
        architecture.attentions,
        facts.domains,
        statistics,
    )


def _domains(texts: list[tuple[str, Windows]]) -> tuple[Domain, ...]:
    return tuple(
        Domain(t.name, spec, t.tokens, len(t.ids), t.documents, t.removed_bos, t.complete, t.fingerprint)
        for spec, t in texts
    )


@dataclasses.dataclass(frozen=True)
class _Facts:
    model: tuple[str, str]
    tokenizer: str
    settings: Settings
    domains: tuple[Domain, ...]
    bos: int | None


class _State:
    """The partial statistics on disk: each process's safetensors file, written whole, with what it belongs to in its
    metadata.
    """

    def __init__(self, folder: Path | None, facts: _Facts, processes: Processes) -> None:
        own = PARTIAL if processes.first else f"partial-{processes.rank}-of-{processes.world}.safetensors"
        self.folder, self.path = folder, folder / own if folder is not None else None
        self.facts, self.due = facts, time.monotonic() + SAVE_EVERY
        self.identity = {
            "schema": str(SCHEMA),
            "number of processes": str(processes.world),
            "model": facts.model[0],
            "tokenizer": facts.tokenizer,
            "versions of torch and transformers": f"{torch.__version__} {transformers.__version__}",
            "settings": json.dumps(dataclasses.asdict(facts.settings)),
            "data": json.dumps([dataclasses.asdict(domain) for domain in facts.domains]),
        }

    def save(self, collectors: dict[str, Collector]) -> None:
        started = time.monotonic()
        if self.path is None or started < self.due:
            return
        tensors = {f"{d}/{key}": value for d, c in collectors.items() for key, value in _tensors(c).items()}
        done = {domain: collector.windows for domain, collector in collectors.items()}
        write_bytes(self.path, save(tensors, {**self.identity, "windows": json.dumps(done)}))
        ended = time.monotonic()
        self.due = ended + max(SAVE_EVERY, (ended - started) / SAVE_SHARE)

    def finished(self) -> Calibration | None:
        """The calibration that lies complete in the folder already, where it is the one that was asked for."""
        if self.folder is None or partials(self.folder) or not (self.folder / FACTS).is_file():
            return None
        found = Calibration.load(self.folder)
        same = {
            "model": found.fingerprint == self.facts.model,
            "tokenizer": found.tokenizer_fingerprint == self.facts.tokenizer,
            "settings": found.settings == self.facts.settings,
            "data": found.domains == self.facts.domains,
        }
        for key, good in same.items():
            if not good:
                raise CalibrationError(f"{self.folder}: finished with another {key}; choose another -o or pass --force")
        return found

    def read(self, collectors: dict[str, Collector]) -> None:
        if self.path is None or not self.path.is_file():
            return
        try:
            with safe_open(self.path, "pt") as file:
                metadata = file.metadata() or {}
                for key, value in self.identity.items():
                    if metadata.get(key) != value:
                        raise CalibrationError(
                            f"{self.path}: begun with another {key}; repeat the first command with --resume, "
                            "or start again with --force"
                        )
                done = json.loads(metadata["windows"])
                for domain, collector in collectors.items():
                    collector.windows = done[domain]
                    for group in _groups(collector):
                        for module, fields in group.items():
                            for field in fields:
                                fields[field] = file.get_tensor(f"{domain}/{module}/{field}").clone()
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise CalibrationError(f"{self.path}: damaged: {error}; start again with --force") from error


def _groups(collector: Collector) -> tuple[dict[str, Fields], ...]:
    return collector.heads, collector.linears, collector.experts


def _tensors(collector: Collector) -> dict[str, torch.Tensor]:
    return {
        f"{module}/{field}": value.contiguous()
        for group in _groups(collector)
        for module, fields in group.items()
        for field, value in fields.items()
    }


__all__ = ["DEFAULT_DATA", "FACTS", "PARTIAL", "calibrate", "read_windows"]
