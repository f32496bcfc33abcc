"""A calibration's two files (docs/formats.md) as they are read: every value checked before it is used."""

import itertools
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file

from quantsink import strict_json
from quantsink.calibration.records import Domain, Facts, Settings, Statistics
from quantsink.calibration.statistics import MAXIMA, SUMS, Fields, empty_experts, empty_heads, empty_linear
from quantsink.errors import CalibrationError
from quantsink.files import contents
from quantsink.models.head_layout import AttentionLayer

SCHEMA = 3
TENSORS, FACTS = "calibration.safetensors", "calibration.json"
PARTIAL = "partial.safetensors"
PICTURES = ("bos_mass.png", "entropy.png")
DERIVED = ("unused_experts", "heads", "kv_heads")
"""Keys of `calibration.json` that follow from the tensors."""

_PARTIAL_NAME = re.compile(r"partial(-\d+-of-\d+)?\.safetensors")
_KEYS = {"schema", "model_type", "model", "fingerprint", "bos", "settings", "domains", "layers", *DERIVED}
_NOT_NEGATIVE = frozenset(
    name for name in SUMS if not name.startswith(("key_sum", "query_gram", "error_", "kv_error", "entropy"))
)
"""Sums that cannot be negative, not even by rounding."""
_RELATIVE, _ABSOLUTE = 1e-6, 1e-7
"""Tolerances: another machine may round the last bits of a root in another way."""

T = TypeVar("T")


def read_calibration(folder: Path) -> tuple[Facts, dict[str, Statistics], dict[str, Any]]:
    """The facts of a calibration folder, its statistics by domain, and the derived facts as they are stored.

    Raises:
        CalibrationError: missing, unfinished or damaged; the message names the file and the field.
    """
    if not (folder / FACTS).is_file():
        raise CalibrationError(f"{folder}: no {FACTS}; a finished `quantsink calibrate -o` folder has one")
    facts, derived = _read_facts(folder / FACTS)
    try:
        tensors = load_file(folder / TENSORS)
    except Exception as error:  # safetensors and torch raise many types for damaged files
        reason = strict_json.one_line(error)
        raise CalibrationError(f"{folder / TENSORS}: cannot be read: {reason}; calibrate again") from error
    try:
        with torch.device("meta"):  # only shapes are compared, so nothing of a size that a file claims is allocated
            statistics = {domain.name: _read_domain(domain.name, facts.layers, tensors) for domain in facts.domains}
        _check_modules(facts.layers, statistics)
    except CalibrationError as error:
        raise CalibrationError(f"{folder / error.args[0]}") from None
    surplus = sorted(tensors.keys() - tensors_by_name(statistics).keys())
    if surplus:
        raise CalibrationError(
            f"{folder / TENSORS}: {strict_json.printable(surplus[0])} does not belong to {FACTS}; calibrate again"
        )
    return facts, statistics, derived


def tensors_by_name(statistics: Mapping[str, Statistics]) -> dict[str, torch.Tensor]:
    """Every statistic as `domain/heads|linears|experts/module/field`."""
    return {
        f"{domain}/{group}/{module}/{field}": tensor.contiguous()
        for domain, measured in statistics.items()
        for group, modules in measured.groups().items()
        for module, fields in modules.items()
        for field, tensor in fields.items()
    }


def is_calibration(folder: Path) -> bool:
    """Whether a folder holds a calibration, finished or not, and nothing else."""
    return contents(folder) - {path.name for path in partials(folder)} <= {TENSORS, FACTS, *PICTURES}


def partials(folder: Path) -> list[Path]:
    """Files of an unfinished calibration, one for each process that had begun."""
    return [path for path in folder.glob("partial*.safetensors") if _PARTIAL_NAME.fullmatch(path.name)]


def first_contradiction(stored: Mapping[str, Any], computed: Mapping[str, Any]) -> str | None:
    """The place of the first derived fact that is stored otherwise than the tensors give it."""
    for key in DERIVED:
        # Through JSON: tuples become lists and numbers that are keys become strings.
        place = _difference(stored[key], json.loads(json.dumps(computed[key])), key)
        if place:
            return place
    return None


def _difference(stored: Any, computed: Any, place: str) -> str | None:
    if isinstance(computed, dict) and isinstance(stored, dict):
        if stored.keys() != computed.keys():
            return place
        parts: Any = ((stored[key], computed[key], f"{place}.{key}") for key in computed)
    elif isinstance(computed, list) and isinstance(stored, list):
        if len(stored) != len(computed):
            return place
        parts = ((a, b, f"{place}[{i}]") for i, (a, b) in enumerate(zip(stored, computed, strict=True)))
    else:
        numbers = type(computed) is float and type(stored) in (int, float)
        close = numbers and math.isclose(stored, computed, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)
        return None if close or (type(stored) is type(computed) and stored == computed) else place
    return next(filter(None, itertools.starmap(_difference, parts)), None)


def _read_facts(path: Path) -> tuple[Facts, dict[str, Any]]:
    try:
        data = strict_json.parse(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CalibrationError(f"{path}: cannot be read: {error}; calibrate again") from error
    schema = data.get("schema") if isinstance(data, dict) else None
    if type(schema) is not int or schema != SCHEMA:
        raise CalibrationError(
            f"{path}: schema {strict_json.abbreviated(schema)}, this quantsink reads {SCHEMA}; calibrate again"
        )
    try:
        facts = _typed_facts(data)
        _check_facts(facts)
    except ValueError as error:
        raise CalibrationError(f"{path}: damaged: {error}; calibrate again") from None
    return facts, {key: data[key] for key in DERIVED}


def _typed_facts(data: dict[str, Any]) -> Facts:
    for key in sorted(data.keys() ^ _KEYS):
        raise ValueError(f"{strict_json.abbreviated(key)} is {'unknown' if key in data else 'missing'}")
    fingerprint = data["fingerprint"]
    if not isinstance(fingerprint, dict) or fingerprint.keys() != {"model", "tokenizer"}:
        raise ValueError("fingerprint: expected model and tokenizer")
    pair = strict_json.value(tuple[str, ...], fingerprint["model"], "fingerprint.model")
    _check(len(pair) == 2, "fingerprint.model: expected two")
    return Facts(
        strict_json.value(str, data["model_type"], "model_type"),
        strict_json.value(str, data["model"], "model"),
        pair,
        strict_json.value(str, fingerprint["tokenizer"], "fingerprint.tokenizer"),
        strict_json.value(int | None, data["bos"], "bos"),
        strict_json.build(Settings, data["settings"], "settings", complete=True),
        _list_of(AttentionLayer, data["layers"], "layers"),
        _list_of(Domain, data["domains"], "domains"),
    )


def _list_of(item_type: type[T], data: object, place: str) -> tuple[T, ...]:
    if not isinstance(data, list) or not data:
        raise ValueError(f"{place}: expected a list that is not empty")
    return tuple(strict_json.build(item_type, item, f"{place}[{i}]", complete=True) for i, item in enumerate(data))


def _check_facts(facts: Facts) -> None:
    settings = facts.settings
    _check(facts.bos is None or facts.bos >= 0, "bos: 0 or more")
    _check(1 <= settings.sink_size < settings.seq_len, "settings.sink_size: from 1 to below seq_len")
    _check(settings.query_rows is None or settings.query_rows >= 1, "settings.query_rows: 1 or more")
    _check(settings.error_windows >= 0, "settings.error_windows: 0 or more")
    _check(len({domain.name for domain in facts.domains}) == len(facts.domains), "domains: a name appears twice")
    for place, domain in enumerate(facts.domains):
        counts = (domain.tokens, domain.windows, domain.documents, domain.removed_bos)
        _check(min(counts) >= 0, f"domains[{place}]: counts are 0 or more")
    _check(len({layer.name for layer in facts.layers}) == len(facts.layers), "layers: a name appears twice")
    for place, layer in enumerate(facts.layers):
        _check(layer.index == place, f"layers[{place}].index: expected {place}, found {layer.index}")
        _check_layer(layer, f"layers[{place}]")


def _check_layer(layer: AttentionLayer, place: str) -> None:
    """Whatever the model, its heads' slices fill the channels of their layer in order, q before k before v."""
    sizes = (layer.heads, layer.kv_heads, layer.head_dim, layer.value_dim, layer.window or 1)
    _check(all(0 < size < 2**31 for size in sizes), f"{place}: heads, sizes and window are 1 or more")
    _check(max(layer.head_dim, layer.value_dim) <= 2**16, f"{place}: heads of more than {2**16} channels")
    _check(layer.window != 0, f"{place}.window: 1 or more")
    _check(layer.heads % layer.kv_heads == 0, f"{place}: {layer.heads} heads on {layer.kv_heads} KV heads")
    expected = {
        "q": (layer.heads, layer.head_dim),
        "k": (layer.kv_heads, layer.head_dim),
        "v": (layer.kv_heads, layer.value_dim),
        "o": (layer.heads, layer.value_dim),
    }
    latent = layer.k.module == layer.v.module != layer.q.module
    by_module: dict[str, list[tuple[int, int]]] = {}
    first_start: dict[str, int] = {}
    for part, (count, size) in expected.items():
        slices = getattr(layer, part)
        fits = 0 < slices.size <= size if latent and part == "k" else slices.size == size
        _check(len(slices.starts) == count and fits, f"{place}.{part}: not {count} slices of {size} channels")
        _check(
            all(a < b for a, b in zip(slices.starts, slices.starts[1:], strict=False)),
            f"{place}.{part}.starts: not in the order of the heads",
        )
        _check(slices.starts[0] > first_start.get(slices.module, -1), f"{place}.{part}.starts: q, k and v out of order")
        first_start[slices.module] = slices.starts[0]
        by_module.setdefault(slices.module, []).extend((start, slices.size) for start in slices.starts)
    for module, spans in by_module.items():
        end = 0
        for start, size in sorted(spans):
            _check(start == end, f"{place}: slices of {strict_json.printable(module)} overlap or leave channels out")
            end += size


def _check(good: bool, message: str) -> None:
    if not good:
        raise ValueError(message)


def _read_domain(domain: str, layers: tuple[AttentionLayer, ...], tensors: Mapping[str, torch.Tensor]) -> Statistics:
    heads = {layer.name: _read_fields(f"{domain}/heads/{layer.name}", empty_heads(layer), tensors) for layer in layers}
    linears = _read_modules(f"{domain}/linears/", "input_amax", empty_linear, tensors)
    return Statistics(heads, linears, _read_modules(f"{domain}/experts/", "tokens", empty_experts, tensors))


def _read_modules(
    prefix: str, sized_by: str, empty: Callable[[int], Fields], tensors: Mapping[str, torch.Tensor]
) -> dict[str, Fields]:
    """Every module under a prefix, as large as its field `sized_by` is."""
    modules = {}
    for name in sorted({key[len(prefix) :].rpartition("/")[0] for key in tensors if key.startswith(prefix)}):
        first = tensors.get(f"{prefix}{name}/{sized_by}")
        modules[name] = _read_fields(f"{prefix}{name}", empty(first.numel() if first is not None else 0), tensors)
    return modules


def _read_fields(prefix: str, like: Fields, tensors: Mapping[str, torch.Tensor]) -> Fields:
    fields = {}
    for field, blank in like.items():
        tensor = tensors.get(f"{prefix}/{field}")
        if tensor is None or tensor.shape != blank.shape or tensor.dtype != torch.float64:
            state = "missing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
            raise CalibrationError(
                f"{TENSORS}: {strict_json.printable(f'{prefix}/{field}')} is {state} where float64 {list(blank.shape)} "
                "belongs; calibrate again"
            )
        # -inf is an extreme of nothing.
        good = ~(tensor.isnan() | (tensor == torch.inf)) if field in MAXIMA else tensor.isfinite()
        if field in _NOT_NEGATIVE:
            good &= tensor >= 0
        if not bool(good.all()):
            raise CalibrationError(
                f"{TENSORS}: {strict_json.printable(f'{prefix}/{field}')} holds NaN, inf or a negative count; "
                "calibrate again"
            )
        fields[field] = tensor
    return fields


def _check_modules(layers: tuple[AttentionLayer, ...], statistics: Mapping[str, Statistics]) -> None:
    """The same layers in every domain, the attention's projections among them."""
    first, *rest = statistics.values()
    for name, layer in ((layer.name, layer) for layer in layers):
        for part in (layer.q, layer.k, layer.v, layer.o):
            if part.module not in first.linears:
                raise CalibrationError(f"{TENSORS}: nothing of {strict_json.printable(part.module)}; calibrate again")
        inputs = len(first.linears[layer.o.module]["input_amax"])
        if inputs != layer.heads * layer.value_dim:
            raise CalibrationError(
                f"{TENSORS}: {strict_json.printable(layer.o.module)} has {inputs} inputs, {FACTS} gives {name} "
                f"{layer.heads} heads of {layer.value_dim}; calibrate again"
            )
    for other in rest:
        for modules, other_modules in zip(first.groups().values(), other.groups().values(), strict=True):
            for name in sorted(modules.keys() | other_modules.keys()):
                shapes = [[t.shape for t in group.get(name, {}).values()] for group in (modules, other_modules)]
                if shapes[0] != shapes[1]:
                    raise CalibrationError(
                        f"{TENSORS}: {strict_json.printable(name)} is not the same in every domain; calibrate again"
                    )
