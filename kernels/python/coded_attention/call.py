"""One call of `quantsink::coded_attention`, as every implementation takes it."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from quantsink.kernels.coded_attention.cache import CodedKV

SCHEMA = (
    "(Tensor query, Tensor sink_key, Tensor sink_value, Tensor key, Tensor value, Tensor[] banks, Tensor heads,"
    " Tensor rows, Tensor routes, Tensor? clip_row, Tensor? clip_absolute, Tensor? s_aux, int[] bits, float scaling,"
    " float softcap) -> Tensor"
)


class Call(NamedTuple):
    """The operator's arguments in the order of `SCHEMA`; `coded_attention` and `CodedKV` say what they mean."""

    query: Tensor
    sink_key: Tensor
    sink_value: Tensor
    key: Tensor
    value: Tensor
    banks: Sequence[Tensor]
    heads: Tensor
    rows: Tensor
    routes: Tensor
    clip_row: Tensor | None
    clip_absolute: Tensor | None
    s_aux: Tensor | None
    bits: Sequence[int]
    scaling: float
    softcap: float

    @classmethod
    def of(
        cls,
        query: Tensor,
        codes: CodedKV,
        routes: Tensor,
        scaling: float,
        softcap: float | None = None,
        clip_row: Tensor | None = None,
        clip_absolute: Tensor | None = None,
        s_aux: Tensor | None = None,
    ) -> "Call":
        """A query over a cache; `coded_attention` says what the arguments mean."""
        return cls(
            query, codes.sink_key, codes.sink_value, codes.key, codes.value, codes.banks, codes.heads, codes.rows,
            routes, clip_row, clip_absolute, s_aux, codes.bits, scaling, softcap or 0.0,
        )  # fmt: skip

    @property
    def codes(self) -> CodedKV:
        """The cache."""
        exact = self.sink_key, self.sink_value, self.key, self.value
        return CodedKV(*exact, tuple(self.banks), tuple(self.bits), self.heads, self.rows)
