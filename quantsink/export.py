"""`quantsink export`: model + calibration + recipe -> a checkpoint folder with a model card, whole or not at all."""

import copy
import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantsink.apply import apply
from quantsink.architecture import Architecture
from quantsink.calibration.calibration import Calibration
from quantsink.calibration.routing import plan
from quantsink.card import Measured, model_card
from quantsink.checkpoint import is_checkpoint, payload_bytes, save
from quantsink.errors import DataError, ModelError, UsageError
from quantsink.eval.bootstrap import kl_mean, perplexity
from quantsink.eval.divergence import log_probs, score, score_reference
from quantsink.eval.perplexity import EvalText, read
from quantsink.files import check_free
from quantsink.integration import QuantSinkConfig, finish
from quantsink.kernels import Route
from quantsink.plan import Plan
from quantsink.recipe import Recipe
from quantsink.source import find, model_fingerprint

HELDOUT = "builtin:heldout"
HELDOUT_WINDOWS = 2
HELDOUT_LENGTH = 512

Say = Callable[[str], None]


@dataclass(frozen=True)
class Exported:
    """What came out: `quantsink export --json` prints it."""

    checkpoint: str
    recipe: str
    payload_bytes: int
    parameters: int
    bits_weight: float
    heads: dict[str, int]
    notes: tuple[str, ...]
    measured: Measured | None


def export(
    model: str,
    calibration: str | Path,
    out: str | Path,
    recipe: str | Path | Recipe = "w8a8",
    *,
    native_heads: int | None = None,
    kv_bits: float | None = None,
    dtype: str = "auto",
    device: str = "cpu",
    force: bool = False,
    measure: bool = True,
    max_shard_size: str = "5GB",
    name: str | None = None,
    notes: tuple[str, ...] = (),
    say: Say = lambda _: None,
) -> Exported:
    """Quantize MODEL and write a checkpoint to `out`; every check that can fail comes before the model is loaded.

    Args:
        native_heads: overrides the recipe's; this many heads with the largest measured error stay native.
        kv_bits: overrides the recipe's; the loaded model makes a `SinkCache` of so many bits for itself.
        dtype: type of everything that stays native; auto is the checkpoint's own (float32 for GGUF).
        measure: measure KL and perplexity on a little held-out text for the model card.
        name: what the model card calls the model; MODEL if left out.
        notes: lines for the model card, beside those that MODEL itself calls for.
        say: told what is being done, a line each.
    """
    target = Path(out)
    for place in (Path(model), Path(calibration)):
        if place.exists() and target.resolve() in (place.resolve(), *place.resolve().parents):
            raise UsageError(f"-o {out}: holds {place}, which is read; choose another -o")
    if not re.fullmatch(r"\d+(\.\d+)?\s*[KMGT]i?B", max_shard_size):
        raise UsageError(f"--max-shard-size {max_shard_size}: a size like 500MB or 5GB")
    check_free(target, is_checkpoint, force=force)
    found = Calibration.load(calibration)
    wanted = Recipe.load(recipe)
    if native_heads is not None:
        wanted = dataclasses.replace(wanted, attention=dataclasses.replace(wanted.attention, native_heads=native_heads))
    if kv_bits is not None:
        wanted = dataclasses.replace(wanted, kv_cache=dataclasses.replace(wanted.kv_cache, bits=kv_bits))
    decided = plan(found, wanted)
    source = find(model)
    tokenizer = source.tokenizer()
    say(f"loading {model}")
    loaded = source.model(dtype, device)
    found.check_model(model_fingerprint(loaded), Architecture.of(loaded), model)
    check_generation(loaded, model)
    text = read_heldout(tokenizer, found) if measure else None
    say("quantizing" if text is None else f"quantizing, and measuring on {text.scored:,} held-out tokens")
    parameters = sum(parameter.numel() for parameter in loaded.parameters())
    measured = _quantize(loaded, decided, text)
    label = Path(str(recipe)).stem if not isinstance(recipe, Recipe) else "custom"
    card = model_card(name or model, label, found, decided, parameters, measured, (*source.notes, *notes))
    say(f"writing {target}")
    save(loaded, target, tokenizer=tokenizer, card=card, force=force, max_shard_size=max_shard_size)
    size = payload_bytes(target)
    heads = {route.name.lower(): decided.count(route) for route in Route} if decided.attentions else {}
    return Exported(str(target), label, size, parameters, size * 8 / parameters, heads, decided.notes, measured)


def check_generation(model: Any, name: str) -> None:
    """transformers refuses to save some generation configs; find out before hours of work."""
    if not hasattr(model, "generation_config"):
        return
    try:
        copy.deepcopy(model.generation_config).validate(strict=True)
    except ValueError as error:
        first = " ".join(str(error).split())[:200]
        raise ModelError(f"{name}: transformers cannot save its generation config: {first}") from error


def read_heldout(tokenizer: Any, calibration: Calibration) -> EvalText | None:
    """Text that this calibration did not read; None where there is none."""
    if any(domain.spec == HELDOUT for domain in calibration.domains):
        return None
    try:
        return read(
            tokenizer,
            HELDOUT,
            length=HELDOUT_LENGTH,
            max_windows=HELDOUT_WINDOWS,
            bos=calibration.settings.bos,
        )
    except DataError:
        return None


def _quantize(model: Any, decided: Plan, text: EvalText | None) -> Measured | None:
    config = QuantSinkConfig.of(decided)
    if text is None:
        apply(model, decided)
        finish(model, config)
        return None
    with log_probs() as store:
        before = score_reference(model, text.windows, store)
        apply(model, decided)
        finish(model, config)
        after = score(model, text.windows, store, name="quantized")
    agreed = sum(window.top1 for window in after) / text.scored
    return Measured(text.name, text.scored, perplexity(before), perplexity(after), kl_mean(after), agreed)
