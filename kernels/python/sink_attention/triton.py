"""Triton kernels of `quantsink::sink_attention`, held to the reference. The host's side is `triton_launch`.

    pack      keys and values of one block of 64 -> INT8 codes and scales, each read once
    prefill   one head x a tile of queries over all blocks; the head's route is read here
    decode    all heads of one KV head x a few queries over a share of the blocks, each read once for all of them
    merge     the shares of `decode` meet through their maximum and sum (Flash-Decoding, Dao et al., 2023)

Queries are quantized where they are loaded. `import triton` is the library, here and in every module of this package.
"""

import triton
import triton.language as tl

from quantsink.kernels.sink_attention.triton_parts import (
    ALWAYS,
    BLOCK,
    NATIVE,
    NEVER,
    SHARES,
    SINK,
    add_exact_keys,
    add_int8_blocks,
    add_native_blocks,
    finish,
    finite,
    quantize,
    rescale,
    rows_of_block,
    seen_columns,
    span,
)


@triton.jit(
    do_not_specialize=["seen_b", "keys", "group", "edge", "sink_size", "has_seen", "has_start"],
    do_not_specialize_on_alignment=["seen", "mean", "routes", "start"],
)
def pack(
    key, value, seen, mean, routes, start,
    k_codes, k_scale, v_codes, v_scale,
    k_b, k_h, k_l, v_b, v_h, v_l, seen_b,
    keys, head_dim, value_dim, group, edge, sink_size, has_seen, has_start,
    DIM: tl.constexpr,
):  # fmt: skip
    """Grid (N blocks, KVH, B). Key `[B, KVH, Lk, D]` less `mean` per token, value `[B, KVH, Lk, Dv]` per channel.

    Codes: keys `[B, KVH, N, 64, D]`, values `[B, KVH, N + edge, Dv, 64]` (8-bit matrix units want the summed axis
    contiguous), the first `edge` blocks again at the end without sink tokens. A group that is all native is left out.
    """
    n, g, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    split = 0
    for h in range(g * group, g * group + group):
        split += (tl.load(routes + h) != NATIVE).to(tl.int32)
    if split > 0:
        first, sinks = span(start, b, sink_size, keys, has_start)
        i, d = tl.arange(0, BLOCK), tl.arange(0, DIM)
        place = n * BLOCK + i
        real = seen_columns(seen + b * seen_b, first + place, keys, has_seen)
        pair, blocks = b * tl.num_programs(1) + g, tl.num_programs(0)
        at = pair * blocks + n

        inside = (d < head_dim)[None, :]
        k = rows_of_block(key + b * k_b + g.to(tl.int64) * k_h, n, first, k_l, i, d, real, head_dim).to(tl.float32)
        centre = tl.load(mean + g * head_dim + d, mask=d < head_dim, other=0)
        codes, scale = quantize(k - centre[None, :], 1)
        tl.store(k_codes + at * BLOCK * head_dim + i[:, None] * head_dim + d[None, :], codes, mask=inside)
        tl.store(k_scale + at * BLOCK + i, scale)

        inside = (d < value_dim)[None, :]
        v = rows_of_block(value + b * v_b + g.to(tl.int64) * v_h, n, first, v_l, i, d, real, value_dim).to(tl.float32)
        codes, scale = quantize(v, 0)
        at = pair * (blocks + edge) + n
        tl.store(v_codes + at * BLOCK * value_dim + d[None, :] * BLOCK + i[:, None], codes, mask=inside)
        tl.store(v_scale + at * value_dim + d, scale, mask=d < value_dim)
        if n < edge:
            again = at + blocks
            codes, scale = quantize(tl.where((place < sinks)[:, None], 0.0, v), 0)
            tl.store(v_codes + again * BLOCK * value_dim + d[None, :] * BLOCK + i[:, None], codes, mask=inside)
            tl.store(v_scale + again * value_dim + d, scale, mask=d < value_dim)


@triton.jit(
    do_not_specialize=[
        "mask_b", "mask_l", "seen_b", "queries", "keys", "group", "blocks", "edge", "sink_size", "causal",
        "has_mask", "has_start", "has_clip", "has_absolute", "has_aux", "scaling", "softcap",
    ],
    do_not_specialize_on_alignment=["mask", "seen", "mean", "routes", "start", "clip", "absolute", "aux"],
)  # fmt: skip
def prefill(
    query, key, value, out, mask, seen, mean, routes, start, clip, absolute, aux,
    k_codes, k_scale, v_codes, v_scale,
    q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, mask_b, mask_l, seen_b,
    queries, keys, head_dim, value_dim, group, blocks, edge, sink_size, causal,
    has_mask, has_start, has_clip, has_absolute, has_aux, scaling, softcap,
    ROWS: tl.constexpr, DIM: tl.constexpr, LIMITS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of ROWS queries, H, B). Query `[B, H, Lq, D]`, codes as `pack` leaves them -> out `[B, Lq, H, Dv]`.

    Blocks that all rows see in full need no masking; the sink tokens' and the diagonal's, or with `mask` all, do.
    LIMITS: scores are limited; a head with a finite row clip then passes twice, the first time for the rows' maxima.
    """
    # The longest causal rows first: short ones fill the gaps at the end.
    tile, h, b = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    g = h // group
    r, d = tl.arange(0, ROWS), tl.arange(0, DIM)
    first, sinks = span(start, b, sink_size, keys, has_start)
    ahead = keys - first - queries + tile * ROWS
    last = tl.minimum(tl.where((causal != 0) & (has_mask == 0), r + ahead, keys), keys - first - 1)
    count = (tl.maximum(tl.max(last), -1) + BLOCK) // BLOCK
    whole_blocks = tl.where(has_mask != 0, 0, (tl.maximum(tl.min(last), -1) + 1) // BLOCK)

    # Rows beyond the last repeat it and are not stored.
    row = tl.minimum(r, queries - tile * ROWS - 1)
    q_row = row * q_l
    mask += b * mask_b + tl.cast(tile * ROWS, tl.int64) * mask_l
    seen += b * seen_b
    key += b * k_b + g.to(tl.int64) * k_h
    value += b * v_b + g.to(tl.int64) * v_h
    query += b * q_b + h.to(tl.int64) * q_h + tl.cast(tile * ROWS, tl.int64) * q_l
    m = tl.full([ROWS], NEVER, tl.float32)
    z = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    floor = tl.full([ROWS], NEVER, tl.float32)
    bound = tl.zeros([ROWS], tl.float32) + tl.load(absolute + h, mask=has_absolute != 0, other=ALWAYS)
    below = tl.load(clip + h, mask=has_clip != 0, other=ALWAYS)
    route = tl.load(routes + h)
    if route == NATIVE:
        if LIMITS:  # noqa: SIM102
            if below < ALWAYS:
                top, _, _ = add_native_blocks(
                    m, z, acc, query, q_row, scaling, floor, bound, softcap,
                    0, count, whole_blocks, last, first, mask, row, mask_l, seen, has_mask,
                    key, value, k_l, v_l, keys, head_dim, value_dim, DIM, LIMITS, True,
                )  # fmt: skip
                floor = top - below
        m, z, acc = add_native_blocks(
            m, z, acc, query, q_row, scaling, floor, bound, softcap,
            0, count, whole_blocks, last, first, mask, row, mask_l, seen, has_mask,
            key, value, k_l, v_l, keys, head_dim, value_dim, DIM, LIMITS, False,
        )  # fmt: skip
    else:
        pair = b * (tl.num_programs(1) // group) + g
        k_codes += pair * blocks * BLOCK * head_dim
        k_scale += pair * blocks * BLOCK
        v_codes += pair * (blocks + edge) * BLOCK * value_dim
        v_scale += pair * (blocks + edge) * value_dim
        sinks = tl.where(route == SINK, sinks, 0)
        own = tl.zeros([ROWS], tl.int32) + sinks
        lead = (sinks + BLOCK - 1) // BLOCK

        q_float = tl.load(query + (q_row[:, None] + d[None, :]), mask=(d < head_dim)[None, :], other=0).to(tl.float32)
        centre = tl.load(mean + g * head_dim + d, mask=d < head_dim, other=0)
        q_mean = tl.sum(q_float * centre[None, :], 1) * scaling
        q_codes, q_scale = quantize(q_float, 1)
        q_factor = q_scale * scaling
        if LIMITS:  # noqa: SIM102
            if below < ALWAYS:
                top, _, _ = add_exact_keys(
                    m, z, acc, query, q_row, scaling, floor, bound, softcap,
                    0, sinks, own, last, first, mask, row, mask_l, has_mask,
                    key, value, k_l, v_l, head_dim, value_dim, DIM, LIMITS, True,
                )  # fmt: skip
                top, _, _ = add_int8_blocks(
                    top, z, acc, q_codes, q_factor, q_mean, floor, bound, softcap,
                    0, count, lead, whole_blocks, last, own, first, mask, row, mask_l, has_mask,
                    k_codes, k_scale, v_codes, v_scale, keys, blocks, head_dim, value_dim, DIM, LIMITS, False, True,
                )  # fmt: skip
                floor = top - below
        m, z, acc = add_exact_keys(
            m, z, acc, query, q_row, scaling, floor, bound, softcap,
            0, sinks, own, last, first, mask, row, mask_l, has_mask,
            key, value, k_l, v_l, head_dim, value_dim, DIM, LIMITS, False,
        )  # fmt: skip
        m, z, acc = add_int8_blocks(
            m, z, acc, q_codes, q_factor, q_mean, floor, bound, softcap,
            0, count, lead, whole_blocks, last, own, first, mask, row, mask_l, has_mask,
            k_codes, k_scale, v_codes, v_scale, keys, blocks, head_dim, value_dim, DIM, LIMITS, False, False,
        )  # fmt: skip
    o = finish(m, z, acc, tl.load(aux + h, mask=has_aux != 0, other=NEVER))
    out += ((b * queries + tile * ROWS) * tl.num_programs(1) + h) * value_dim
    at = r[:, None] * (tl.num_programs(1) * value_dim) + d[None, :]
    tl.store(out + at, o.to(out.dtype.element_ty), mask=(r < queries - tile * ROWS)[:, None] & (d < value_dim)[None, :])


@triton.jit(
    do_not_specialize=[
        "mask_b", "mask_l", "seen_b", "queries", "keys", "group", "blocks", "edge", "each", "sink_size", "causal",
        "has_mask", "has_start", "has_clip", "has_absolute", "scaling", "softcap",
    ],
    do_not_specialize_on_alignment=["mask", "seen", "mean", "routes", "start", "clip", "absolute"],
)  # fmt: skip
def decode(
    query, key, value, mask, seen, mean, routes, start, clip, absolute,
    k_codes, k_scale, v_codes, v_scale, tops, part_m, part_z, part_acc,
    q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, mask_b, mask_l, seen_b,
    queries, keys, head_dim, value_dim, group, blocks, edge, each, sink_size, causal,
    has_mask, has_start, has_clip, has_absolute, scaling, softcap,
    ROWS: tl.constexpr, DIM: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    """Grid (tiles T of ROWS rows x shares S of `each` blocks, KVH, B). Rows: (head, query) of one KV head, in order.

    What the rows of a tile share is read once; tiles of one share run side by side and meet in the cache. Leaves
    `part_m`, `part_z` `[B, KVH, S, T, ROWS]` and `part_acc` `[B, KVH, S, T, ROWS, Dv]` for `merge`. TOP: leaves only
    the rows' maxima in `tops` `[B, KVH, S, T, ROWS]`, which a second pass reads where scores are clipped below them.
    """
    tiles = (group * queries + ROWS - 1) // ROWS
    tile, share = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    g, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    shares = tl.num_programs(0) // tiles
    r, d = tl.arange(0, ROWS), tl.arange(0, DIM)
    real = tile * ROWS + r < group * queries
    h = tl.minimum(tile * ROWS + r, group * queries - 1) // queries
    row = (tile * ROWS + r) % queries
    q_row = h * q_h + row * q_l
    first, sinks = span(start, b, sink_size, keys, has_start)
    ahead = keys - first - queries
    last = tl.minimum(tl.where((causal != 0) & (has_mask == 0), row + ahead, keys), keys - first - 1)
    route = tl.load(routes + g * group + h)
    own = tl.where(route == SINK, sinks, 0)
    sinks = tl.max(own)

    mask += b * mask_b
    seen += b * seen_b
    key += b * k_b + g.to(tl.int64) * k_h
    value += b * v_b + g.to(tl.int64) * v_h
    query += b * q_b + (g * group).to(tl.int64) * q_h
    bound = tl.load(absolute + g * group + h, mask=has_absolute != 0, other=ALWAYS)

    m = tl.full([ROWS], NEVER, tl.float32)
    z = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    floor = tl.full([ROWS], NEVER, tl.float32)
    pair = b * tl.num_programs(1) + g
    if not TOP:  # noqa: SIM102
        if has_clip != 0:
            for n in range(shares):
                floor = tl.maximum(
                    floor, tl.load(tops + ((pair * shares + n) * tiles + tile) * ROWS + r, mask=real, other=0)
                )
            floor -= tl.load(clip + g * group + h)
    part = ((pair * shares + share) * tiles + tile) * ROWS
    tops += part
    part_m += part
    part_z += part
    part_acc += part * value_dim
    begin, end = share * each, tl.minimum(share * each + each, blocks)

    # One route after the other: a group that mixes them finds its keys in the cache the second time.
    wanted = real & (route != NATIVE)
    if tl.max(wanted.to(tl.int32)) > 0:
        im, iz, iacc = m, z, acc
        k_codes += pair * blocks * BLOCK * head_dim
        k_scale += pair * blocks * BLOCK
        v_codes += pair * (blocks + edge) * BLOCK * value_dim
        v_scale += pair * (blocks + edge) * value_dim
        q_float = tl.load(query + (q_row[:, None] + d[None, :]), mask=(d < head_dim)[None, :], other=0).to(tl.float32)
        centre = tl.load(mean + g * head_dim + d, mask=d < head_dim, other=0)
        q_mean = tl.sum(q_float * centre[None, :], 1) * scaling
        q_codes, q_scale = quantize(q_float, 1)
        if share == 0:
            im, iz, iacc = add_exact_keys(
                im, iz, iacc, query, q_row, scaling, floor, bound, softcap,
                0, sinks, own, last, first, mask, row, mask_l, has_mask,
                key, value, k_l, v_l, head_dim, value_dim, DIM, True, TOP,
            )  # fmt: skip
        im, iz, iacc = add_int8_blocks(
            im, iz, iacc, q_codes, q_scale * scaling, q_mean, floor, bound, softcap,
            begin, end, (sinks + BLOCK - 1) // BLOCK, 0, last, own, first, mask, row, mask_l, has_mask,
            k_codes, k_scale, v_codes, v_scale, keys, blocks, head_dim, value_dim, DIM, True, True, TOP,
        )  # fmt: skip
        if TOP:
            tl.store(tops + r, im, mask=wanted)
        else:
            tl.store(part_m + r, im, mask=wanted)
            tl.store(part_z + r, iz, mask=wanted)
            tl.store(
                part_acc + r[:, None] * value_dim + d[None, :], iacc, mask=wanted[:, None] & (d < value_dim)[None, :]
            )
    wanted = real & (route == NATIVE)
    if tl.max(wanted.to(tl.int32)) > 0:
        m, z, acc = add_native_blocks(
            m, z, acc, query, q_row, scaling, floor, bound, softcap,
            begin, end, 0, last, first, mask, row, mask_l, seen, has_mask,
            key, value, k_l, v_l, keys, head_dim, value_dim, DIM, True, TOP,
        )  # fmt: skip
        if TOP:
            tl.store(tops + r, m, mask=wanted)
        else:
            tl.store(part_m + r, m, mask=wanted)
            tl.store(part_z + r, z, mask=wanted)
            tl.store(
                part_acc + r[:, None] * value_dim + d[None, :], acc, mask=wanted[:, None] & (d < value_dim)[None, :]
            )


@triton.jit(
    do_not_specialize=["queries", "group", "shares", "rows", "has_aux"],
    do_not_specialize_on_alignment=["aux"],
)
def merge(
    part_m, part_z, part_acc, aux, out,
    queries, value_dim, group, shares, rows, has_aux,
    DIM: tl.constexpr,
):  # fmt: skip
    """Grid (group * queries, KVH, B): one row of what `decode` left -> out `[B, Lq, H, Dv]`."""
    r, g, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i, d = tl.arange(0, SHARES), tl.arange(0, DIM)
    pair = (b * tl.num_programs(1) + g).to(tl.int64)
    m = tl.full([1], NEVER, tl.float32)
    z = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, DIM], tl.float32)
    for s in range(0, shares, SHARES):
        at = (pair * shares + s + i) * rows + r
        real = s + i < shares
        part = tl.load(part_m + at, mask=real, other=NEVER)
        top = tl.max(part, 0)
        weight = tl.exp(part - finite(top))
        inside = real[:, None] & (d < value_dim)[None, :]
        values = tl.load(part_acc + at[:, None] * value_dim + d[None, :], mask=inside, other=0)
        total = tl.sum(tl.load(part_z + at, mask=real, other=0) * weight, 0)
        values = tl.sum(values * weight[:, None], 0)
        m, z, acc, share = rescale(m, z, acc, top + tl.zeros([1], tl.float32), total)
        acc += values[None, :] * share
    h = g * group + r // queries
    o = finish(m, z, acc, tl.load(aux + h, mask=has_aux != 0, other=NEVER))
    at = ((b.to(tl.int64) * queries + r % queries) * group * tl.num_programs(1) + h) * value_dim + d
    tl.store(out + at[None, :], o.to(out.dtype.element_ty), mask=(d < value_dim)[None, :])
