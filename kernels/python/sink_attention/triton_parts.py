"""What the Triton kernels are made of: one function a step of the mathematics.

All accumulate as the online softmax does (Milakov and Gimelshein, 2018; FlashAttention-2, Dao, 2023): `m` is a row's
running maximum, `z` the sum of its weights, `acc` the weighted values, both relative to exp(m). INT8 weights are
relative to their block's own maximum, so nothing is lost when `m` moves on.

Columns are counted from each batch row's first real token ("place"); `last` is the last place that a query row may see.
"""

import triton
import triton.language as tl

BLOCK = tl.constexpr(64)
SINK = tl.constexpr(1)
NATIVE = tl.constexpr(2)
SHARES = tl.constexpr(16)
"""Shares that `merge` reads at once."""
MAGIC = tl.constexpr(12582912.0)
"""1.5 * 2^23: adding it leaves no bits below 1, so it rounds half to even as `torch.round` does."""
NEVER = tl.constexpr(float("-inf"))
ALWAYS = tl.constexpr(float("inf"))


@triton.jit
def whole(x):
    """`x` rounded to the nearest integer, halves to even; |x| < 2^22."""
    return (x + MAGIC) - MAGIC


@triton.jit
def finite(x):
    """0 for -inf, so that exp(-inf - finite(x)) is 0 where nothing is visible."""
    return tl.where(x == NEVER, 0.0, x)


@triton.jit
def quantize(x, AXIS: tl.constexpr):
    """INT8 codes and scales along AXIS of `x` float32, bit for bit the reference's; NaN and inf reach the scale."""
    amax = tl.max(tl.abs(x), AXIS) + tl.sum(x * 0.0, AXIS)
    scale = tl.where(amax == 0, 1.0, tl.div_rn(amax, 127.0))
    codes = whole(tl.div_rn(x, tl.expand_dims(scale, AXIS)))
    return tl.minimum(tl.maximum(codes, -127.0), 127.0).to(tl.int8), scale


@triton.jit
def tanh(x):
    """Odd Taylor polynomial below 0.25, where 1 - exp would cancel."""
    y = x * x
    near = x * (1 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835)))))
    e = tl.exp(-2 * tl.abs(x))
    far = (1 - e) / (1 + e)
    return tl.where(tl.abs(x) < 0.25, near, tl.where(x < 0, -far, far))


@triton.jit
def limit(s, softcap, bound):
    """Soft-cap where it is not 0, then the absolute clip to `bound`; selections, so a NaN stays."""
    if softcap > 0:
        s = tanh(s / softcap) * softcap
    return tl.where(s > bound, bound, tl.where(s < -bound, -bound, s))


@triton.jit
def span(start, b, sink_size, keys, has_start):
    """(column of the first real token, sink tokens that are still there) of batch row `b`."""
    first = tl.load(start + b, mask=has_start != 0, other=0).to(tl.int32)
    first, gone = tl.maximum(first, 0), tl.minimum(first, 0)
    return first, tl.minimum(tl.maximum(sink_size + gone, 0), tl.maximum(keys - first, 0))


@triton.jit
def visible(place, last, mask, row, mask_l, column, keys, has_mask):
    """`[M, 64]`: which of the places each row sees. `mask` points at row 0 of `row` `[M]`."""
    exists = ((column < keys) & (has_mask != 0))[None, :]
    given = tl.load(mask + (row[:, None] * mask_l + column[None, :]), mask=exists, other=1)
    return (place[None, :] <= last[:, None]) & (given != 0)


@triton.jit
def int8_scores(q_codes, q_factor, q_mean, k_codes, k_scale):
    """q.k * scaling `[M, 64]` from codes `[M, D]` and `[64, D]`; the key mean's share `q_mean` is put back."""
    s = tl.dot(q_codes, tl.trans(k_codes)).to(tl.float32)
    return s * q_factor[:, None] * k_scale[None, :] + q_mean[:, None]


@triton.jit
def weigh(s):
    """(maximum `[M]`, weights `[M, 64]` relative to it, their sum) of one block's scores."""
    top = tl.max(s, 1)
    p = tl.exp(s - finite(top)[:, None])
    return top, p, tl.sum(p, 1)


@triton.jit
def int8_product(p, v_codes, v_scale):
    """Weighted values `[M, Dv]` of 8-bit weights round(127 p) with codes `[Dv, 64]` and scales `[Dv]`."""
    codes = whole(p * 127.0).to(tl.int8)
    return tl.dot(codes, tl.trans(v_codes)).to(tl.float32) * (v_scale * (1 / 127))[None, :]


@triton.jit
def rescale(m, z, acc, top, total):
    """Take one block's (or key's) maximum and weight into the row; its values still lack the factor returned last."""
    new = tl.maximum(m, top)
    old, share = tl.exp(m - finite(new)), tl.exp(top - finite(new))
    return new, z * old + total * share, acc * old[:, None], share[:, None]


@triton.jit
def add_native(m, z, acc, s, v):
    """Take one block with scores `s` `[M, 64]` and values as they are `[64, Dv]` into the row."""
    new = tl.maximum(m, tl.max(s, 1))
    p, old = tl.exp(s - finite(new)[:, None]), tl.exp(m - finite(new))
    return new, z * old + tl.sum(p, 1), tl.dot(p.to(v.dtype), v, acc * old[:, None])


@triton.jit
def finish(m, z, acc, aux):
    """Output rows; a learned sink logit `aux` (-inf: none) joins the denominator, rows that saw nothing are 0."""
    base = finite(tl.maximum(m, aux))
    own = tl.exp(m - base)
    o = acc * (own / (z * own + tl.exp(aux - base)))[:, None]
    return tl.where((z == 0)[:, None], 0.0, o)


@triton.jit
def rows_of_block(x, n, first, step, i, d, inside, dim):
    """Block `n` `[64, D]` of `x`, whose rows lie `step` apart; 0 where a row is not `inside` or past `dim` channels."""
    x += tl.cast(first + n * BLOCK, tl.int64) * step
    return tl.load(x + i[:, None] * step + d[None, :], mask=inside[:, None] & (d < dim)[None, :], other=0)


@triton.jit
def seen_columns(seen, column, keys, has_mask):
    """`[64]`: which columns exist and are seen by any query."""
    inside = column < keys
    return inside & (tl.load(seen + column, mask=inside & (has_mask != 0), other=1) != 0)


@triton.jit
def limit_scores(s, softcap, bound, floor):
    """`limit`, then the row clip: what lies below `floor` `[M]` is dropped."""
    s = limit(s, softcap, bound)
    return tl.where(s < floor[:, None], NEVER, s)


@triton.jit
def weighted_block(p, n, v_codes, v_scale, value_dim, i, d):
    """`int8_product` of weights `[M, 64]` with block `n` of the packed values."""
    at = tl.cast(n, tl.int64) * value_dim
    codes = tl.load(v_codes + at * BLOCK + d[:, None] * BLOCK + i[None, :], mask=(d < value_dim)[:, None], other=0)
    return int8_product(p, codes, tl.load(v_scale + at + d, mask=d < value_dim, other=0))


@triton.jit
def add_int8_blocks(
    m, z, acc, q_codes, q_factor, q_mean, floor, bound, softcap,
    begin, end, lead, whole_blocks, last, own, first,
    mask, row, mask_l, has_mask,
    k_codes, k_scale, v_codes, v_scale, keys, blocks, head_dim, value_dim,
    DIM: tl.constexpr, LIMITS: tl.constexpr, MIXED: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    """Blocks of codes as `pack` leaves them. Those from `lead` to before `whole_blocks` are seen in full by all rows.

    The first `lead` blocks hold sink tokens; rows leave out the first `own` `[M]` keys. Their values lie once more,
    without these, behind all `blocks`: all rows take those, MIXED only rows that leave any out. TOP: only `m`.
    """
    i, d = tl.arange(0, BLOCK), tl.arange(0, DIM)
    for n in tl.range(begin, end, disable_licm=True):
        place = n * BLOCK + i
        k = k_codes + tl.cast(n, tl.int64) * BLOCK * head_dim
        codes = tl.load(k + i[:, None] * head_dim + d[None, :], mask=(d < head_dim)[None, :], other=0)
        s = int8_scores(q_codes, q_factor, q_mean, codes, tl.load(k_scale + place))
        if LIMITS:
            s = limit_scores(s, softcap, bound[:, None], floor)
        if (n < lead) | (n >= whole_blocks):
            see = visible(place, last, mask, row, mask_l, first + place, keys, has_mask) & (
                place[None, :] >= own[:, None]
            )
            s = tl.where(see, s, NEVER)
        if TOP:
            m = tl.maximum(m, tl.max(s, 1))
        else:
            top, p, total = weigh(s)
            m, z, acc, share = rescale(m, z, acc, top, total)
            again = n + tl.where(n < lead, blocks, 0)
            if MIXED:
                if n < lead:
                    acc += (
                        weighted_block(tl.where((own > 0)[:, None], p, 0.0), again, v_codes, v_scale, value_dim, i, d)
                        * share
                    )
                    p = tl.where((own > 0)[:, None], 0.0, p)
                acc += weighted_block(p, n, v_codes, v_scale, value_dim, i, d) * share
            else:
                acc += weighted_block(p, again, v_codes, v_scale, value_dim, i, d) * share
    return m, z, acc


@triton.jit
def add_exact_keys(
    m, z, acc, query, q_row, scaling, floor, bound, softcap,
    begin, end, own, last, first,
    mask, row, mask_l, has_mask,
    key, value, k_l, v_l, head_dim, value_dim,
    DIM: tl.constexpr, LIMITS: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    """Keys from place `begin` to before `end` exactly, one at a time, in float32; rows take the first `own` `[M]` keys.

    Queries, `q_row` `[M]` behind `query`, are read again each time: held, they would not fit beside `acc`.
    """
    d = tl.arange(0, DIM)
    for j in tl.range(begin, end, disable_licm=True):
        column = tl.cast(first + j, tl.int64)
        see = (j <= last) & (j < own)
        see &= tl.load(mask + (row * mask_l + first + j), mask=has_mask != 0, other=1) != 0
        real = tl.max(see.to(tl.int32)) > 0
        k = tl.load(key + column * k_l + d, mask=real & (d < head_dim), other=0).to(tl.float32)
        at = q_row[:, None] + d[None, :]
        q = tl.load(query + at, mask=(d < head_dim)[None, :], other=0, volatile=True).to(tl.float32)
        s = tl.sum(q * k[None, :], 1) * scaling
        if LIMITS:
            s = limit(s, softcap, bound)
            s = tl.where(s < floor, NEVER, s)
        s = tl.where(see, s, NEVER)
        if TOP:
            m = tl.maximum(m, s)
        else:
            v = tl.load(value + column * v_l + d, mask=real & (d < value_dim), other=0).to(tl.float32)
            weight = tl.exp(s - finite(s))
            m, z, acc, share = rescale(m, z, acc, s, weight)
            acc += (weight[:, None] * share) * v[None, :]
    return m, z, acc


@triton.jit
def add_native_blocks(
    m, z, acc, query, q_row, scaling, floor, bound, softcap,
    begin, end, whole_blocks, last, first,
    mask, row, mask_l, seen, has_mask,
    key, value, k_l, v_l, keys, head_dim, value_dim,
    DIM: tl.constexpr, LIMITS: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    """Blocks of keys and values as they are. All rows see those before `whole_blocks` in full. TOP: only `m`.

    There is no matrix unit for float32: it takes one key at a time.
    """
    i, d = tl.arange(0, BLOCK), tl.arange(0, DIM)
    if key.dtype.element_ty == tl.float32:
        return add_exact_keys(
            m, z, acc, query, q_row, scaling, floor, bound, softcap,
            begin * BLOCK, tl.minimum(end * BLOCK, keys - first), last + 1, last, first,
            mask, row, mask_l, has_mask,
            key, value, k_l, v_l, head_dim, value_dim, DIM, LIMITS, TOP,
        )  # fmt: skip
    q = tl.load(query + (q_row[:, None] + d[None, :]), mask=(d < head_dim)[None, :], other=0)
    for n in tl.range(begin, end, disable_licm=True):
        place = n * BLOCK + i
        inside = seen_columns(seen, first + place, keys, has_mask)
        k = rows_of_block(key, n, first, k_l, i, d, inside, head_dim)
        s = tl.dot(q, tl.trans(k)) * scaling
        if LIMITS:
            s = limit_scores(s, softcap, bound[:, None], floor)
        if n >= whole_blocks:
            s = tl.where(visible(place, last, mask, row, mask_l, first + place, keys, has_mask), s, NEVER)
        if TOP:
            m = tl.maximum(m, tl.max(s, 1))
        else:
            v = rows_of_block(value, n, first, v_l, i, d, inside, value_dim)
            m, z, acc = add_native(m, z, acc, s, v)
    return m, z, acc
