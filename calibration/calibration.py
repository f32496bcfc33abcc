"""`Calibration`: the measured statistics of one model, and its two files (docs/formats.md)."""

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

from quantsink import strict_json
from quantsink.calibration.statistics import (
    BINS,
    FAR_WINDOWS,
    MAXIMA,
    SUMS,
    Fields,
    empty_experts,
    empty_heads,
    empty_linear,
    merge,
)
from quantsink.errors import CalibrationError
from quantsink.files import contents, disk_errors, write_bytes, write_json
from quantsink.kernels import Route
from quantsink.models.architecture import Architecture
from quantsink.models.fingerprint import model_fingerprint
from quantsink.models.head_layout import AttentionLayer
from quantsink.plan import CachePlan

SCHEMA = 3
TENSORS, FACTS = "calibration.safetensors", "calibration.json"
PARTIAL = "partial.safetensors"
_PARTIAL_NAME = re.compile(r"partial(-\d+-of-\d+)?\.safetensors")
PICTURES = ("bos_mass.png", "entropy.png")
LEVELS = {"sink": 0.3, "strong": 0.8, "dormant": 0.98}
"""Report levels of BOS mass."""


@dataclass(frozen=True)
class Settings:
    """What was asked for; a resumed calibration must ask for the same."""

    seq_len: int
    max_tokens: int
    sink_size: int
    query_rows: int | None
    error_windows: int
    bos: bool
    seed: int
    dtype: str


@dataclass(frozen=True)
class Domain:
    """One text that was measured, with true counts."""

    name: str
    spec: str
    tokens: int
    windows: int
    documents: int
    removed_bos: int
    complete: bool
    fingerprint: str


@dataclass(frozen=True)
class Head:
    """One query head, over all domains. Masses and entropy are means over rows, `*_std` spreads over sequences."""

    layer: int
    head: int
    kv_head: int
    bos_mass: float
    bos_mass_std: float
    sink_mass: float
    last_mass: float | None
    """On the last token, where an encoder puts [SEP]; None for a causal head."""
    entropy: float
    entropy_std: float
    logit_max: float
    rest_peak: float
    error_int8: float | None
    """Relative L2 error of the layer's attention output when this head alone takes the `int8` route."""
    error_sink: float | None
    sink: bool
    route: str
    domains: Mapping[str, Mapping[str, float]]
    """BOS mass and entropy by domain."""


@dataclass(frozen=True)
class KVHead:
    """One KV head, over all domains."""

    layer: int
    kv_head: int
    sink: bool
    """Any query head of its group is a sink head."""
    error: tuple[float, ...] | None
    """Relative L2 error of the layer's attention output when this KV head alone is held as codes, by width (8, 4, 3 and
    2 bits), sink tokens and the newest 64 tokens exact. None: no measured row saw a coded key."""
    error_no_sink: tuple[float, ...] | None
    """The same with the sink tokens coded like the rest."""
    far: Mapping[int, float | None]
    """By distance: mean weight on keys that are no sink token and lie that far or farther before the query; the largest
    among the query heads of the group. None: no row saw such keys."""


@dataclass(frozen=True)
class Statistics:
    """Fields of `quantsink.calibration.statistics` by attention module, by linear layer and by experts module."""

    heads: Mapping[str, Fields]
    linears: Mapping[str, Fields]
    experts: Mapping[str, Fields] = dataclasses.field(default_factory=dict)

    def groups(self) -> dict[str, Mapping[str, Fields]]:
        return {"heads": self.heads, "linears": self.linears, "experts": self.experts}


@dataclass(frozen=True, eq=False)
class Calibration:
    """Statistics of one model over one or several texts."""

    model_type: str
    model: str
    fingerprint: tuple[str, str]
    tokenizer_fingerprint: str
    bos: int | None
    """Token id that starts each window; None: the model has no BOS and the first token is the sink candidate."""
    settings: Settings
    layers: tuple[AttentionLayer, ...]
    domains: tuple[Domain, ...]
    statistics: Mapping[str, Statistics]

    @property
    def total(self) -> Statistics:
        """All domains together."""
        parts = [part.groups() for part in self.statistics.values()]
        return Statistics(
            *(
                {name: merge(dict(part[group][name]) for part in parts) for name in modules}
                for group, modules in parts[0].items()
            )
        )

    def unused_experts(self) -> list[str]:
        """`module.number` of every expert that no token was sent to."""
        total = self.total.experts
        return [
            f"{name}.{i}" for name, fields in total.items() for i in (fields["tokens"] == 0).nonzero()[:, 0].tolist()
        ]

    def heads(self, sink_threshold: float = 0.3, entropy_threshold: float = 1.0) -> list[Head]:
        """Every query head, in order of layer and head; `sink` by BOS mass (or sink mass) and normalized entropy."""
        total = self.total.heads
        found = []
        for layer in self.layers:
            whole = head_means(total[layer.name])
            split = {domain: head_means(stats.heads[layer.name]) for domain, stats in self.statistics.items()}
            for head in range(layer.heads):
                value = {name: float(tensor[head]) for name, tensor in whole.items()}
                mass = max(value["bos_mass"], value["sink_mass"], 0.0 if layer.causal else value["last_mass"])
                sink = mass >= sink_threshold and value["entropy"] <= entropy_threshold
                by_domain = {
                    domain: {key: float(means[key][head]) for key in ("bos_mass", "entropy")}
                    for domain, means in split.items()
                    if math.isfinite(float(means["bos_mass"][head]))
                }
                route = Route.SINK if sink else Route.INT8
                found.append(
                    Head(
                        layer=layer.index,
                        head=head,
                        kv_head=layer.kv_head(head),
                        bos_mass=value["bos_mass"],
                        bos_mass_std=value["bos_mass_std"],
                        sink_mass=value["sink_mass"],
                        last_mass=None if layer.causal else value["last_mass"],
                        entropy=value["entropy"],
                        entropy_std=value["entropy_std"],
                        logit_max=value["logit_max"],
                        rest_peak=value["rest_peak"],
                        error_int8=_known(value["error_int8"]),
                        error_sink=_known(value["error_sink"]),
                        sink=sink,
                        route=route.name.lower(),
                        domains=by_domain,
                    )
                )
        return found

    def kv_heads(self, sink_threshold: float = 0.3, entropy_threshold: float = 1.0) -> list[KVHead]:
        """Every KV head, in order of layer and KV head."""
        total = self.total.heads
        sinks = {(h.layer, h.kv_head) for h in self.heads(sink_threshold, entropy_threshold) if h.sink}
        found = []
        for layer in self.layers:
            fields = total[layer.name]
            far = (fields["far_mass"] / fields["far_rows"]).unflatten(0, (layer.kv_heads, -1)).amax(1)
            errors = {
                name: (fields[name] / fields["kv_energy"][:, None]).sqrt() for name in ("kv_error", "kv_error_no_sink")
            }
            for head in range(layer.kv_heads):
                error, no_sink = (_all_known(errors[name][head].tolist()) for name in ("kv_error", "kv_error_no_sink"))
                by_window = dict(zip(FAR_WINDOWS, map(_known, far[head].tolist()), strict=True))
                sink = (layer.index, head) in sinks
                found.append(KVHead(layer.index, head, sink, error, no_sink, by_window))
        return found

    def cache_plan(self, model: Any, **options: Any) -> CachePlan:
        """What a `SinkCache` of `model` keeps; options as in `SinkCache.from_calibration`.

        Raises:
            CalibrationError: another model's calibration, or one that lacks what the options need.
            RecipeError: an option that cannot be meant.
        """
        from quantsink.calibration.cache_plan import cache_plan

        if getattr(model, "quantization_method", None) is None:
            self.check_model(model_fingerprint(model), Architecture.of(model), type(model).__name__)
        return cache_plan(self, **options)

    def save(self, folder: str | Path) -> None:
        """Write `calibration.safetensors`, then `calibration.json`, each whole; the JSON file makes it complete."""
        folder = Path(folder)
        with disk_errors(folder):
            (folder / FACTS).unlink(missing_ok=True)  # a kill from here on leaves no old facts beside new tensors
        write_bytes(folder / TENSORS, save(self.tensors()))
        write_json(folder / FACTS, self.facts())
        for path in partials(folder):
            path.unlink(missing_ok=True)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every statistic as `domain/heads|linears/module/field`."""
        return {
            f"{domain}/{group}/{name}/{field}": value.contiguous()
            for domain, stats in self.statistics.items()
            for group, modules in stats.groups().items()
            for name, fields in modules.items()
            for field, value in fields.items()
        }

    def facts(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "model_type": self.model_type,
            "model": self.model,
            "fingerprint": {"model": list(self.fingerprint), "tokenizer": self.tokenizer_fingerprint},
            "bos": self.bos,
            "settings": dataclasses.asdict(self.settings),
            "domains": [dataclasses.asdict(domain) for domain in self.domains],
            "layers": [dataclasses.asdict(layer) for layer in self.layers],
            "unused_experts": self.unused_experts(),
            "heads": [dataclasses.asdict(head) for head in self.heads()],
            "kv_heads": [dataclasses.asdict(head) for head in self.kv_heads()],
        }

    @classmethod
    def load(cls, folder: str | Path) -> "Calibration":
        """Read a calibration folder.

        Raises:
            CalibrationError: missing, unfinished or damaged; the message names the file and the field.
        """
        folder = Path(folder)
        if not (folder / FACTS).is_file():
            raise CalibrationError(f"{folder}: no {FACTS}; a finished `quantsink calibrate -o` folder has one")
        facts = _read_facts(folder / FACTS)
        try:
            tensors = load_file(folder / TENSORS)
        except Exception as error:  # safetensors and torch raise what they like for what they cannot hold
            said = strict_json.said(error)
            raise CalibrationError(f"{folder / TENSORS}: cannot be read: {said}; calibrate again") from error
        try:
            with torch.device("meta"):  # shapes are compared; nothing is allocated for what a file says
                statistics = {domain.name: _read_domain(domain.name, facts.layers, tensors) for domain in facts.domains}
            _check_modules(facts.layers, statistics)
        except CalibrationError as error:
            raise CalibrationError(f"{folder / error.args[0]}") from None
        calibration = cls(
            facts.model_type,
            facts.model,
            facts.fingerprint,
            facts.tokenizer,
            facts.bos,
            facts.settings,
            facts.layers,
            facts.domains,
            statistics,
        )
        surplus = sorted(tensors.keys() - calibration.tensors().keys())
        if surplus:
            raise CalibrationError(
                f"{folder / TENSORS}: {strict_json.named(surplus[0])} does not belong to {FACTS}; calibrate again"
            )
        wrong = _contradiction(calibration, facts)
        if wrong:
            raise CalibrationError(f"{folder / FACTS}: {wrong} contradicts {TENSORS}; calibrate again")
        return calibration

    def check_model(self, fingerprint: tuple[str, str], architecture: Architecture, place: str) -> None:
        """Refuse a model with other weights, heads or layers than the calibrated one's."""
        linears = {name for stats in self.statistics.values() for name in stats.linears}
        experts = {name for stats in self.statistics.values() for name in stats.experts}
        same = [layer.outline for layer in self.layers] == [layer.outline for layer in architecture.attentions]
        if not same or linears != set(architecture.linears) or experts != {e.name for e in architecture.experts}:
            raise CalibrationError(f"{place}: its layers are not those in {FACTS}; calibrate this model")
        if not set(fingerprint) & set(self.fingerprint):
            raise CalibrationError(
                f"{place}: its weights are not those of the calibrated {self.model}; calibrate this model"
            )


def is_calibration(folder: Path) -> bool:
    """Whether a folder holds a calibration, finished or not, and nothing else."""
    return contents(folder) - {path.name for path in partials(folder)} <= {TENSORS, FACTS, *PICTURES}


def partials(folder: Path) -> list[Path]:
    """What an unfinished calibration left in a folder, one file for each process that had begun."""
    return [path for path in folder.glob("partial*.safetensors") if _PARTIAL_NAME.fullmatch(path.name)]


def head_means(fields: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Means, spreads and relative errors `[H]` from summed statistics; NaN where no row was counted."""
    rows, windows = fields["rows"], fields["windows"]
    energy = fields["output_energy"]
    means = {name: fields[name] / rows for name in ("bos_mass", "sink_mass", "last_mass", "entropy", "rest_peak")}
    for name in ("bos_mass", "entropy"):
        variance = fields[f"{name}_window_sq"] / windows - (fields[f"{name}_window"] / windows) ** 2
        means[f"{name}_std"] = variance.clamp(min=0).sqrt()
    means["logit_max"] = fields["logit_max"]
    for name in ("error_int8", "error_sink"):
        means[name] = torch.where(energy > 0, (fields[name] / energy).sqrt(), torch.full_like(energy, math.nan))
    return means


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _all_known(values: list[float]) -> tuple[float, ...] | None:
    return tuple(values) if all(map(math.isfinite, values)) else None


@dataclass(frozen=True)
class _Facts:
    """`calibration.json` as read, every value of its type; `derived` is what the tensors must give again."""

    model_type: str
    model: str
    fingerprint: tuple[str, str]
    tokenizer: str
    bos: int | None
    settings: Settings
    domains: tuple[Domain, ...]
    layers: tuple[AttentionLayer, ...]
    derived: Mapping[str, Any]


_DERIVED = ("unused_experts", "heads", "kv_heads")
_KEYS = {"schema", "model_type", "model", "fingerprint", "bos", "settings", "domains", "layers", *_DERIVED}


def _read_facts(path: Path) -> _Facts:
    try:
        facts = strict_json.parse(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CalibrationError(f"{path}: cannot be read: {error}; calibrate again") from error
    schema = facts.get("schema") if isinstance(facts, dict) else None
    if type(schema) is not int or schema != SCHEMA:
        raise CalibrationError(
            f"{path}: schema {strict_json.shown(schema)}, this quantsink reads {SCHEMA}; calibrate again"
        )
    try:
        return _typed(facts)
    except ValueError as error:
        raise CalibrationError(f"{path}: damaged: {error}; calibrate again") from None


def _typed(facts: dict[str, Any]) -> _Facts:
    for key in sorted(facts.keys() ^ _KEYS):
        raise ValueError(f"{strict_json.shown(key)} is {'unknown' if key in facts else 'missing'}")
    fingerprint = facts["fingerprint"]
    if not isinstance(fingerprint, dict) or fingerprint.keys() != {"model", "tokenizer"}:
        raise ValueError("fingerprint: expected model and tokenizer")
    pair = strict_json.value(tuple[str, ...], fingerprint["model"], "fingerprint.model")
    _check(len(pair) == 2, "fingerprint.model: expected two")
    found = _Facts(
        strict_json.value(str, facts["model_type"], "model_type"),
        strict_json.value(str, facts["model"], "model"),
        pair,
        strict_json.value(str, fingerprint["tokenizer"], "fingerprint.tokenizer"),
        strict_json.value(int | None, facts["bos"], "bos"),
        strict_json.build(Settings, facts["settings"], "settings", complete=True),
        _all_of(Domain, facts["domains"], "domains"),
        _all_of(AttentionLayer, facts["layers"], "layers"),
        {key: facts[key] for key in _DERIVED},
    )
    _check(found.bos is None or found.bos >= 0, "bos: 0 or more")
    wanted = found.settings
    _check(1 <= wanted.sink_size < wanted.seq_len, "settings.sink_size: from 1 to below seq_len")
    _check(wanted.query_rows is None or wanted.query_rows >= 1, "settings.query_rows: 1 or more")
    _check(wanted.error_windows >= 0, "settings.error_windows: 0 or more")
    _check(len({domain.name for domain in found.domains}) == len(found.domains), "domains: a name stands twice")
    for place, domain in enumerate(found.domains):
        counts = (domain.tokens, domain.windows, domain.documents, domain.removed_bos)
        _check(min(counts) >= 0, f"domains[{place}]: counts are 0 or more")
    _check(len({layer.name for layer in found.layers}) == len(found.layers), "layers: a name stands twice")
    for place, layer in enumerate(found.layers):
        _check(layer.index == place, f"layers[{place}].index: expected {place}, found {layer.index}")
        _check_layer(layer, f"layers[{place}]")
    return found


def _all_of(kind: type, data: object, place: str) -> tuple[Any, ...]:
    if not isinstance(data, list) or not data:
        raise ValueError(f"{place}: expected a list that is not empty")
    return tuple(strict_json.build(kind, item, f"{place}[{i}]", complete=True) for i, item in enumerate(data))


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
    first: dict[str, int] = {}
    for part, (count, size) in expected.items():
        slices = getattr(layer, part)
        fits = 0 < slices.size <= size if latent and part == "k" else slices.size == size
        _check(len(slices.starts) == count and fits, f"{place}.{part}: not {count} slices of {size} channels")
        _check(
            all(a < b for a, b in zip(slices.starts, slices.starts[1:], strict=False)),
            f"{place}.{part}.starts: not in the order of the heads",
        )
        _check(slices.starts[0] > first.get(slices.module, -1), f"{place}.{part}.starts: q, k and v out of order")
        first[slices.module] = slices.starts[0]
        by_module.setdefault(slices.module, []).extend((start, slices.size) for start in slices.starts)
    for module, spans in by_module.items():
        end = 0
        for start, size in sorted(spans):
            _check(start == end, f"{place}: slices of {strict_json.named(module)} overlap or leave channels out")
            end += size


def _check(good: bool, message: str) -> None:
    if not good:
        raise ValueError(message)


CLOSE, NOTHING = 1e-6, 1e-7
"""Relative and absolute: another machine may round the last bits of a root in another way."""


def _contradiction(calibration: Calibration, facts: _Facts) -> str | None:
    """The first derived fact that the tensors do not give again."""
    derived = calibration.facts()
    for key in _DERIVED:
        # Through JSON: tuples become lists and numbers that are keys become strings.
        place = _difference(facts.derived[key], json.loads(json.dumps(derived[key])), key)
        if place:
            return place
    return None


def _difference(found: Any, expected: Any, place: str) -> str | None:
    if isinstance(expected, dict) and isinstance(found, dict):
        if found.keys() != expected.keys():
            return place
        parts: Any = ((found[key], expected[key], f"{place}.{key}") for key in expected)
    elif isinstance(expected, list) and isinstance(found, list):
        if len(found) != len(expected):
            return place
        parts = ((a, b, f"{place}[{i}]") for i, (a, b) in enumerate(zip(found, expected, strict=True)))
    else:
        number = type(expected) is float and type(found) in (int, float)
        close = number and math.isclose(found, expected, rel_tol=CLOSE, abs_tol=NOTHING)
        return None if close or (type(found) is type(expected) and found == expected) else place
    return next(filter(None, itertools.starmap(_difference, parts)), None)


def _read_domain(domain: str, layers: tuple[AttentionLayer, ...], tensors: Mapping[str, torch.Tensor]) -> Statistics:
    heads = {layer.name: _fields(f"{domain}/heads/{layer.name}", empty_heads(layer), tensors) for layer in layers}
    linears = _by_size(f"{domain}/linears/", "input_amax", empty_linear, tensors)
    return Statistics(heads, linears, _by_size(f"{domain}/experts/", "tokens", empty_experts, tensors))


def _by_size(
    prefix: str, field: str, empty: Callable[[int], Fields], tensors: Mapping[str, torch.Tensor]
) -> dict[str, Fields]:
    """Every module under a prefix, as large as its `field` says."""
    found = {}
    for name in sorted({key[len(prefix) :].rpartition("/")[0] for key in tensors if key.startswith(prefix)}):
        first = tensors.get(f"{prefix}{name}/{field}")
        found[name] = _fields(f"{prefix}{name}", empty(first.numel() if first is not None else 0), tensors)
    return found


_COUNTED = frozenset(
    name for name in SUMS if not name.startswith(("key_sum", "query_gram", "error_", "kv_error", "entropy"))
)
"""Sums that cannot be negative, not even by rounding."""


def _fields(prefix: str, like: Fields, tensors: Mapping[str, torch.Tensor]) -> Fields:
    found = {}
    for field, blank in like.items():
        value = tensors.get(f"{prefix}/{field}")
        if value is None or value.shape != blank.shape or value.dtype != torch.float64:
            state = "missing" if value is None else f"{value.dtype} {list(value.shape)}"
            raise CalibrationError(
                f"{TENSORS}: {strict_json.named(f'{prefix}/{field}')} is {state} where float64 {list(blank.shape)} "
                "belongs; calibrate again"
            )
        # -inf is an extreme of nothing.
        good = ~(value.isnan() | (value == torch.inf)) if field in MAXIMA else value.isfinite()
        if field in _COUNTED:
            good &= value >= 0
        if not bool(good.all()):
            raise CalibrationError(
                f"{TENSORS}: {strict_json.named(f'{prefix}/{field}')} holds NaN, inf or a negative count; "
                "calibrate again"
            )
        found[field] = value
    return found


def _check_modules(layers: tuple[AttentionLayer, ...], statistics: Mapping[str, Statistics]) -> None:
    """The same layers in every domain, the attention's own among them."""
    first, *rest = statistics.values()
    for name, layer in ((layer.name, layer) for layer in layers):
        for part in (layer.q, layer.k, layer.v, layer.o):
            if part.module not in first.linears:
                raise CalibrationError(f"{TENSORS}: nothing of {strict_json.named(part.module)}; calibrate again")
        inputs = len(first.linears[layer.o.module]["input_amax"])
        if inputs != layer.heads * layer.value_dim:
            raise CalibrationError(
                f"{TENSORS}: {strict_json.named(layer.o.module)} has {inputs} inputs, {FACTS} gives {name} "
                f"{layer.heads} heads of {layer.value_dim}; calibrate again"
            )
    for other in rest:
        for mine, theirs in zip(first.groups().values(), other.groups().values(), strict=True):
            for module in sorted(mine.keys() | theirs.keys()):
                shapes = [[t.shape for t in group.get(module, {}).values()] for group in (mine, theirs)]
                if shapes[0] != shapes[1]:
                    raise CalibrationError(
                        f"{TENSORS}: {strict_json.named(module)} is not the same in every domain; calibrate again"
                    )


__all__ = [
    "BINS",
    "LEVELS",
    "Calibration",
    "Domain",
    "Head",
    "KVHead",
    "Settings",
    "Statistics",
    "head_means",
    "is_calibration",
    "partials",
]
