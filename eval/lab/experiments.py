"""Each experiment from its options to a `Finding`: figures, tables, pictures and the seconds it took."""

import dataclasses
import importlib.util
import time
from collections.abc import Sequence
from typing import Any

from quantsink.errors import UsageError
from quantsink.eval.lab.output import Finding
from quantsink.progress import Progress


def trigger(seeds: int | None, quick: bool, workers: int | None, progress: Progress | None = None) -> Finding:
    from quantsink.eval.lab import trigger_runs, trigger_tables

    scale = _scale(trigger_runs.QUICK if quick else trigger_runs.FULL, seeds)
    started = time.monotonic()
    runs = trigger_runs.run_trigger(scale, progress, workers)
    return _finding(
        "trigger",
        "The trigger task",
        {"scale": dataclasses.asdict(scale), "runs": [dataclasses.asdict(run) for run in runs]},
        trigger_tables.trigger_tables(runs),
        trigger_tables.trigger_plots(runs),
        started,
    )


def language(seeds: int | None, quick: bool, workers: int | None, progress: Progress | None = None) -> Finding:
    from quantsink.eval.lab import language_runs, language_tables

    scale = _scale(language_runs.QUICK if quick else language_runs.FULL, seeds)
    started = time.monotonic()
    result = language_runs.run_language(scale, progress, workers)
    return _finding(
        "language",
        "Small language models",
        {"scale": dataclasses.asdict(scale), "result": dataclasses.asdict(result)},
        language_tables.language_tables(result),
        language_tables.language_plots(result),
        started,
    )


def vision(seeds: int | None, quick: bool, workers: int | None, progress: Progress | None = None) -> Finding:
    """
    Raises:
        UsageError: scikit-learn, which carries the digits, is not installed.
    """
    from quantsink.eval.lab import vision as experiment
    from quantsink.eval.lab import vision_tables

    check_vision()
    scale = _scale(experiment.QUICK if quick else experiment.FULL, seeds)
    started = time.monotonic()
    runs = experiment.run_vision(scale, progress, workers)
    return _finding(
        "vision",
        "A small ViT on digits",
        {"scale": dataclasses.asdict(scale), "runs": [dataclasses.asdict(run) for run in runs]},
        vision_tables.vision_tables(runs),
        vision_tables.vision_plots(runs),
        started,
    )


def check_vision() -> None:
    if importlib.util.find_spec("sklearn") is None:
        raise UsageError("lab vision: scikit-learn, which has the digits, is missing; pip install 'quantsink[lab]'")


def profile(
    model: Any,
    tokenizer: Any,
    name: str,
    data: str,
    quick: bool,
    notes: Sequence[str] = (),
    progress: Progress | None = None,
) -> Finding:
    """A real model's position shares, sleeping heads and what wakes them, and streaming with and without its sinks."""
    from quantsink.eval.lab import profile_plots, profile_tables
    from quantsink.eval.lab.profile import measure_profile
    from quantsink.eval.lab.profile_weights import Passes
    from quantsink.eval.lab.streaming import measure_streaming

    named: Progress | None = None
    if progress is not None:
        report = progress

        def named(what: str, done: int, total: int) -> None:
            report(f"{name}: {what}", done, total)

    started = time.monotonic()
    passes: Passes = {}
    settings, sizes = profile_sizes(name, model, quick)
    measured = measure_profile(model, tokenizer, name=name, text=data, settings=settings, passes=passes, progress=named)
    stream = measure_streaming(model, tokenizer, name=name, text=data, passes=passes, progress=named, **sizes)
    tables = [*profile_tables.profile_tables(measured), profile_tables.streaming_table(stream)]
    short = "".join(letter if letter.isalnum() else "-" for letter in name.removesuffix(".gguf")).lower()
    pictures = {f"{short}-{file}": data for file, data in profile_plots.profile_plots(measured, stream).items()}
    return _finding(
        "profile",
        f"Profile of {name}",
        {"notes": list(notes), "profile": measured.to_dict(), "streaming": stream.to_dict()},
        tables,
        pictures,
        started,
    )


SHORT_WINDOW = {"tokens": 512, "window": 64}
LEAST = 136
"""Tokens that streaming with such a window needs at least: twice its 64 keys and 4 sinks."""


def profile_sizes(name: str, model: Any, quick: bool) -> tuple[Any, dict[str, int]]:
    """Settings of a profile and of streaming that fit into the model's context.

    Raises:
        UsageError: the context is too short for any profile.
    """
    from quantsink.eval.lab.profile import ProfileSettings
    from quantsink.eval.lab.streaming import SINKS, WINDOW

    settings = ProfileSettings.quick() if quick else ProfileSettings()
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if not isinstance(limit, int):
        return settings, dict(SHORT_WINDOW) if quick else {}
    if limit < LEAST:
        raise UsageError(f"{name}: its context of {limit} tokens is too short for a profile, which needs {LEAST}")
    lengths = tuple(length for length in settings.lengths if length <= limit) or (limit,)
    fitting = dataclasses.replace(settings, lengths=lengths, contrast_length=min(settings.contrast_length, limit))
    if quick or limit < 2 * (WINDOW + SINKS):
        return fitting, {**SHORT_WINDOW, "tokens": min(SHORT_WINDOW["tokens"], limit)}
    return fitting, {}


def _scale(scale: Any, seeds: int | None) -> Any:
    return scale if seeds is None else dataclasses.replace(scale, seeds=seeds)


def _finding(
    name: str, title: str, data: dict[str, Any], tables: Sequence[Any], pictures: dict[str, bytes], started: float
) -> Finding:
    return Finding(name, title, data, tuple(tables), pictures, time.monotonic() - started)
