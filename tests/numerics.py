"""The error budget that every kernel is held to.

Truth is computed in float64 from the INT8 codes of queries, keys and values, which are the same to the bit in every
implementation: correctly rounded operations in a fixed order make them. The yardstick is the reference in the working
type: what honest rounding costs. A kernel passes when its error is at most twice the yardstick's. Errors are RMS
ratios, so a result of the wrong size fails as surely as one of the wrong direction.

Attention weights are rounded to codes after sums and exponentials whose last bits no definition fixes. Where such a
weight lies between two codes, nearer to the middle than those bits, both codes are right: a tie. So is a score at the
limit of the row clip, which is dropped or kept. `Truth` lists the ties with what the other choice changes, and an
output is compared with the truth whose ties are decided as that output decided them. A code that differs elsewhere, or
by two, is an error like any other.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantsink.kernels.coded_attention.cache import CodedKV
from quantsink.kernels.coded_attention.codes import Record, spread, unpack_record

BUDGET = 2.0
FLOOR = 1e-7
"""Half a unit in float32's last place: the error that a yardstick without any is taken to have."""
UNIT = 2.0**-24
"""Unit roundoff of float32, in which every implementation computes scores and weights, whatever its inputs' type."""
BLOCK = 64


@dataclass(frozen=True)
class Truth:
    """Outputs `[..., D]` in float64 with their ties.

    `row` `[T]` and `change` `[T, D]`: the row of each tie, counted over all leading dimensions, and what its other
    choice adds there. `others`: outputs after a choice that changes many codes of a row, with ties of their own.
    """

    out: Tensor
    row: Tensor
    change: Tensor
    others: "tuple[Truth, ...]" = ()

    @classmethod
    def of(cls, out: "Tensor | Truth") -> "Truth":
        """A result without codes has no ties."""
        if isinstance(out, Truth):
            return out
        return cls(out, torch.empty(0, dtype=torch.long), torch.empty(0, out.shape[-1], dtype=torch.double))

    def nearest(self, actual: Tensor) -> Tensor:
        """The truth with the ties of each row decided as brings it nearest to `actual`."""
        best = self._decided(actual)
        for other in self.others:
            out = other._decided(actual)
            nearer = (actual - out).norm(dim=-1) < (actual - best).norm(dim=-1)
            best = torch.where(nearer[..., None], out, best)
        return best

    def _decided(self, actual: Tensor) -> Tensor:
        """Ties change sides alone and in pairs for as long as that brings a row nearer."""
        out = self.out.double().clone()
        if not len(self.row):
            return out
        rows, index, counts = self.row.unique(return_inverse=True, return_counts=True)
        order = index.argsort(stable=True)
        place = torch.arange(len(order)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        most = int(counts.max())
        change = out.new_zeros(len(rows), most, out.shape[-1])
        change[index[order], place] = self.change[order]
        flat = out.view(-1, out.shape[-1])
        rest = actual.double().reshape(flat.shape)[rows] - flat[rows]
        improved = True
        while improved:
            improved = False
            for first, second in combinations_with_replacement(range(most), 2):
                step = change[:, first] + (change[:, second] if second > first else 0)
                better = (rest - step).square().sum(-1) < rest.square().sum(-1) * (1 - 1e-9)
                if not bool(better.any()):
                    continue
                improved = True
                step = torch.where(better[:, None], step, 0)
                rest -= step
                flat[rows] += step
                for tie in {first, second}:
                    change[:, tie] = torch.where(better[:, None], -change[:, tie], change[:, tie])
        return out

    @classmethod
    def stack(cls, parts: "list[Truth]", shape: tuple[int, ...]) -> "Truth":
        """Parts that lie one after the other along the rows, as one of `shape`."""

        def joined(parts: "list[Truth]") -> Truth:
            starts = [0]
            for part in parts:
                starts.append(starts[-1] + len(part.out))
            rows = [part.row + start for part, start in zip(parts, starts, strict=False)]
            return cls(
                torch.cat([part.out for part in parts]).view(shape),
                torch.cat(rows),
                torch.cat([part.change for part in parts]),
            )

        most = max(len(part.others) for part in parts)
        others = [joined([part.others[n] if n < len(part.others) else part for part in parts]) for n in range(most)]
        return replace(joined(parts), others=tuple(others))


def rms_error(actual: Tensor, truth: Tensor) -> float:
    """RMS of `actual - truth` over RMS of `truth`; NaN where either is not finite."""
    actual, truth = actual.double(), truth.double()
    size = truth.pow(2).mean().sqrt()
    error = (actual - truth).pow(2).mean().sqrt()
    return float(error / size) if size > 0 else float(error)


def row_errors(actual: Tensor, truth: Tensor) -> Tensor:
    """The RMS error of each row (last dimension), in order; absolute where the true row is zero."""
    actual, truth = actual.double(), truth.double()
    error, size = (actual - truth).norm(dim=-1), truth.norm(dim=-1)
    return torch.where(size > 0, error / size, error).flatten()


def assert_within_budget(actual: Tensor, yardstick: Tensor, truth: Tensor | Truth, budget: float = BUDGET) -> None:
    """error(actual) <= budget x error(yardstick), both against `truth` with its ties decided as they decided them."""
    assert_pool_within_budget([(actual, yardstick, truth)], budget)


def assert_pool_within_budget(cases: Iterable[tuple[Tensor, Tensor, Tensor | Truth]], budget: float = BUDGET) -> None:
    """As `assert_within_budget` over all (actual, yardstick, truth) together, and over the median of their rows."""
    actual_errors, yardstick_errors = [], []
    for actual, yardstick, given in cases:
        truth = Truth.of(given)
        assert actual.shape == truth.out.shape, f"shape {list(actual.shape)}, expected {list(truth.out.shape)}"
        assert bool(actual.isfinite().all()), "the result is not finite"
        for result, errors in ((actual, actual_errors), (yardstick, yardstick_errors)):
            nearest = truth.nearest(result)
            errors.append((rms_error(result, nearest), row_errors(result, nearest)))

    def pooled(errors: list[tuple[float, Tensor]]) -> float:
        return math.sqrt(sum(rms**2 for rms, _ in errors) / len(errors))

    def median(errors: list[tuple[float, Tensor]]) -> float:
        return float(torch.cat([rows for _, rows in errors]).median())

    for name, measure in (("RMS", pooled), ("median row", median)):
        error, allowed = measure(actual_errors), budget * max(measure(yardstick_errors), FLOOR)
        assert error <= allowed, (
            f"{name} error {error:.3g} exceeds the budget {allowed:.3g} ({budget} x the yardstick's)"
        )


# Truth of attention.


def codes_of(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """INT8 codes and their scale along `dim`, by the float32 operations that every implementation takes."""
    top = x.float().abs().amax(dim, keepdim=True)
    scale = torch.where(top == 0, 1, top / 127)
    return (x.float() / scale).round().double(), scale.double()


def dot_error(a: Tensor, b: Tensor) -> Tensor:
    """What rounding moves the D products of `a @ b` by: sqrt(D) + 2 units (Higham and Mary, 2019), in any order."""
    return (math.sqrt(a.shape[-1]) + 2) * UNIT * (a.abs() @ b.abs())


@dataclass(frozen=True)
class Scores:
    """Scores `[n, N, keys]` of n query rows and N blocks, hidden ones -inf, and how far rounding may move them.

    `error` leaves out what moves all scores of a block alike, `shift` `[n, 1 or N, 1]`: weights do not feel it.
    """

    value: Tensor
    error: Tensor
    shift: Tensor

    def limited(self, softcap: float, bound: float) -> "Scores":
        """Soft-cap, then absolute clip. A score that was clipped has no error."""
        value, error, shift = self.value, self.error, self.shift
        if softcap:
            part = torch.tanh(value / softcap)
            error, shift = (error + shift) * (1 - part**2) + 8 * UNIT * softcap * part.abs(), torch.zeros_like(shift)
            value = part * softcap
        if bound < math.inf:
            error, shift = torch.where(value.abs() > bound, 0, error + shift), torch.zeros_like(shift)
            value = value.clamp(-bound, bound)
        return Scores(value, error, shift)

    def only(self, visible: Tensor) -> "Scores":
        return replace(self, value=self.value.masked_fill(~visible, -math.inf))


@dataclass(frozen=True)
class Codes:
    """Values in codes. A weight w counts as `b / 127 * round(127 w * scale / b)`, b the largest of its block.

    `scale` `[N, G, keys]`, one for each group of channels; `value` `[N, keys, D]`: what one code adds; `zero`
    `[N, keys, D]` takes the weights as they are.
    """

    scale: Tensor
    value: Tensor
    zero: Tensor | None = None


@dataclass(frozen=True)
class Head:
    """One head's rows over keys that are computed as they are, `values` `[E, D]`, and keys in codes."""

    exact: Scores
    values: Tensor
    coded: Scores | None = None
    codes: Codes | None = None
    clip_row: float = math.inf
    s_aux: float = -math.inf

    def truth(self) -> Truth:
        parts = [self.exact] + ([self.coded] if self.coded else [])
        if self.clip_row == math.inf:
            return self.weighted(parts)
        value, error = (
            torch.cat([x.flatten(1) for x in xs], 1) for xs in zip(*map(self.all_errors, parts), strict=True)
        )
        top, at = value.max(1, keepdim=True)
        floor = top - self.clip_row
        near = (value - floor).abs() <= error + error.gather(1, at) + 2 * UNIT * (top.abs() + floor.abs())
        near &= (value > -math.inf) & (error > 0)

        def kept(flips: Tensor) -> Truth:
            keep = ((value >= floor) ^ flips).split([x.value[0].numel() for x in parts], 1)
            return self.weighted([x.only(k.view(x.value.shape)) for x, k in zip(parts, keep, strict=True)])

        return choices(kept, near)

    @staticmethod
    def all_errors(x: Scores) -> tuple[Tensor, Tensor]:
        return x.value, x.error + x.shift

    def weighted(self, parts: list[Scores]) -> Truth:
        """Values weighted by softmax, those in codes by rounded weights; scores beyond -inf."""
        top = torch.cat([x.value.flatten(1) for x in parts], 1).amax(1)[:, None, None]
        base = top.masked_fill(top == -math.inf, 0)
        total = sum((x.value - base).exp().sum((1, 2)) for x in parts)[:, None] + torch.exp(self.s_aux - base[:, 0])
        total = torch.where(top[:, 0] > -math.inf, total, 1)
        out = (parts[0].value[:, 0] - base[:, 0]).exp() @ self.values
        rows, changes = [], []
        if self.coded and self.codes:
            x, codes = parts[1], self.codes
            most = x.value.amax(-1, keepdim=True)
            share = (most - base).exp()
            most = most.masked_fill(most == -math.inf, 0)
            p = (x.value - most).exp()
            if codes.zero is not None:
                out += torch.einsum("nbk,bkd->nd", p * share, codes.zero)
            groups, width = codes.scale.shape[1], codes.value.shape[-1]
            size = width if groups == 1 else BLOCK
            for g in range(groups):
                channels = slice(g * size, min((g + 1) * size, width))
                scaled = p * codes.scale[:, g]
                largest, at = scaled.max(-1, keepdim=True)
                y = torch.where(largest > 0, 127 * scaled / largest, 0)
                unit, value = largest / 127 * share, codes.value[..., channels]
                out[:, channels] += torch.einsum("nbk,bkd->nd", y.round() * unit, value)
                error = x.error + UNIT * (2 * (x.value - most).abs() + 5)
                tie = (y - y.floor() - 0.5).abs() <= y * (error + error.gather(-1, at))
                n, b, k = (tie & (y > 0)).nonzero(as_tuple=True)
                other = torch.where(y.round() > y, -1, 1)[n, b, k] * unit[n, b, 0] / total[n, 0]
                change = torch.zeros(len(n), width, dtype=torch.double)
                change[:, channels] = other[:, None] * value[b, k]
                rows.append(n)
                changes.append(change)
        truth = Truth.of(out / total)
        return replace(truth, row=torch.cat(rows), change=torch.cat(changes)) if rows else truth


def choices(make: Callable[[Tensor], Truth], ties: Tensor) -> Truth:
    """`make` of no flip, and as its `others` with the first of each row's `ties` `[n, ...]` flipped, the second, ..."""
    count = ties.flatten(1).cumsum(1).view(ties.shape)
    truth = make(torch.zeros_like(ties))
    return replace(
        truth, others=tuple(make(ties & (count == n + 1)) for n in range(int(count.amax() if count.numel() else 0)))
    )


def option(options: dict[str, Any], name: str, head: int, default: float) -> float:
    """The head's entry of an option `[H]`."""
    return default if options.get(name) is None else float(options[name][head].float())


def sink_attention_truth(arguments: dict[str, Any]) -> Truth:
    """Of `sink_attention` with scales per block of 64, for arguments in up to 32 bits."""
    query, key = arguments["query"], arguments["key"]
    value, (batch, heads, queries, _) = arguments["value"], query.shape
    parts = [head_truth(arguments, b, h, h // (heads // key.shape[1])) for b in range(batch) for h in range(heads)]
    return Truth.stack(parts, (batch, heads, queries, value.shape[-1]))


def head_truth(arguments: dict[str, Any], b: int, h: int, kv_head: int) -> Truth:
    """Head `h` of batch row `b`: `[Lq, Dv]`."""
    options = {"sink_size": 1, "causal": True, "weight_scale": "block", "block": BLOCK, **arguments}
    assert (options["weight_scale"], options["block"]) == ("block", BLOCK)
    scaling, mask = options["scaling"], options.get("mask")
    q = options["query"][b, h].double()
    start = 0 if options.get("sink_start") is None else int(options["sink_start"][b])
    k, v = (options[name][b, kv_head].double() for name in ("key", "value"))
    visible = torch.ones(len(q), len(k), dtype=torch.bool)
    if mask is not None:
        visible = mask[b if mask.shape[0] > 1 else 0, 0]
    elif options["causal"]:
        visible = visible.tril(len(k) - len(q))
    k, v, visible = k[max(start, 0) :], v[max(start, 0) :], visible[:, max(start, 0) :]
    if not len(k):
        return Truth.of(torch.zeros(len(q), v.shape[-1], dtype=torch.double))
    k, v = (x.masked_fill(~visible.any(0)[:, None], 0) for x in (k, v))
    sinks = {0: 0, 1: max(options["sink_size"] + min(start, 0), 0), 2: len(k)}[int(options["routes"][h])]
    sinks = min(sinks, len(k))
    softcap, bound = options.get("softcap") or 0.0, option(options, "clip_absolute", h, math.inf)
    head_options = option(options, "clip_row", h, math.inf), option(options, "s_aux", h, -math.inf)

    key = k[:sinks].mT
    shift = torch.zeros(len(q), 1, 1, dtype=torch.double)
    exact = Scores((q @ key)[:, None] * scaling, dot_error(q, key)[:, None] * scaling, shift)
    exact = exact.limited(softcap, bound).only(visible[:, None, :sinks])
    if sinks == len(k):
        return Head(exact, v[:sinks], None, None, *head_options).truth()

    mean = options["key_mean"][kv_head].float().double()[:, None]
    q_codes, q_scale = codes_of(q, 1)
    k_codes, k_scale = codes_of(k - mean.T, 1)
    product, offset = (q_codes @ k_codes.mT) * (q_scale * scaling) * k_scale.mT, q @ mean * scaling
    beyond = -len(k) % BLOCK
    product, seen = pad(product, (0, beyond)), pad(visible, (0, beyond)).clone()
    seen[:, :sinks] = False
    s = product + offset
    coded = Scores(
        *(x.unflatten(1, (-1, BLOCK)) for x in (s, UNIT * (4 * product.abs() + s.abs()))),
        (dot_error(q, mean) * scaling)[:, None],
    )
    coded = coded.limited(softcap, bound).only(seen.unflatten(1, (-1, BLOCK)))
    rest = pad(v, (0, 0, 0, beyond))
    rest[:sinks] = 0
    v_codes, v_scale = codes_of(rest.unflatten(0, (-1, BLOCK)), 1)
    ones = torch.ones(len(v_codes), 1, BLOCK, dtype=torch.double)
    return Head(exact, v[:sinks], coded, Codes(ones, v_codes * v_scale), *head_options).truth()


def coded_attention_truth(query: Tensor, codes: CodedKV, routes: Tensor, **options: Any) -> Truth:
    """Of `coded_attention`, for a query in up to 32 bits."""
    batch, heads, queries, _ = query.shape
    parts = [
        coded_head_truth(query[b, h].double(), codes, b, h, heads, routes, options)
        for b in range(batch)
        for h in range(heads)
    ]
    return Truth.stack(parts, (batch, heads, queries, codes.value.shape[-1]))


def coded_head_truth(
    q: Tensor, codes: CodedKV, b: int, h: int, heads: int, routes: Tensor, options: dict[str, Any]
) -> Truth:
    """Head `h` of batch row `b`, `[Lq, Dv]`, from its queries `[Lq, D]`."""
    scaling = options.get("scaling", q.shape[-1] ** -0.5)
    limits = options.get("softcap") or 0.0, option(options, "clip_absolute", h, math.inf)
    head_options = option(options, "clip_row", h, math.inf), option(options, "s_aux", h, -math.inf)
    kv_head = h // (heads // codes.key.shape[1])
    (bank, place), (sinks, newest, *used) = codes.heads[kv_head].tolist(), codes.rows[b].tolist()
    width, columns = codes.bits[bank], codes.key.shape[2]
    middle, layout = 2 ** (width - 1), Record(width, q.shape[-1], codes.value.shape[-1])
    record = [x.double() for x in unpack_record(codes.banks[bank][b, place, : used[bank]], layout)]
    k_codes, k_scale, k_zero, v_codes, v_scale, v_zero = record
    k_codes, k_zero = k_codes - middle, k_zero + middle * k_scale
    v_codes, v_zero = v_codes - middle, spread(v_zero + middle * v_scale, layout.value_dim)

    keys = [codes.sink_key[b, kv_head, :sinks], codes.key[b, kv_head, columns - newest :]]
    values = [codes.sink_value[b, kv_head, :sinks], codes.value[b, kv_head, columns - newest :]]
    seen = torch.ones(len(q), sinks + newest, dtype=torch.bool).tril(sinks + newest - len(q))
    seen[:, :sinks] = True
    native = int(routes[h]) == 2 or not used[bank]
    if native:
        keys.append((k_codes * k_scale[..., None] + k_zero[..., None]).mT.flatten(0, 1))
        values.append((v_codes * spread(v_scale, layout.value_dim) + v_zero).flatten(0, 1))
        seen = torch.cat([seen, torch.ones(len(q), len(keys[-1]), dtype=torch.bool)], 1)
    key, value = torch.cat([x.double() for x in keys]).mT, torch.cat([x.double() for x in values])
    shift = torch.zeros(len(q), 1, 1, dtype=torch.double)
    exact = Scores((q @ key)[:, None] * scaling, dot_error(q, key)[:, None] * scaling, shift)
    exact = exact.limited(*limits).only(seen[:, None])
    if native:
        return Head(exact, value, None, None, *head_options).truth()

    # The query's codes for each block, by the float32 operations that every implementation takes.
    scaled = q.float()[:, None] * k_scale.float()
    top = scaled.abs().amax(-1, keepdim=True)
    y = torch.where(top > 0, scaled * (torch.full_like(top, 127) / top), 0)
    step = top.double() / 127 * scaling
    offset, shift = q @ k_zero.mT * scaling, dot_error(q, k_zero.mT) * scaling

    def weighted(flips: Tensor) -> Truth:
        q_codes = y.round().double()
        q_codes = q_codes + torch.where(flips, torch.where(q_codes > y, -1, 1), 0)
        product = torch.einsum("nbd,bdk->nbk", q_codes, k_codes) * step
        size = torch.einsum("nbd,bdk->nbk", q_codes.abs(), k_codes.abs()) * step
        s = product + offset[..., None]
        error = UNIT * ((math.sqrt(q.shape[-1]) + 2) * size + 4 * product.abs() + s.abs())
        coded = Scores(s, error, shift[..., None]).limited(*limits)
        return Head(exact, value, coded, Codes(v_scale, v_codes, v_zero), *head_options).truth()

    return choices(weighted, (y - y.floor() - 0.5).abs() <= 4 * UNIT * y.abs())


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fresh memory holds NaN (integers: their maximum), so a result that was never written shows."""
    before = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(before)
