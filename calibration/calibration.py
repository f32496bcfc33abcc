"""`Calibration`: the measured statistics of one model, and its two files (docs/formats.md)."""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from quantsink.architecture import Architecture, AttentionLayer, HeadSlices
from quantsink.calibration.statistics import (
    BINS,
    FAR_WINDOWS,
    Fields,
    empty_experts,
    empty_heads,
    empty_linear,
    merge,
)
from quantsink.errors import CalibrationError
from quantsink.files import contents, disk_errors, write_bytes, write_json
from quantsink.kernels import Route
from quantsink.plan import CachePlan
from quantsink.source import model_fingerprint

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
        except (OSError, SafetensorError) as error:
            raise CalibrationError(f"{folder / TENSORS}: cannot be read: {error}; calibrate again") from error
        try:
            layers = tuple(_read_layer(layer) for layer in facts["layers"])
            domains = tuple(Domain(**domain) for domain in facts["domains"])
            statistics = {domain.name: _read_domain(domain.name, layers, tensors) for domain in domains}
            calibration = cls(
                facts["model_type"],
                facts["model"],
                _pair(facts["fingerprint"]["model"]),
                facts["fingerprint"]["tokenizer"],
                facts["bos"],
                Settings(**facts["settings"]),
                layers,
                domains,
                statistics,
            )
        except (KeyError, TypeError, AttributeError, ValueError, RuntimeError, OverflowError) as error:
            raise CalibrationError(
                f"{folder / FACTS}: damaged, {type(error).__name__}: {error}; calibrate again"
            ) from error
        surplus = sorted(tensors.keys() - calibration.tensors().keys())
        if surplus or not statistics:
            raise CalibrationError(
                f"{folder / TENSORS}: {surplus[0] if surplus else 'no domain'} does not belong to {FACTS}"
            )
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


def _pair(value: Any) -> tuple[str, str]:
    first, second = value
    return str(first), str(second)


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _all_known(values: list[float]) -> tuple[float, ...] | None:
    return tuple(values) if all(map(math.isfinite, values)) else None


def _read_facts(path: Path) -> dict[str, Any]:
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CalibrationError(f"{path}: cannot be read: {error}; calibrate again") from error
    if not isinstance(facts, dict) or facts.get("schema") != SCHEMA:
        found = facts.get("schema") if isinstance(facts, dict) else None
        raise CalibrationError(f"{path}: schema {found!r}, this quantsink reads {SCHEMA}; calibrate again")
    return facts


def _read_layer(data: dict[str, Any]) -> AttentionLayer:
    slices = {
        part: HeadSlices(**{**data[part], "starts": tuple(data[part]["starts"])}) for part in ("q", "k", "v", "o")
    }
    return AttentionLayer(**{**data, **slices})


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


def _fields(prefix: str, like: Fields, tensors: Mapping[str, torch.Tensor]) -> Fields:
    found = {}
    for field, blank in like.items():
        value = tensors.get(f"{prefix}/{field}")
        if (
            value is None
            or value.shape != blank.shape
            or value.dtype != torch.float64
            or bool((value.isnan() | (value == torch.inf)).any())
        ):
            state = "missing" if value is None else f"{value.dtype} {list(value.shape)}, or NaN or inf,"
            raise CalibrationError(
                f"{TENSORS}: {prefix}/{field} is {state} where float64 {list(blank.shape)} belongs; calibrate again"
            )
        found[field] = value
    return found


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
