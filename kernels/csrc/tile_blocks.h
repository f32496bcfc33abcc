// A tile of query rows over blocks of keys, by route: INT8 or native. The arithmetic is in tile.h.
// Included once per instruction set, after its simd_*.h.
#pragma once

#include "tile.h"
#if defined(__AVX512F__)
#include "pipeline_avx512.h"
#endif

namespace quantsink {
namespace {

// Rows first..last in INT8 over one block; `rest`: with the values without the sink tokens'.
template <bool General>
inline void int8_block(const Queries& q, const State& state, int64_t first, int64_t last, const Block& block, bool rest,
                       int64_t groups) {
#if defined(__AVX512F__)
    if constexpr (!General) {
        const int64_t whole = first + (last - first) / R * R;
        uint64_t all = ~uint64_t{0};
        for (int64_t r = first; r < whole; ++r) all &= q.word[r];
        if (whole > first && all == ~uint64_t{0}) {
            rest ? int8_whole<true>(q, state, first, whole, &block, 1, groups)
                 : int8_whole<false>(q, state, first, whole, &block, 1, groups);
            first = whole;
        }
    }
#endif
    over_rows(first, last, [&](int64_t row, auto n) {
        alignas(64) int32_t sums[n][kBlock];
        Weights<n> weights;
        int8_sums<n>(q, row, block.key_codes, groups, sums);
        int8_weights<n, General>(q, state, row, sums, block.key_scale, weights);
        int8_values<n>(state, row, weights, rest ? block.rest_codes : block.value_codes,
                       rest ? block.rest_scale : block.value_scale);
    });
}

// Rows 0..rows of one route over `count` blocks that all of them see; false where this is not done, and nothing was.
inline bool int8_run(const Queries& q, const State& state, int64_t rows, const Block* blocks, int64_t count,
                     int64_t groups) {
#if defined(__AVX512F__)
    if (rows % R || count < 1) return false;
    for (int64_t n = 0; n < count; ++n) {
        if (*blocks[n].bad_keys | *blocks[n].bad_values) return false;
    }
    const int64_t together = rows > R ? count : 1;
    for (int64_t n = 0; n < count; n += together) int8_whole<false>(q, state, 0, rows, blocks + n, together, groups);
    return true;
#else
    (void)q, (void)state, (void)rows, (void)blocks, (void)count, (void)groups;
    return false;
#endif
}

// Native products of RR rows over one block, without scaling.
template <class Op, int RR>
inline void native_sums(const Queries& q, int64_t row, const uint8_t* keys, int64_t groups, float (&out)[RR][kBlock]) {
    for (int v = 0; v < kVectors; v += NV) {
        F acc[RR][NV];
#pragma GCC unroll 16
        for (int r = 0; r < RR; ++r) {
#pragma GCC unroll 16
            for (int t = 0; t < NV; ++t) acc[r][t] = set(0.0f);
        }
        product<Op, RR, NV>(q.cells + row * q.stride, q.stride, keys + v * W * 4, kBlock, groups, acc);
#pragma GCC unroll 16
        for (int r = 0; r < RR; ++r) {
#pragma GCC unroll 16
            for (int t = 0; t < NV; ++t) store(&out[r][(v + t) * W], acc[r][t]);
        }
    }
}

// RR rows in native numbers over one block.
template <class Op, int RR>
inline void native_rows(const Queries& q, const State& state, int64_t row, const uint8_t* keys, int64_t groups,
                        const uint8_t* values) {
    alignas(64) float scores[RR][kBlock];
    alignas(64) float weights[RR][kBlock];
    float maximum[RR], factor[RR];
    native_sums<Op, RR>(q, row, keys, groups, scores);
    F total[RR];
#pragma GCC unroll 16
    for (int r = 0; r < RR; ++r) {
        F s[kVectors], weight[kVectors];
#pragma GCC unroll 16
        for (int t = 0; t < kVectors; ++t) {
            s[t] = limited(load(&scores[r][t * W]) * set(q.scaling), q.softcap, q.absolute[row + r]);
        }
        total[r] = set(0.0f);
        maximum[r] = weights_of<1>(s, q.word[row + r], q.floor[row + r], &total[r], weight);
        if constexpr (Op::kCell == 2) {
#pragma GCC unroll 16
            for (int t = 0; t < kVectors; ++t) {
                store_words(reinterpret_cast<uint16_t*>(weights[0]) + r * kBlock + t * W, rounded_bf16(weight[t]));
            }
        } else {
#pragma GCC unroll 16
            for (int t = 0; t < kVectors; ++t) store(&weights[r][t * W], weight[t]);
        }
    }
    state.admit<RR>(row, maximum, factor);
#pragma GCC unroll 16
    for (int r = 0; r < RR; ++r) {
        float* sum = state.sum + (row + r) * W;
        store(sum, fma(total[r], set(factor[r]), load(sum)));
    }
    over_channels(state.width, [&](int64_t d, auto n) {
        add_native<Op, RR, n>(reinterpret_cast<const uint8_t*>(weights[0]), values + d * 4, state.width, factor,
                              state.acc + row * state.width + d);
    });
}

// The largest visible score of RR rows in one block, for the row clip.
inline float top_of(const F (&score)[kVectors], uint64_t word, float top) {
    F most = set(top);
#pragma GCC unroll 16
    for (int t = 0; t < kVectors; ++t) most = max(where(mask(word, t), score[t], set(-kInfinity)), most);
    return hmax(most);
}

template <int RR>
inline void int8_tops(const Queries& q, int64_t row, const uint8_t* keys, const float* key_scale, int64_t groups,
                      float* top) {
    alignas(64) int32_t sums[RR][kBlock];
    int8_sums<RR>(q, row, keys, groups, sums);
#pragma GCC unroll 16
    for (int r = 0; r < RR; ++r) {
        F s[kVectors];
#pragma GCC unroll 16
        for (int t = 0; t < kVectors; ++t) {
            s[t] = to_float(load_i(&sums[r][t * W])) * load(key_scale + t * W);
            s[t] = limited(fma(s[t], set(q.scale[row + r]), set(q.offset[row + r])), q.softcap, q.absolute[row + r]);
        }
        top[r] = top_of(s, q.word[row + r], top[r]);
    }
}

template <class Op, int RR>
inline void native_tops(const Queries& q, int64_t row, const uint8_t* keys, int64_t groups, float* top) {
    alignas(64) float scores[RR][kBlock];
    native_sums<Op, RR>(q, row, keys, groups, scores);
#pragma GCC unroll 16
    for (int r = 0; r < RR; ++r) {
        F s[kVectors];
#pragma GCC unroll 16
        for (int t = 0; t < kVectors; ++t) {
            s[t] = limited(load(&scores[r][t * W]) * set(q.scaling), q.softcap, q.absolute[row + r]);
        }
        top[r] = top_of(s, q.word[row + r], top[r]);
    }
}

}  // namespace
}  // namespace quantsink
