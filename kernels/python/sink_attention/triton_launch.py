"""The host's side of the Triton kernels: which configuration runs, and the launches. No launch waits for the GPU.

`CONFIGS` is all that can be chosen: the dispatcher picks from it, the ahead-of-time test compiles the whole of it.
Sizes are run-time values, so a configuration is one compiled kernel; strides and head sizes are multiples of 16.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from quantsink.kernels.attention import Route
from quantsink.kernels.sink_attention import triton as kernels
from quantsink.kernels.sink_attention.call import Call

BLOCK = 64
DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
DIMS = (64, 128, 256)
DECODE_QUERIES = 8
DECODE_ROWS = 16
"""Rows of a tile of `decode`: the least that matrix units take."""
OFFSETS = 2**24
"""Steps between rows stay below this, so that offsets inside a tile are 32-bit integers."""


@dataclass(frozen=True)
class Config:
    """One compiled kernel: `kernel`<`dtype`, head size padded to `dim`, `rows` of queries a tile, `flag`>.

    `flag` is LIMITS of `prefill` (scores are soft-capped or clipped) and TOP of `decode` (only the rows' maxima).
    """

    kernel: str
    dtype: str
    dim: int
    rows: int = 0
    flag: bool = False
    warps: int = 4
    stages: int = 2
    registers: int | None = None
    """Limit for each thread where the assembler would choose a lower one, for the sake of occupancy, and spill."""

    @property
    def constants(self) -> dict[str, int | bool]:
        """The kernel's compile-time arguments."""
        flag = {"prefill": "LIMITS", "decode": "TOP"}.get(self.kernel)
        return {"DIM": self.dim} | ({"ROWS": self.rows, flag: self.flag} if flag else {})

    @property
    def options(self) -> dict[str, int | None]:
        """The compiler's options."""
        return {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.registers}


def _decode(dtype: str, dim: int, top: bool) -> Config:
    warps, registers = 4 if dim < 256 else 8, 168 if dim == 64 or top else 255
    return Config("decode", dtype, dim, DECODE_ROWS, top, warps, stages=1, registers=registers)


def _prefill(dtype: str, dim: int, limits: bool) -> Config:
    rows = {64: 128, 128: 32 if limits else 128, 256: 32}[dim]
    return Config("prefill", dtype, dim, rows, limits, warps=8, stages=2)


CONFIGS: tuple[Config, ...] = tuple(
    config
    for dtype in DTYPES.values()
    for dim in DIMS
    for config in (
        Config("pack", dtype, dim, warps=4 if dim < 256 else 8),
        # Where the limits cost little beside the rest, one kernel serves calls with and without.
        *(_prefill(dtype, dim, limits) for limits in ((True,) if dtype == "fp32" or dim == 256 else (False, True))),
        *(_decode(dtype, dim, top) for top in (False, True)),
        Config("merge", dtype, dim, warps=2),
    )
)
_CHOICE = {(c.kernel, c.dtype, c.dim, c.flag): c for c in CONFIGS}


def choose(kernel: str, dtype: torch.dtype, dim: int, flag: bool = False) -> Config:
    """The configuration for head sizes up to `dim`; one with LIMITS also serves calls without."""
    name, size = DTYPES[dtype], padded(dim)
    return _CHOICE.get((kernel, name, size, flag)) or _CHOICE[kernel, name, size, True]


def padded(dim: int) -> int:
    """The head size that kernels compute with."""
    return next(size for size in DIMS if dim <= size)


def serves(call: Call) -> bool:
    """Whether the kernels compute this call: scales of 64 keys, 16- and 32-bit types, head sizes 16, 32, ... 256."""
    query, key, value = call.query, call.key, call.value
    return (
        call.weight_scale == "block"
        and call.block == BLOCK
        and query.dtype in DTYPES
        and query.dtype == key.dtype == value.dtype
        and all(size % 16 == 0 and 0 < size <= DIMS[-1] for size in (query.shape[3], value.shape[3]))
        and all(0 < x.numel() < 2**31 * x.shape[0] for x in (query, key, value))
    )


def attention(call: Call) -> Tensor:
    """`reference`'s result from the kernels, for a call that `serves` accepts."""
    split = any_split(call.routes)
    operands = Operands(call)
    decode = operands.queries <= DECODE_QUERIES and operands.query.stride(1) * operands.group < 2**30
    return operands.decode(split) if decode else operands.prefill(split)


_facts: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def any_split(routes: Tensor) -> bool:
    """Whether any head is not native; raises ValueError for a route that is none.

    The first call with a tensor of routes waits for the GPU; later ones remember the answer until it is written to.
    Tensors made in inference mode do not count their writes and are read every time.
    """
    version = None if routes.is_inference() else routes._version
    known: tuple[int, bool] | None = _facts.get(routes)
    if known is not None and known[0] == version:
        return known[1]
    values = routes.tolist()
    if not all(Route.INT8 <= route <= Route.NATIVE for route in values):
        raise ValueError(f"sink_attention: routes must be 0 (int8), 1 (sink) or 2 (native), not {values}")
    split = any(route != Route.NATIVE for route in values)
    if version is not None:
        _facts[routes] = (version, split)
    return split


class Operands:
    """One call's tensors as the kernels take them. For a missing one any of its type stands in and is never read."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.query, self.key, self.value = (_aligned(x) for x in (call.query, call.key, call.value))
        self.routes = call.routes.to(torch.uint8).contiguous()
        self.mean = call.key_mean.float().contiguous()
        self.has_mask, self.has_start = int(call.mask is not None), int(call.sink_start is not None)
        self.mask = self.routes[None, None, None] if call.mask is None else call.mask.view(torch.uint8)
        if self.mask.stride(3) != 1:
            self.mask = self.mask.contiguous()
        self.start = self.new(torch.int64, 0) if call.sink_start is None else call.sink_start.long()
        self.clip, self.absolute, self.aux = (
            self.mean if x is None else x.float().contiguous() for x in (call.clip_row, call.clip_absolute, call.s_aux)
        )
        self.has_clip, self.has_absolute = int(call.clip_row is not None), int(call.clip_absolute is not None)
        self.has_aux = int(call.s_aux is not None)
        self.batch, self.heads, self.queries, self.head_dim = call.query.shape
        self.kv_heads, self.keys, self.value_dim = call.key.shape[1], call.key.shape[2], call.value.shape[3]
        self.group = self.heads // self.kv_heads
        self.blocks = -(-self.keys // BLOCK)
        self.dim = max(self.head_dim, self.value_dim)
        self.out = call.query.new_empty(self.batch, self.queries, self.heads, self.value_dim)

    def new(self, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.query.device)

    def codes(self, seen: Tensor, split: bool) -> tuple[int, Tensor, Tensor, Tensor, Tensor]:
        """(edge, codes and scales of the keys, of the values) of all blocks; see the kernel."""
        b, g, n = self.batch, self.kv_heads, self.blocks
        if not split:
            return 0, self.mean.view(torch.int8), self.mean, self.mean.view(torch.int8), self.mean
        edge = -(-min(self.call.sink_size, self.keys) // BLOCK)
        codes = (
            self.new(torch.int8, b, g, n, BLOCK, self.head_dim),
            self.new(torch.float32, b, g, n, BLOCK),
            self.new(torch.int8, b, g, n + edge, self.value_dim, BLOCK),
            self.new(torch.float32, b, g, n + edge, self.value_dim),
        )
        launch(
            choose("pack", self.query.dtype, self.dim),
            (n, g, b),
            *(self.key, self.value, seen, self.mean, self.routes, self.start, *codes),
            *(*_strides(self.key), *_strides(self.value), _strides(seen)[0]),
            *(self.keys, self.head_dim, self.value_dim, self.group, edge, self.call.sink_size),
            *(self.has_mask, self.has_start),
        )
        return edge, *codes

    def seen(self) -> Tensor:
        """`[B or 1, 1, Lk]`, not 0 where any query sees the key: the others enter no scale."""
        return self.mask.any(2) if self.has_mask and self.queries > 1 else self.mask[:, :, 0]

    def prefill(self, split: bool) -> Tensor:
        call = self.call
        seen = self.seen()
        edge, *codes = self.codes(seen, split)
        limits = bool(self.has_clip or self.has_absolute or call.softcap)
        config = choose("prefill", self.query.dtype, self.dim, limits)
        launch(
            config,
            (-(-self.queries // config.rows), self.heads, self.batch),
            *(self.query, self.key, self.value, self.out, self.mask, seen, self.mean, self.routes, self.start),
            *(self.clip, self.absolute, self.aux, *codes),
            *(*_strides(self.query), *_strides(self.key), *_strides(self.value)),
            *(_strides(self.mask)[0], self.mask.stride(2), _strides(seen)[0]),
            *(self.queries, self.keys, self.head_dim, self.value_dim, self.group, self.blocks, edge),
            *(call.sink_size, int(call.causal), self.has_mask, self.has_start, self.has_clip, self.has_absolute),
            *(self.has_aux, call.scaling, call.softcap),
        )
        return self.out.transpose(1, 2)

    def decode(self, split: bool) -> Tensor:
        call, b, g, seen = self.call, self.batch, self.kv_heads, self.seen()
        edge, *codes = self.codes(seen, split)
        tiles = -(-self.group * self.queries // DECODE_ROWS)
        rows = tiles * DECODE_ROWS
        each = blocks_a_share(self.blocks, b * g, _processors(self.query.device))
        shares = -(-self.blocks // each)
        part_m, part_z = self.new(torch.float32, 2, b, g, shares, rows)
        part_acc = self.new(torch.float32, b, g, shares, rows, self.value_dim)
        tops = self.new(torch.float32, b, g, shares, rows) if self.has_clip else part_m
        for top in (True, False) if self.has_clip else (False,):
            launch(
                choose("decode", self.query.dtype, self.dim, top),
                (tiles * shares, g, b),
                *(self.query, self.key, self.value, self.mask, seen, self.mean, self.routes, self.start),
                *(self.clip, self.absolute, *codes, tops, part_m, part_z, part_acc),
                *(*_strides(self.query), *_strides(self.key), *_strides(self.value)),
                *(_strides(self.mask)[0], self.mask.stride(2), _strides(seen)[0]),
                *(self.queries, self.keys, self.head_dim, self.value_dim, self.group, self.blocks),
                *(edge, each, call.sink_size, int(call.causal), self.has_mask, self.has_start),
                *(self.has_clip, self.has_absolute, call.scaling, call.softcap),
            )
        launch(
            choose("merge", self.query.dtype, self.dim),
            (self.group * self.queries, g, b),
            *(part_m, part_z, part_acc, self.aux, self.out),
            *(self.queries, self.value_dim, self.group, shares, rows, self.has_aux),
        )
        return self.out.transpose(1, 2)


def launch(config: Config, grid: tuple[int, int, int], *arguments: Tensor | float) -> None:
    """Run one kernel on the tensors' device."""
    kernel = getattr(kernels, config.kernel)
    kernel[grid](*arguments, **config.constants, **config.options)


def blocks_a_share(blocks: int, pairs: int, processors: int) -> int:
    """Blocks that one program of `decode` takes, so that `pairs` (batch rows x KV heads) fill every processor twice."""
    return -(-blocks // max(2 * processors // pairs, 1))


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _aligned(x: Tensor) -> Tensor:
    """`x` `[B, heads, L, D]` with rows that lie 16 elements or a multiple apart, on a 16-byte address."""
    steps = [step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1]
    near = all(step % 16 == 0 for step in steps[:-1]) and x.stride(2) < OFFSETS and max(x.stride()) < 2**31
    whole = x.stride(3) == 1 and near and x.data_ptr() % 16 == 0
    return x if whole else x.contiguous()


def _strides(x: Tensor) -> tuple[int, ...]:
    """Strides of all but the last axis, 0 where an axis has one entry."""
    return tuple(step if size > 1 else 0 for step, size in zip(x.stride()[:-1], x.shape[:-1], strict=True))
