"""One layer of a `SinkCache`: sink tokens exact, blocks of codes, the newest tokens exact.

A row is a sequence of the batch; with padding on the left it starts at its own first real token, so its blocks lie as
they would if it were alone. Of a row of `n` real tokens,

    blocks = (n - sinks - residual) // 64    (0 where that is negative)

blocks of 64 tokens are codes, written once; until a row has its first block its sink tokens stand among the newest. A
pass has two halves: `update` takes the new keys and values and returns stand-ins for the cached ones, and attention,
which knows the stand-ins, calls `begin`, computes, and calls `commit`, which turns what is due into codes.
"""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from quantsink.cache.bank import Bank, banks_of
from quantsink.cache.layout import LayerRule
from quantsink.cache.placeholder import PassMask, Standin
from quantsink.errors import CacheError
from quantsink.kernels.coded_attention.cache import CodedKV
from quantsink.kernels.coded_attention.codes import BLOCK, Metric, decode, encode

SLICE = 16
"""Blocks that are encoded at once: bounds what encoding needs beside the keys and values."""
RECORDED = 512
"""Tokens that stay exact beside the residual while a rollback may come (assisted decoding)."""


class SinkLayer(CacheLayerMixin):
    """The cache of one full-attention layer.

    Args:
        rule: what it keeps.
        module: the attention module that it was made for.
        rotate: `rotate(keys, shift)` turns keys by `shift` positions; rolling caches need it.
        metric: of its KV heads, for rounding keys; None rounds each number by itself.
    """

    is_sliding = False
    is_croppable = True
    is_compileable = False
    supports_early_init = False

    def __init__(
        self,
        rule: LayerRule,
        module: nn.Module | None = None,
        rotate: Callable[[Tensor, int], Tensor] | None = None,
        metric: Metric | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rule, self.rotate = rule, rotate
        self.module = None if module is None else weakref.ref(module)
        self.record_past = False
        self.seen = PassMask()
        self.last = False
        self.banks = banks_of(rule)
        self.metrics = [None if metric is None else metric.heads(list(bank.heads)) for bank in self.banks]
        self.heads = torch.empty(rule.kv_heads, 2, dtype=torch.int64)
        for number, bank in enumerate(self.banks):
            for row, head in enumerate(bank.heads):
                self.heads[head] = torch.tensor([number, row])
        self._clear()

    def _clear(self) -> None:
        self.keys = self.values = None
        self.used = self.total = 0
        self.mask_sizes = (0, 0)
        self.is_initialized = False
        self.sink_key: Tensor | None = None
        self.sink_value: Tensor | None = None
        self.turned: Tensor | None = None
        self.start: list[int] = []
        self.blocks: list[int] = []
        self.dropped: list[int] = []
        self.pending: tuple[Tensor, Tensor] | None = None
        for bank in self.banks:
            bank.clear(0, torch.device("cpu"))

    # ---- what transformers asks

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        batch = key_states.shape[0]
        self.dtype, self.device = key_states.dtype, key_states.device
        shape = (batch, self.rule.kv_heads, 0, self.rule.head_dim)
        self.keys, self.values = (torch.empty(shape, dtype=self.dtype, device=self.device) for _ in range(2))
        self.start, self.blocks, self.dropped = [0] * batch, [0] * batch, [0] * batch
        for bank in self.banks:
            bank.clear(batch, self.device)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Take the keys and values `[B, KVH, L, D]` of a pass; returns stand-ins `[B, KVH, all, D]`.

        Raises:
            CacheError: shapes, type or device of another model, or an earlier pass that did not end.
        """
        self._check(key_states, value_states)
        value_states = value_states.to(key_states.dtype)  # autocast gives them another type than keys after rotary
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._leave_inference()
        length = key_states.shape[2]
        if self.rule.max_length is not None:
            self._make_room(length)
        self.pending = key_states, value_states
        if self.total:
            self._append(key_states, value_states)
        self.mask_sizes = self.get_mask_sizes(length)
        self.total += length
        return Standin.of(key_states, self.total, self), Standin.of(value_states, self.total, self)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(columns, first column) of the mask of a pass: every token so far; of a rolling cache the newest."""
        columns = min(self.total, self.rule.max_length or self.total)
        return columns + query_length, self.total - columns

    def get_seq_length(self) -> int:
        """Tokens seen, also those that a rolling cache has dropped: the next token's position."""
        return self.total

    def get_max_length(self) -> int:
        return -1 if self.rule.max_length is None else self.rule.max_length

    def get_max_cache_shape(self) -> int:
        return self.get_max_length()

    def reset(self) -> None:
        self.record_past = False
        self._clear()

    def offload(self) -> None:
        raise CacheError("SinkCache: its layers cannot be offloaded")

    prefetch = offload

    def activate_past_recording(self) -> None:
        """From now on more of the newest tokens stay exact between a pass and its `crop`, which finds them so."""
        self.record_past = True

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.select(torch.arange(len(self.start)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.select(torch.arange(len(self.start))[indices.cpu()])

    def select(self, indices: Tensor) -> None:
        """Rows `indices` `[B']` of every part, in that order."""
        if not self.is_initialized:
            return
        rows = indices.tolist()
        if rows == list(range(len(self.start))):
            return
        self._idle()
        at = indices.to(self.device)
        assert self.keys is not None
        assert self.values is not None
        self.keys, self.values = self.keys.index_select(0, at), self.values.index_select(0, at)
        for name in ("sink_key", "sink_value", "turned"):
            held = getattr(self, name)
            setattr(self, name, None if held is None else held.index_select(0, at))
        for bank in self.banks:
            bank.data = bank.data.index_select(0, at)
            bank.count = [bank.count[row] for row in rows]
        self.start, self.blocks, self.dropped = (
            [held[row] for row in rows] for held in (self.start, self.blocks, self.dropped)
        )

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens; the argument is 0 or negative, as transformers gives it.

        Where that cuts into a block of codes, what is left of it becomes exact numbers: what its codes stand for.

        Raises:
            CacheError: tokens that were dropped (streaming heads, a rolling cache) would be needed again.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): give the number of tokens to remove as a negative number")
        if not self.is_initialized:
            return
        self.check_crop(tokens_to_remove)
        self._leave_inference()
        remove = min(-tokens_to_remove, self.total)
        newest = [self._newest(row) for row in range(len(self.start))]
        if all(remove <= have for have in newest):
            self.used, self.total = self.used - remove, self.total - remove
        elif remove:
            self._crop_deep(remove)
        if self.record_past:
            self._encode_due()

    def check_crop(self, tokens_to_remove: int) -> None:
        """Refuse a crop that `crop` would refuse, before any layer is cropped."""
        if not self.is_initialized or not tokens_to_remove:
            return
        self._idle()
        for row, blocks in enumerate(self.blocks):
            length = max(self._length(row) + tokens_to_remove, 0)
            whole = min(blocks, max(length - self.rule.sinks, 0) // BLOCK)
            for bank in self.banks:
                gone = blocks - bank.count[row]
                if not gone or length == 0:
                    continue
                left = bank.count[row] * BLOCK + self._newest(row) + tokens_to_remove
                if left < min(bank.window, length - self.rule.sinks) or blocks - whole > bank.count[row] or not whole:
                    raise CacheError(
                        f"{self.rule.name}: cropped by {-tokens_to_remove} tokens, into what its streaming heads or a "
                        "rolling cache have dropped; call cache.reset()"
                    )

    # ---- what attention asks

    @property
    def first(self) -> bool:
        """Whether the pass in progress is the first: its keys are all there is, and exact."""
        return self.pending is not None and self.total == self.pending[0].shape[2]

    def begin(self, module: nn.Module, starts: list[int] | None) -> None:
        """Told by attention before it computes: the column of each row's first real token, None = 0 for all.

        Raises:
            CacheError: another model's module, or rows that begin elsewhere than before.
        """
        if self.module is not None and self.module() is not module:
            raise CacheError(f"{self.rule.name}: this cache was made for another model; make one for each")
        assert self.pending is not None
        starts = [0] * len(self.start) if starts is None else starts
        before = self.total - self.pending[0].shape[2]
        for row, (old, new) in enumerate(zip(self.start, starts, strict=True)):
            if old < before and new != old:
                raise CacheError(
                    f"{self.rule.name}: row {row} began at column {old} in earlier passes and at {new} in this one; "
                    "give every pass the attention_mask of all tokens so far"
                )
        self.start = list(starts)

    def view(self) -> CodedKV:
        """The cache as the kernels read it, this pass's tokens included."""
        assert self.keys is not None
        assert self.values is not None
        key, value = self.keys[:, :, : self.used], self.values[:, :, : self.used]
        none = key[:, :, :0]
        rows = [
            [self.rule.sinks if self.blocks[row] else 0, self._newest(row), *(bank.count[row] for bank in self.banks)]
            for row in range(len(self.start))
        ]
        sink_key = self.sink_key if self.turned is None else self.turned
        return CodedKV(
            sink_key=none if sink_key is None else sink_key,
            sink_value=none if self.sink_value is None else self.sink_value,
            key=key,
            value=value,
            banks=tuple(bank.data for bank in self.banks),
            bits=tuple(bank.record.bits for bank in self.banks),
            heads=self.heads,
            rows=torch.tensor(rows, dtype=torch.int64),
        )

    def commit(self) -> None:
        """Told by attention when it is done: keep what must stay exact, turn the rest into codes."""
        assert self.pending is not None
        spare = self._recorded()
        if self.first:
            self._encode_due(*self.pending, spare=spare)
        else:
            self._encode_due(spare=spare)
        self.pending = None
        if self.last:
            self.seen.mask = None

    def __deepcopy__(self, memory: dict[int, Any]) -> "SinkLayer":
        """A copy for the same model: a prompt's cache can be copied and gone on with."""
        new = object.__new__(type(self))
        memory[id(self)] = new
        shared = {"module", "rotate", "seen"}
        vars(new).update({k: v if k in shared else copy.deepcopy(v, memory) for k, v in vars(self).items()})
        new.seen = PassMask()
        return new

    def __getstate__(self) -> dict[str, Any]:
        """For pickle: a cache that is read back knows no model, and takes any of its shape."""
        if self.rotate is not None:
            raise CacheError(f"{self.rule.name}: a rolling cache cannot be pickled: it holds its model's rotation")
        return {**vars(self), "module": None, "seen": PassMask()}

    # ---- inside

    def tensors(self) -> list[Tensor]:
        """Everything that the layer holds."""
        held = [self.keys, self.values, self.sink_key, self.sink_value, self.turned]
        return [x for x in held if x is not None] + [bank.data for bank in self.banks]

    def _length(self, row: int) -> int:
        return self.total - self.start[row]

    def _newest(self, row: int) -> int:
        """Exact tokens of a row at the end of the buffer."""
        coded = self.rule.sinks + self.blocks[row] * BLOCK if self.blocks[row] else 0
        return self._length(row) - coded

    def _idle(self) -> None:
        if self.pending is not None:
            raise CacheError(f"{self.rule.name}: a pass was interrupted in this layer; call cache.reset()")

    def _check(self, key: Tensor, value: Tensor) -> None:
        name, rule = self.rule.name, self.rule
        self._idle()
        shape = (rule.kv_heads, rule.head_dim)
        if key.dim() != 4 or (key.shape[1], key.shape[3]) != shape or value.shape != key.shape:
            raise CacheError(
                f"{name}: keys {list(key.shape)} and values {list(value.shape)} where the cache has {rule.kv_heads} KV "
                f"heads of {rule.head_dim}; it was made for another model"
            )
        if not self.is_initialized:
            return
        if len(self.start) != key.shape[0]:
            raise CacheError(f"{name}: a batch of {key.shape[0]} where the cache holds {len(self.start)} rows")
        if key.device != self.device or key.dtype != self.dtype:
            raise CacheError(
                f"{name}: keys in {key.dtype} on {key.device} where the cache holds {self.dtype} on {self.device}; "
                "call cache.reset() after moving a model"
            )

    def _append(self, key: Tensor, value: Tensor) -> None:
        assert self.keys is not None
        assert self.values is not None
        end = self.used + key.shape[2]
        if end > self.keys.shape[2]:
            size = self._capacity(end)
            self.keys, self.values = (_resized(x, 0, self.used, size) for x in (self.keys, self.values))
        self.keys[:, :, self.used : end] = key
        self.values[:, :, self.used : end] = value
        self.used = end

    def _capacity(self, columns: int) -> int:
        """Columns to reserve for `columns` that are used."""
        return max(columns, min(self.rule.held + 1, 2 * max(columns, BLOCK)))

    def _recorded(self) -> int:
        """Tokens that stay exact beside the residual."""
        limit = self.rule.max_length
        return 0 if not self.record_past else RECORDED if limit is None else min(RECORDED, limit // 4)

    def _leave_inference(self) -> None:
        """Tensors made under `torch.inference_mode` cannot be written outside of it; let go of them once."""
        if torch.is_inference_mode_enabled() or not any(x.is_inference() for x in self.tensors()):
            return
        for name in ("keys", "values", "sink_key", "sink_value", "turned"):
            held = getattr(self, name)
            setattr(self, name, None if held is None else held.clone())
        for bank in self.banks:
            bank.data = bank.data.clone()

    def _due(self, row: int, spare: int) -> int:
        """Blocks that a row should have."""
        free = self._length(row) - self.rule.sinks - self.rule.residual - spare
        return max(self.blocks[row], free // BLOCK, 0)

    def _encode_due(self, key: Tensor | None = None, value: Tensor | None = None, *, spare: int = 0) -> None:
        """Turn every row's due blocks into codes; `key` and `value` hold a first pass, not in the buffer yet."""
        assert self.keys is not None
        assert self.values is not None
        if key is None or value is None:
            key, value, end = self.keys, self.values, self.used
        else:
            end = key.shape[2]
        newest = [self._newest(row) for row in range(len(self.start))]
        due = [self._due(row, spare) for row in range(len(self.start))]
        alike: dict[tuple[int, int, int, tuple[int, ...]], list[int]] = {}
        for row in range(len(self.start)):
            if due[row] > self.blocks[row]:
                counts = tuple(bank.count[row] for bank in self.banks)
                alike.setdefault((newest[row], self.blocks[row], due[row], counts), []).append(row)
        for (have, old, new, _), rows in alike.items():
            at = end - have
            whole = len(rows) == len(self.start)
            if not old:
                self._store_sinks(key, value, rows, at)
                at += self.rule.sinks
            left = have - (self.rule.sinks if not old else 0) - (new - old) * BLOCK
            for bank in self.banks:
                self._store_blocks(bank, key, value, None if whole else rows, at, new - old, left)
            for row in rows:
                self.blocks[row] = new
        tail = max((self._newest(row) for row in range(len(self.start))), default=0)
        if key is not self.keys or tail < self.used or self.keys.shape[2] > self.rule.held + 1:
            # What was grown for a pass goes back; what a row needs between passes stays.
            have = self._capacity(tail) if key is not self.keys else self.keys.shape[2]
            size = max(tail, min(have, self.rule.held + 1))
            if key is self.keys and self.keys.shape[2] == size:
                _shift(self.keys, end - tail, end)
                _shift(self.values, end - tail, end)
            else:
                self.keys, self.values = _resized(key, end - tail, end, size), _resized(value, end - tail, end, size)
            self.used = tail
        self._turn_sinks()

    def _store_sinks(self, key: Tensor, value: Tensor, rows: list[int], at: int) -> None:
        sinks = self.rule.sinks
        if self.sink_key is None or self.sink_value is None:
            shape = (len(self.start), self.rule.kv_heads, sinks, self.rule.head_dim)
            self.sink_key, self.sink_value = (torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in "kv")
        self.sink_key[rows] = key[rows, :, at : at + sinks]
        self.sink_value[rows] = value[rows, :, at : at + sinks]
        if self.turned is not None:
            self.turned[rows] = self.sink_key[rows]
            for row in rows:
                self.dropped[row] = 0

    def _store_blocks(
        self, bank: Bank, key: Tensor, value: Tensor, rows: list[int] | None, at: int, blocks: int, newest: int
    ) -> None:
        """Codes of `blocks` blocks from column `at` on; `newest` exact tokens follow them."""
        batch = len(self.start)
        chosen = range(batch) if rows is None else rows
        first = max(0, blocks - bank.keep(blocks, newest))
        for row in chosen:
            kept = bank.keep(bank.count[row] + blocks, newest) - (blocks - first)
            bank.drop(row, bank.count[row] - max(kept, 0))
        if self.rule.max_length is not None:
            first = max(first, blocks - self._room())
            for row in chosen:
                bank.drop(row, bank.count[row] + blocks - first - self._room())
        old = bank.count[chosen[0]]
        bank.reserve(max(old + blocks - first, *bank.count))
        heads = list(bank.heads) if len(bank.heads) < self.rule.kv_heads else None
        metric = self.metrics[self.banks.index(bank)]
        if metric is not None and metric.factor.device != self.device:
            metric = self.metrics[self.banks.index(bank)] = metric.to(self.device)
        for begin in range(first, blocks, SLICE):
            end = min(begin + SLICE, blocks)
            part = slice(at + begin * BLOCK, at + end * BLOCK)
            k, v = (_pick(x, rows, heads, part).unflatten(2, (end - begin, BLOCK)) for x in (key, value))
            where = slice(old + begin - first, old + end - first)
            try:
                with torch.autocast(self.device.type, enabled=False):
                    coded = encode(k, v, bank.record.bits, metric)
            except ValueError as error:
                raise CacheError(f"{self.rule.name}: {error}; use the model's own cache") from error
            if rows is None:
                bank.data[:, :, where] = coded
            else:
                bank.data[rows, :, where] = coded
        for row in chosen:
            bank.count[row] += blocks - first

    # ---- rolling

    def _room(self) -> int:
        """Blocks that a rolling layer may hold between passes."""
        assert self.rule.max_length is not None
        return (self.rule.max_length - self.rule.held) // BLOCK

    def _make_room(self, length: int) -> None:
        """Drop the oldest blocks before a pass of `length` tokens, so that it sees at most `max_length`."""
        assert self.rule.max_length is not None
        limit = self.rule.max_length
        if self.record_past and self.used + length > limit // 2:
            self._encode_due()
        longest = limit if not self.total else limit - self.rule.held
        if length > longest:
            raise CacheError(
                f"{self.rule.name}: a pass of {length} tokens does not fit a rolling cache of {limit}; feed at most "
                f"{limit - self.rule.held} at a time (generate: prefill_chunk_size={limit - self.rule.held})"
            )
        for row in range(len(self.start)):
            held = self._newest(row) + length + (self.rule.sinks if self.blocks[row] else 0)
            for bank in self.banks:
                bank.drop(row, bank.count[row] - max((limit - held) // BLOCK, 0))
        self._turn_sinks()

    def _turn_sinks(self) -> None:
        """Sink keys as far from the newest token as they stand in the cache, always turned from the originals."""
        if self.rule.max_length is None or self.sink_key is None or self.rotate is None or not self.rule.sinks:
            return
        gone = [(blocks - max(b.count[row] for b in self.banks)) * BLOCK for row, blocks in enumerate(self.blocks)]
        if gone == self.dropped:
            return
        if self.turned is None:
            self.turned = self.sink_key.clone()
        for row, shift in enumerate(gone):
            if shift != self.dropped[row]:
                self.turned[row] = self.rotate(self.sink_key[row : row + 1], shift)[0]
        self.dropped = gone

    # ---- cropping into codes

    def _crop_deep(self, remove: int) -> None:
        rows = range(len(self.start))
        kept, blocks = [], []
        for row in rows:
            length = max(self._length(row) - remove, 0)
            whole = min(self.blocks[row], max(length - self.rule.sinks, 0) // BLOCK)
            if not length:
                for bank in self.banks:
                    bank.count[row] = 0
                self.blocks[row] = self.dropped[row] = 0
            kept.append(self._exact_tail(row, length, whole))
            blocks.append(whole)
        tail = max(k.shape[1] for k, _ in kept)
        assert self.keys is not None
        shape = (len(rows), self.rule.kv_heads, self._capacity(tail), self.rule.head_dim)
        keys, values = (torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in "kv")
        for row, (k, v) in enumerate(kept):
            keys[row, :, tail - k.shape[1] : tail] = k
            values[row, :, tail - v.shape[1] : tail] = v
            for bank in self.banks:
                bank.count[row] -= self.blocks[row] - blocks[row]
        self.keys, self.values, self.used, self.blocks = keys, values, tail, blocks
        self.total -= remove
        self.start = [min(start, self.total) for start in self.start]

    def _exact_tail(self, row: int, length: int, whole: int) -> tuple[Tensor, Tensor]:
        """Exact keys and values `[KVH, n, D]` of a row cropped to `length` tokens that keeps `whole` blocks."""
        assert self.keys is not None
        assert self.values is not None
        if not length:
            return self.keys[row, :, :0], self.values[row, :, :0]
        have = self._newest(row)
        parts_k, parts_v = [], []
        missing = self.blocks[row] - whole  # `check_crop` has seen that they are there
        if missing:
            k = torch.empty(self.rule.kv_heads, BLOCK, self.rule.head_dim, dtype=self.dtype, device=self.device)
            v = torch.empty_like(k)
            for bank in self.banks:
                key, value = decode(bank.data[row, :, bank.count[row] - missing], bank.record)
                heads = list(bank.heads)
                k[heads], v[heads] = key.to(self.dtype), value.to(self.dtype)
            parts_k.append(k)
            parts_v.append(v)
        else:
            parts_k.append(self.keys[row, :, self.used - have : self.used])
            parts_v.append(self.values[row, :, self.used - have : self.used])
        sinks = self.rule.sinks if self.blocks[row] else 0
        if sinks and not whole:
            assert self.sink_key is not None
            assert self.sink_value is not None
            parts_k.insert(0, self.sink_key[row])
            parts_v.insert(0, self.sink_value[row])
            sinks = 0
        want = length - whole * BLOCK - (sinks if whole else 0)
        return torch.cat(parts_k, 1)[:, :want], torch.cat(parts_v, 1)[:, :want]


def _pick(x: Tensor, rows: list[int] | None, heads: list[int] | None, part: slice) -> Tensor:
    x = x[:, :, part] if rows is None else x[rows, :, part]
    return x if heads is None else x[:, heads]


def _resized(x: Tensor, begin: int, end: int, size: int) -> Tensor:
    """A buffer of `size` columns that begins with columns `begin` to `end` of `x`."""
    new = x.new_empty(x.shape[0], x.shape[1], size, x.shape[3])
    new[:, :, : end - begin] = x[:, :, begin:end]
    return new


def _shift(x: Tensor, begin: int, end: int) -> None:
    """Move columns `begin` to `end` to the front."""
    if begin:
        x[:, :, : end - begin] = x[:, :, begin:end].clone()


__all__ = ["SinkLayer"]
