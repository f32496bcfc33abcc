"""What each layer of a `SinkCache` keeps."""

from dataclasses import dataclass

from quantsink.errors import CacheError
from quantsink.kernels.coded_attention.codes import BLOCK


@dataclass(frozen=True)
class LayerRule:
    """What one layer keeps. `bits` and `windows` by KV head; window 0 keeps every block, n those that reach into the
    newest n tokens. `max_length`: tokens that the layer may hold, sinks included; None: all."""

    name: str
    index: int
    bits: tuple[int, ...]
    windows: tuple[int, ...]
    head_dim: int
    sinks: int
    residual: int
    max_length: int | None = None

    def __post_init__(self) -> None:
        for field, least in (("sinks", 0), ("residual", 0), ("max_length", self.sinks + self.residual + 2 * BLOCK)):
            value = getattr(self, field)
            if field == "max_length" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise CacheError(f"{self.name}: {field} {value!r}: a whole number, at least {least}")
        if any(isinstance(w, bool) or not isinstance(w, int) or w < 0 for w in self.windows):
            raise CacheError(f"{self.name}: windows {list(self.windows)}: whole numbers, 0 for all tokens")

    @property
    def kv_heads(self) -> int:
        return len(self.bits)

    @property
    def held(self) -> int:
        """Exact tokens of a row between passes, at most."""
        return self.sinks + self.residual + BLOCK - 1
