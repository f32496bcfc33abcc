"""`Calibration`: the measured statistics of one model, and what follows from them for each head."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from quantsink.calibration.records import Facts, Head, KVHead, Statistics
from quantsink.calibration.statistics import FAR_WINDOWS, merge
from quantsink.calibration.stored import (
    FACTS,
    SCHEMA,
    TENSORS,
    first_contradiction,
    partials,
    read_calibration,
    tensors_by_name,
)
from quantsink.errors import CalibrationError
from quantsink.files import disk_errors, write_bytes, write_json
from quantsink.kernels import Route
from quantsink.models.architecture import Architecture
from quantsink.models.fingerprint import model_fingerprint
from quantsink.plan import CachePlan
from quantsink.recipe import KVCache

LEVELS = {"sink": 0.3, "strong": 0.8, "dormant": 0.98}
"""Report levels of BOS mass."""


@dataclass(frozen=True, eq=False)
class Calibration(Facts):
    """Statistics of one model over one or several texts."""

    statistics: Mapping[str, Statistics]

    @property
    def total(self) -> Statistics:
        """All domains together."""
        by_domain = [statistics.groups() for statistics in self.statistics.values()]
        return Statistics(
            *(
                {name: merge(groups[group][name] for groups in by_domain) for name in modules}
                for group, modules in by_domain[0].items()
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
        heads = []
        for layer in self.layers:
            means = head_means(total[layer.name])
            domains = {domain: head_means(stats.heads[layer.name]) for domain, stats in self.statistics.items()}
            for head in range(layer.heads):
                value = {name: float(tensor[head]) for name, tensor in means.items()}
                mass = max(value["bos_mass"], value["sink_mass"], 0.0 if layer.causal else value["last_mass"])
                sink = mass >= sink_threshold and value["entropy"] <= entropy_threshold
                by_domain = {
                    domain: {key: float(domain_means[key][head]) for key in ("bos_mass", "entropy")}
                    for domain, domain_means in domains.items()
                    if math.isfinite(float(domain_means["bos_mass"][head]))
                }
                heads.append(
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
                        error_int8=_finite_or_none(value["error_int8"]),
                        error_sink=_finite_or_none(value["error_sink"]),
                        sink=sink,
                        route=(Route.SINK if sink else Route.INT8).name.lower(),
                        domains=by_domain,
                    )
                )
        return heads

    def kv_heads(self, sink_threshold: float = 0.3, entropy_threshold: float = 1.0) -> list[KVHead]:
        """Every KV head, in order of layer and KV head."""
        total = self.total.heads
        sinks = {(h.layer, h.kv_head) for h in self.heads(sink_threshold, entropy_threshold) if h.sink}
        heads = []
        for layer in self.layers:
            fields = total[layer.name]
            far = (fields["far_mass"] / fields["far_rows"]).unflatten(0, (layer.kv_heads, -1)).amax(1)
            error, error_no_sink = (
                (fields[name] / fields["kv_energy"][:, None]).sqrt().tolist()
                for name in ("kv_error", "kv_error_no_sink")
            )
            for head in range(layer.kv_heads):
                heads.append(
                    KVHead(
                        layer=layer.index,
                        kv_head=head,
                        sink=(layer.index, head) in sinks,
                        error=_all_finite_or_none(error[head]),
                        error_no_sink=_all_finite_or_none(error_no_sink[head]),
                        far=dict(zip(FAR_WINDOWS, map(_finite_or_none, far[head].tolist()), strict=True)),
                    )
                )
        return heads

    def cache_plan(self, model: Any, options: KVCache | None = None, **named: Any) -> CachePlan:
        """The plan of a `SinkCache` for `model`.

        Args:
            options: or each by its name, as in `SinkCache.from_calibration`.

        Raises:
            CalibrationError: another model's calibration, or one that lacks what the options need.
            RecipeError: an invalid option.
        """
        from quantsink.calibration.cache_plan import cache_plan

        if getattr(model, "quantization_method", None) is None:
            self.check_model(model_fingerprint(model), Architecture.of(model), type(model).__name__)
        return cache_plan(self, KVCache(**{"bits": 4, **named}) if options is None else options)

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
        """Every statistic as `domain/heads|linears|experts/module/field`."""
        return tensors_by_name(self.statistics)

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
        facts, statistics, derived = read_calibration(folder)
        calibration = cls(**vars(facts), statistics=statistics)
        wrong = first_contradiction(derived, calibration.facts())
        if wrong:
            raise CalibrationError(f"{folder / FACTS}: {wrong} contradicts {TENSORS}; calibrate again")
        return calibration

    def check_config(self, config: Any, place: str) -> None:
        """Refuse a model of another type by its config alone, before its weights are loaded."""
        if self.model_type not in (config.model_type, config.get_text_config(decoder=True).model_type):
            raise CalibrationError(
                f"{place}: its model type is {config.model_type}, but the calibration is of {self.model}, a "
                f"{self.model_type}; calibrate this model"
            )

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


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _all_finite_or_none(values: list[float]) -> tuple[float, ...] | None:
    return tuple(values) if all(map(math.isfinite, values)) else None


__all__ = ["LEVELS", "Calibration", "head_means"]
