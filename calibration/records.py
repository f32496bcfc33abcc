"""The value types of a calibration: what was asked for, which text was read, what was measured of each head."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from quantsink.calibration.statistics import Fields
from quantsink.models.head_layout import AttentionLayer


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
    """One text that was measured, with the counts of what was read."""

    name: str
    spec: str
    tokens: int
    windows: int
    documents: int
    removed_bos: int
    complete: bool
    fingerprint: str


@dataclass(frozen=True, eq=False)
class Facts:
    """What a calibration is of."""

    model_type: str
    model: str
    fingerprint: tuple[str, str]
    tokenizer_fingerprint: str
    bos: int | None
    """Token id that starts each window; None: the model has no BOS and the first token is the sink candidate."""
    settings: Settings
    layers: tuple[AttentionLayer, ...]
    domains: tuple[Domain, ...]


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
    experts: Mapping[str, Fields] = field(default_factory=dict)

    def groups(self) -> dict[str, Mapping[str, Fields]]:
        return {"heads": self.heads, "linears": self.linears, "experts": self.experts}
