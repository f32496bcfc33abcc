// Rows that see whole blocks, on AVX-512: the products of one row tile run beside the exponentials of the tile before.
// Included by tile_blocks.h.
#pragma once

#include "tile.h"

namespace quantsink {
namespace {

// Weights of a row tile that sees the whole block, in steps that run between the products of the next tile: those keep
// the multipliers busy and these the adders. Constants stay in memory, where an instruction can broadcast them from: the
// registers hold the products' sums.
struct Exponentials {
    alignas(64) float score[R * kBlock];   // without the row's scale and offset
    alignas(64) int32_t code[R * kBlock];
    alignas(64) float total[R * W];
    alignas(16) float slope[R], top[R];
};

constexpr int kPowers = 32;  // numbers in the table of powers of two

// Integer sums -> scores, what their weights are relative to, and the factors of these. One vector has all rows' figures:
// this is a chain of dependent instructions, which only other tiles' products can hide.
inline __attribute__((always_inline)) void begin(const Queries& q, const State& state, int64_t row, const I (&sums)[R][NV],
                                                 const float* key_scale, Exponentials& e, float (&factor)[R]) {
    static_assert(R == 4, "a tile's rows are the lanes of one small vector");
    F top[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
        for (int t = 0; t < kVectors; ++t) {
            const F s = to_float(sums[r][t]) * load(key_scale + t * W);
            store(e.score + r * kBlock + t * W, s);
            top[r] = t == 0 ? s : max(top[r], s);
        }
        store(e.total + r * W, set(0.0f));
    }
    const __m128 most = max_of_rows(top), slope = _mm_loadu_ps(q.scale + row) * _mm_set1_ps(kLog2e);
    _mm_store_ps(e.slope, slope * _mm_set1_ps(kPowers));
    _mm_store_ps(e.top, most);
    const __m128 maximum = _mm_fmadd_ps(most, slope, _mm_loadu_ps(q.offset + row) * _mm_set1_ps(kLog2e));
    __m128 running = _mm_loadu_ps(state.top + row);
    if (__builtin_expect(_mm_movemask_ps(_mm_cmp_ps(maximum, running + _mm_set1_ps(kHeadroom), _CMP_NLE_UQ)), 0)) {
        float all[R];
        _mm_storeu_ps(all, maximum);
        state.make_room<R>(row, all);
        running = _mm_loadu_ps(state.top + row);
    }
    const F y = max(_mm512_castps128_ps512(maximum - running), set(-126.0f));
    const __mmask8 some = _mm_cmp_ps_mask(maximum, _mm_set1_ps(-kInfinity), _CMP_NEQ_UQ);
    _mm_storeu_ps(factor, _mm_maskz_mov_ps(some, _mm512_castps512_ps128(exp2v(y))));
}

// kUnit * 2^(y / 32) to a relative 2.2e-7, with fewer multiplications than exp2v: the products beside it need the multipliers.
// With n the whole number next to y, 2^(n / 32) is a table's entry for n's five low bits and n << 18 added to it as an
// integer: the rest of n reaches the exponent, and the entry is short of what the five bits add. A parabola has the rest.
alignas(64) const int32_t kPower[kPowers] = {
    0x42fe0000, 0x42fdc7ec, 0x42fc9f6e, 0x42fb86de, 0x42fa7e96, 0x42f986f1, 0x42f8a04c, 0x42f7cb06,
    0x42f70780, 0x42f6561f, 0x42f5b748, 0x42f52b62, 0x42f4b2d9, 0x42f44e18, 0x42f3fd8e, 0x42f3c1ae,
    0x42f39ae9, 0x42f389b8, 0x42f38e92, 0x42f3a9f4, 0x42f3dc5c, 0x42f4264a, 0x42f48843, 0x42f502cd,
    0x42f59673, 0x42f643c0, 0x42f70b45, 0x42f7ed95, 0x42f8eb45, 0x42fa04f0, 0x42fb3b32, 0x42fc8eab};
alignas(64) const float kParabola[] = {12582912.0f, -126.0f * kPowers, 2.34598491e-4f, 2.1661167e-2f, 1.0f};

inline __attribute__((always_inline)) void step(Exponentials& e, int64_t v, const float* c) {
    // The difference first: scores of thousands keep their weights' precision.
    F y = (load(e.score + v * W) - set(e.top[v / kVectors])) * set(e.slope[v / kVectors]);
    y = from_bits(_mm512_min_epu32(bits(y), bits(set(c[1]))));
    const F z = y + set(c[0]), f = y - (z - set(c[0]));
    const F p = fma(fma(set(c[2]), f, set(c[3])), f, set(c[4]));
    const I power = _mm512_permutex2var_epi32(load_i(kPower), bits(z), load_i(kPower + W));
    const F weight = p * from_bits(add_i(power, shl<18>(bits(z))));
    float* total = e.total + v / kVectors * W;
    store(total, load(total) + weight);
    store_i(e.code + v * W, to_int(weight));
}

inline __attribute__((always_inline)) void finish(const State& state, int64_t row, Exponentials& e, Weights<R>& out) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
        I code[kVectors];
        for (int t = 0; t < kVectors; ++t) code[t] = load_i(e.code + r * kBlock + t * W);
        store_weights(out.codes[r], code);
        float* sum = state.sum + (row + r) * W;
        store(sum, fma(load(e.total + r * W), set(out.factor[r]), load(sum)));
    }
}

inline __attribute__((always_inline)) void start_sums(const Queries& q, int64_t row, I (&sums)[R][NV]) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
        for (int t = 0; t < NV; ++t) sums[r][t] = set_i(kKeyStart * q.code_sum[row + r]);
    }
}

// The scores of the row tile at `row` and, between them, the weights of the tile before it.
inline __attribute__((always_inline)) void sums_between(const Queries& q, int64_t row, const uint8_t* keys, int64_t groups,
                                                        Exponentials& e, I (&sums)[R][NV]) {
    static_assert(kVectors == NV, "one register tile covers a block's scores");
    const float* constants = kParabola;
    asm("" : "+r"(constants));
    const uint8_t* a = q.cells + row * q.stride;
    const int64_t stride = q.stride;
    start_sums(q, row, sums);
    const int64_t both = smaller(groups, R * kVectors);
    for (int64_t v = 0; v < both; ++v) {
        step(e, v, constants);
        asm volatile("");  // or the compiler makes two loops of it
        product_step<KeysOp, R, NV>(a, stride, keys, sums);
        a += 4;
        keys += kBlock * 4;
    }
    for (int64_t v = both; v < R * kVectors; ++v) step(e, v, constants);
    for (int64_t g = both; g < groups; ++g) {
        product_step<KeysOp, R, NV>(a, stride, keys, sums);
        a += 4;
        keys += kBlock * 4;
    }
}

// Whole tiles of rows first..last over `count` blocks that all of them see, as one sequence: only its first scores and
// its last weights have nothing to run beside. A tile's maxima are found before the values of the tile before it are
// added, which hide their latency; they may rescale what the tile has, so that a lone tile takes one block at a time.
// Rest: with the values without the sink tokens'.
template <bool Rest>
inline void int8_whole(const Queries& q, const State& state, int64_t first, int64_t last, const Block* blocks,
                       int64_t count, int64_t groups) {
    I sums[R][NV];
    Exponentials e;
    Weights<R> weights;
    alignas(16) float factor[R];
    start_sums(q, first, sums);
    product<KeysOp, R, NV>(q.cells + first * q.stride, q.stride, blocks->key_codes, kBlock, groups, sums);
    begin(q, state, first, sums, blocks->key_scale, e, factor);
    for (int64_t n = 0, row = first; n < count;) {
        const Block& block = blocks[n];
        const int64_t tile = row;
        row += R;
        if (row == last) {
            row = first;
            ++n;
        }
        std::memcpy(weights.factor, factor, sizeof factor);
        if (n < count) {
            sums_between(q, row, blocks[n].key_codes, groups, e, sums);
            finish(state, tile, e, weights);
            begin(q, state, row, sums, blocks[n].key_scale, e, factor);
        } else {
            for (int64_t v = 0; v < R * kVectors; ++v) step(e, v, kParabola);
            finish(state, tile, e, weights);
        }
        int8_values<R>(state, tile, weights, Rest ? block.rest_codes : block.value_codes,
                       Rest ? block.rest_scale : block.value_scale);
    }
}

}  // namespace
}  // namespace quantsink
