"""`quantsink export`: model + calibration + recipe -> a checkpoint folder with a model card, whole or not at all."""

import contextlib
import copy
import dataclasses
import os
import re
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantsink.calibration.calibration import Calibration
from quantsink.calibration.routing import plan
from quantsink.checkpoint.save_load import is_checkpoint, payload_bytes, save
from quantsink.checkpoint.streaming import NotStreamableError, StreamedModel, stream
from quantsink.errors import DataError, ModelError, UsageError
from quantsink.eval.bootstrap import kl_mean, perplexity
from quantsink.eval.divergence import log_probs, score, score_reference
from quantsink.eval.perplexity import EvalText, read
from quantsink.export.card import Measured, model_card
from quantsink.files import check_free
from quantsink.hf.quantizer import quantize
from quantsink.kernels import Route
from quantsink.models.architecture import Architecture
from quantsink.models.fingerprint import model_fingerprint
from quantsink.models.source import check_device, find
from quantsink.plan import Plan
from quantsink.progress import Progress, Say
from quantsink.recipe import Recipe

HELDOUT = "builtin:heldout"
HELDOUT_WINDOWS = 2
HELDOUT_LENGTH = 512


@dataclass(frozen=True)
class Exported:
    """The result, as `quantsink export --json` prints it."""

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
    trust_remote_code: bool = False,
    say: Say = lambda _: None,
    progress: Progress = lambda *_: None,
) -> Exported:
    """Quantize MODEL and write a checkpoint to `out`; every check that can fail is made before anything is written.

    Its tensors go one by one from the model's safetensors to the checkpoint, so memory is needed for one of them, not
    for the model. The model is loaded as a whole only to be measured, where it fits into memory twice, and where
    transformers converts its tensors on loading.

    Args:
        native_heads: overrides the recipe's; keep this many heads with the largest measured error native.
        kv_bits: overrides the recipe's; the loaded model keeps its KV cache in this many bits per number.
        dtype: type of all native tensors; `auto` is the type in the checkpoint (float32 for GGUF).
        device: device that the model is measured on.
        measure: measure KL and perplexity on held-out text for the model card, if there is memory for it.
        name: the model's name in the model card; by default MODEL.
        notes: lines for the model card, after those about MODEL itself.
        trust_remote_code: run custom code from MODEL's repository.
        say: called with a line on each step.
        progress: called with `(step, done, total)` in MB.
    """
    target = Path(out)
    for place in (Path(model), Path(calibration)):
        if place.exists() and target.resolve() in (place.resolve(), *place.resolve().parents):
            raise UsageError(f"-o {out}: holds {place}, which is read; choose another -o")
    if not re.fullmatch(r"\d+(\.\d+)?\s*[KMGT]B", max_shard_size):
        raise UsageError(f"--max-shard-size {max_shard_size}: a size like 500MB or 5GB")
    check_free(target, is_checkpoint, force=force)
    calibrated = Calibration.load(calibration)
    chosen = Recipe.load(recipe)
    if native_heads is not None:
        chosen = dataclasses.replace(chosen, attention=dataclasses.replace(chosen.attention, native_heads=native_heads))
    if kv_bits is not None:
        chosen = dataclasses.replace(chosen, kv_cache=dataclasses.replace(chosen.kv_cache, bits=kv_bits))
    model_plan = plan(calibrated, chosen)
    source = find(model)
    if source.gguf is None:
        calibrated.check_config(source.config(trust_remote_code), model)
    tokenizer = source.tokenizer(trust_remote_code)
    check_device(torch.empty(0), device)
    predicts = all(layer.causal for layer in calibrated.layers)
    text = read_heldout(tokenizer, calibrated) if measure and predicts else None
    ready: Any
    try:
        ready = stream(source, dtype, trust_remote_code, progress)
    except NotStreamableError as reason:
        say(f"{model}: {reason}; loading it whole")
        ready = source.model(dtype, device, trust_remote_code)
        calibrated.check_model(model_fingerprint(ready), Architecture.of(ready), model)
        check_generation(ready, model)
        parameters = sum(parameter.numel() for parameter in ready.parameters())
        _tell(say, text)
        measured = _quantize(ready, model_plan, text)
    else:
        calibrated.check_model(ready.fingerprint(), Architecture.of(ready.model), model)
        check_generation(ready.model, model)
        parameters = ready.parameters
        text = _if_it_fits(text, ready, say)
        _tell(say, text)
        measured = None
        if text is not None:
            measured = _quantize(source.model(dtype, device, trust_remote_code), model_plan, text)
        ready.quantize(model_plan)
    label = Path(str(recipe)).stem if not isinstance(recipe, Recipe) else "custom"
    card = model_card(name or model, label, calibrated, model_plan, parameters, measured, (*source.notes, *notes))
    say(f"writing {target}")
    save(ready, target, tokenizer=tokenizer, card=card, force=force, max_shard_size=max_shard_size)
    size = payload_bytes(target)
    heads = {route.name.lower(): model_plan.count(route) for route in Route} if model_plan.attentions else {}
    return Exported(str(target), label, size, parameters, size * 8 / parameters, heads, model_plan.notes, measured)


def check_generation(model: Any, name: str) -> None:
    """Refuse a generation config that transformers would refuse to save, before hours of work."""
    if not hasattr(model, "generation_config"):
        return
    try:
        copy.deepcopy(model.generation_config).validate(strict=True)
    except ValueError as error:
        first = " ".join(str(error).split())[:200]
        raise ModelError(f"{name}: transformers cannot save its generation config: {first}") from error


def read_heldout(tokenizer: Any, calibration: Calibration) -> EvalText | None:
    """Text that this calibration did not read, or None."""
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


def _tell(say: Say, text: EvalText | None) -> None:
    say("quantizing" if text is None else f"quantizing, and measuring on {text.scored:,} held-out tokens")


def _if_it_fits(text: EvalText | None, ready: StreamedModel, say: Say) -> EvalText | None:
    """`text`, or None with a line on why where the model and its quantized copy do not fit into memory."""
    needed, available = 2 * ready.bytes, available_memory()
    if text is None or available is None or needed <= available:
        return text
    say(f"not measured: that takes {needed / 1e9:.1f} GB of memory, {available / 1e9:.1f} GB are free")
    return None


def available_memory() -> int | None:
    """Bytes that this process can still allocate under the limits of the machine, its cgroup and itself, or None."""
    free = []
    with contextlib.suppress(OSError, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    with contextlib.suppress(OSError, ValueError):
        page = os.sysconf("SC_PAGE_SIZE")
        if not free:
            free += [os.sysconf("SC_PHYS_PAGES") * page]
        size, resident, _, _, _, data, _ = (int(n) * page for n in Path("/proc/self/statm").read_text().split())
        free += [limit - resident for limit in _cgroup_limits()]
        for resource_limit, used in ((resource.RLIMIT_AS, size), (resource.RLIMIT_DATA, data)):
            limit = resource.getrlimit(resource_limit)[0]
            free += [limit - used] if limit != resource.RLIM_INFINITY else []
    return min(free, default=None)


def _cgroup_limits() -> list[int]:
    """Memory limits of this process's control group and its parents, in cgroup version 1 or 2."""
    limits = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root, name = Path("/sys/fs/cgroup"), "memory.max"
        elif "memory" in controllers.split(","):
            root, name = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
        else:
            continue
        place = root / path.lstrip("/")
        for folder in (place, *(parent for parent in place.parents if parent.is_relative_to(root))):
            with contextlib.suppress(OSError, ValueError):
                limits.append(int((folder / name).read_text()))
    return limits


def _quantize(model: Any, model_plan: Plan, text: EvalText | None) -> Measured | None:
    if text is None:
        quantize(model, model_plan)
        return None
    with log_probs() as store:
        before = score_reference(model, text.windows, store)
        quantize(model, model_plan)
        after = score(model, text.windows, store, name="quantized")
    agreed = sum(window.top1 for window in after) / text.scored
    return Measured(text.name, text.scored, perplexity(before), perplexity(after), kl_mean(after), agreed)
