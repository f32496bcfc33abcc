// A few rows over a block of exact keys where they lie: packing it into cells would cost more than its products.
// Included once per instruction set, after its simd_*.h. What is not finite shows in the scores and sums that see it.
#pragma once

#include "pack.h"
#include "tile_blocks.h"

namespace quantsink {
namespace {

constexpr int kAtOnce = 4;  // keys

template <class T> inline F load_some(const T* from, int64_t count) {
    if (count >= W) return load_as_float(from);
    T tail[W] = {};
    std::memcpy(tail, from, sizeof(T) * count);
    return load_as_float(tail);
}

// Products of RR rows, numbers `width` apart, with `count` keys.
template <int RR, class T>
inline void exact_sums(const float* numbers, int64_t width, const T* key, int64_t stride, int64_t count, int64_t head_dim,
                       float (&out)[RR][kBlock]) {
    for (int64_t j = 0; j < count; j += kAtOnce) {
        const T* from[kAtOnce];
        F acc[RR][kAtOnce];
#pragma GCC unroll 16
        for (int i = 0; i < kAtOnce; ++i) {
            from[i] = key + smaller(j + i, count - 1) * stride;
#pragma GCC unroll 16
            for (int r = 0; r < RR; ++r) acc[r][i] = set(0.0f);
        }
        for (int64_t d = 0; d < head_dim; d += W) {
            F row[RR];
#pragma GCC unroll 16
            for (int r = 0; r < RR; ++r) row[r] = load(numbers + r * width + d);
#pragma GCC unroll 16
            for (int i = 0; i < kAtOnce; ++i) {
                const F x = load_some(from[i] + d, head_dim - d);
#pragma GCC unroll 16
                for (int r = 0; r < RR; ++r) acc[r][i] = fma(row[r], x, acc[r][i]);
            }
        }
        float sums[kAtOnce];
#pragma GCC unroll 16
        for (int r = 0; r < RR; ++r) {
            sums_of_rows<kAtOnce>(acc[r], sums);
            std::memcpy(&out[r][j], sums, sizeof sums);
        }
    }
}

// acc += factor * weights . values of `count` keys, for NN vectors of channels.
template <int RR, int NN, class T>
inline void add_exact(const float (&weights)[RR][kBlock], const T* value, int64_t stride, int64_t count,
                      const float (&factor)[RR], float* acc, int64_t width) {
    F sum[RR][NN];
#pragma GCC unroll 16
    for (int r = 0; r < RR; ++r) {
#pragma GCC unroll 16
        for (int t = 0; t < NN; ++t) sum[r][t] = set(0.0f);
    }
    for (int64_t j = 0; j < count; ++j) {
        F x[NN];
#pragma GCC unroll 16
        for (int t = 0; t < NN; ++t) x[t] = load_as_float(value + j * stride + t * W);
#pragma GCC unroll 16
        for (int r = 0; r < RR; ++r) {
            const F weight = set(weights[r][j]);
#pragma GCC unroll 16
            for (int t = 0; t < NN; ++t) sum[r][t] = fma(weight, x[t], sum[r][t]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < RR; ++r) {
#pragma GCC unroll 16
        for (int t = 0; t < NN; ++t) {
            float* to = acc + r * width + t * W;
            store(to, fma(sum[r][t], set(factor[r]), load(to)));
        }
    }
}

// RR rows of `numbers` over the first `count` keys of a block, of which q.word has the visible ones; with `top` only
// their largest scores are wanted. `value_dim` is a multiple of 16.
template <int RR, class T>
inline void exact_rows(const Queries& q, const State& state, int64_t row, const float* numbers, int64_t width, const T* key,
                       int64_t key_stride, const T* value, int64_t value_stride, int64_t count, int64_t head_dim,
                       float* top) {
    alignas(64) float sums[RR][kBlock] = {};
    float maximum[RR], factor[RR];
    F total[RR];
    exact_sums<RR>(numbers + row * width, width, key, key_stride, count, head_dim, sums);
    for (int r = 0; r < RR; ++r) {
        F s[kVectors], weight[kVectors];
        I most = set_i(0);  // as bits: they order like the numbers, and NaN above all
        for (int t = 0; t < kVectors; ++t) {
            const F raw = load(&sums[r][t * W]);
            most = max_i(most, and_i(bits(where(mask(q.word[row + r], t), raw, set(0.0f))), set_i(0x7fffffff)));
            s[t] = limited(raw * set(q.scaling), q.softcap, q.absolute[row + r]);
        }
        if (hmax_i(most) >= 0x7f800000) state.poison(row + r);
        if (top) {
            top[r] = top_of(s, q.word[row + r], top[r]);
            continue;
        }
        total[r] = set(0.0f);
        maximum[r] = weights_of<1>(s, q.word[row + r], q.floor[row + r], &total[r], weight);
        for (int t = 0; t < kVectors; ++t) store(&sums[r][t * W], weight[t]);
    }
    if (top) return;
    state.admit<RR>(row, maximum, factor);
    for (int r = 0; r < RR; ++r) {
        float* sum = state.sum + (row + r) * W;
        store(sum, fma(total[r], set(factor[r]), load(sum)));
    }
    over_channels(state.width, [&](int64_t d, auto n) {
        add_exact<RR, n>(sums, value + d, value_stride, count, factor, state.acc + row * state.width + d, state.width);
    });
}

}  // namespace
}  // namespace quantsink
