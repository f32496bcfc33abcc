// The arithmetic of one tile of query rows over one block of 64 keys: register-tiled products, weights, running state.
// Included once per instruction set, after its simd_*.h.
//
// All products read cells of 4 bytes (4 codes, 2 bfloat16 or 1 float32): `a` has one row of cells per query, `b` holds
// [groups][columns] cells, so that one loaded vector serves W columns and one broadcast cell serves one row.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>

#include "attention.h"

namespace quantsink {
namespace {

constexpr int kBlock = 64;             // keys of a block
constexpr int kVectors = kBlock / W;   // vectors of a block's scores
constexpr int kRows = 64;              // query rows of a tile
constexpr float kLog2e = 1.44269504f;
constexpr float kInfinity = __builtin_inff();
constexpr int kUnit = 127;             // an INT8 row's weights and sums are in codes: 127 at a block's maximum
constexpr float kHeadroom = 64;        // how far (log2) a block's maximum may pass the running one before it moves

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
inline uint64_t low_bits(int64_t n) { return n <= 0 ? 0 : n >= 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1; }

// Scale * 2^(x * slope) for -126 <= x * slope <= 120, to a relative 1e-7. The scale costs nothing: it is in the
// coefficients; nor does the slope.
template <int Scale = 1> inline F exp2v(F x, F slope) {
    const F magic = set(12582912.0f);  // 1.5 * 2^23: adding it leaves the nearest whole number in the low bits
    const F z = fma(x, slope, magic), f = fma(x, slope, magic - z);
    F p = fma(set(Scale * 1.32647273e-3f), f, set(Scale * 9.6715127e-3f));
    p = fma(p, f, set(Scale * 5.55073374e-2f));
    p = fma(p, f, set(Scale * 2.40222421e-1f));
    p = fma(p, f, set(Scale * 6.93146978e-1f));
    p = fma(p, f, set(Scale * 1.0f));
    return from_bits(add_i(bits(p), shl<23>(bits(z))));
}
template <int Scale = 1> inline F exp2v(F y) { return exp2v<Scale>(y, set(1.0f)); }

// tanh through expm1, so that small arguments keep their relative precision.
inline F tanhv(F x) {
    const F size = min(abs(x), set(10.0f)), y = size * set(2 * kLog2e);
    const F magic = set(12582912.0f), z = y + magic, f = (y - (z - magic)) * set(0.693147181f);
    F p = fma(set(1.0f / 5040), f, set(1.0f / 720));
    p = fma(p, f, set(1.0f / 120));
    p = fma(p, f, set(1.0f / 24));
    p = fma(p, f, set(1.0f / 6));
    p = fma(p, f, set(0.5f));
    p = fma(p, f, set(1.0f)) * f;  // e^f - 1
    const F power = from_bits(add_i(bits(set(1.0f)), shl<23>(bits(z))));
    const F em1 = fma(power, p, power - set(1.0f));  // e^2|x| - 1
    const F t = div(em1, em1 + set(2.0f));
    return from_bits(or_i(bits(t), and_i(bits(x), set_i(INT32_MIN))));
}

// The nearest bfloat16 of each lane, in its low 16 bits; ties to even.
inline I rounded_bf16(F x) {
    const I b = bits(x), odd = and_i(shr<16>(b), set_i(1));
    return shr<16>(add_i(b, add_i(odd, set_i(0x7fff))));
}

inline float exp2s(float y) {
    float out[W];
    store(out, exp2v(max(set(y), set(-126.0f))));
    return out[0];
}

struct KeysOp {
    using Acc = I;
    static I dot(I acc, I a, I b) { return dot_keys(acc, a, b); }
};
struct ValuesOp {
    using Acc = I;
    static I dot(I acc, I a, I b) { return dot_values(acc, a, b); }
};
struct CodesOp {
    using Acc = I;
    static I dot(I acc, I a, I b) { return dot_codes(acc, a, b); }
};
struct Float32Op {
    using Acc = F;
    static constexpr int kCell = 1;  // numbers in a cell
    static F dot(F acc, I a, I b) { return fma(from_bits(a), from_bits(b), acc); }
};
#if defined(__AVX512BF16__)
struct BFloat16Op {
    using Acc = F;
    static constexpr int kCell = 2;
    static F dot(F acc, I a, I b) { return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b); }
};
#endif

// acc[r][t] += the products of one cell of RR rows of `a` (bytes `stride` apart) with NN vectors of cells of `b`.
template <class Op, int RR, int NN>
inline __attribute__((always_inline)) void product_step(const uint8_t* a, int64_t stride, const uint8_t* b,
                                                        typename Op::Acc (&acc)[RR][NN]) {
    I column[NN];
#pragma GCC unroll 16
    for (int t = 0; t < NN; ++t) column[t] = load_i(b + t * W * 4);
#pragma GCC unroll 16
    for (int r = 0; r < RR; ++r) {
        const I row = broadcast4(a + r * stride);
#pragma GCC unroll 16
        for (int t = 0; t < NN; ++t) acc[r][t] = Op::dot(acc[r][t], row, column[t]);
    }
}

// The same over `groups` cells; `b` has `columns` cells a group.
template <class Op, int RR, int NN>
inline void product(const uint8_t* a, int64_t stride, const uint8_t* b, int64_t columns, int64_t groups,
                    typename Op::Acc (&acc)[RR][NN]) {
    do {
        product_step<Op, RR, NN>(a, stride, b, acc);
        a += 4;
        b += columns * 4;
    } while (--groups);
}

// What a tile's rows carry from block to block: weights are relative to 2^top, which moves only when it must.
struct State {
    float* acc;   // [kRows][width]: the weighted values so far
    float* sum;   // [kRows][W]: the weights so far, lane by lane
    float* top;   // [kRows]: log2
    int64_t width;

    void reset(int64_t rows) const {
        std::memset(acc, 0, sizeof(float) * rows * width);
        std::memset(sum, 0, sizeof(float) * rows * W);
        for (int64_t r = 0; r < rows; ++r) top[r] = -kInfinity;
    }

    void poison(int64_t row) const { sum[row * W] = __builtin_nanf(""); }

    // Make room for blocks whose maxima (log2) are `maximum`, and turn these into the factors of their weights.
    template <int RR> void admit(int64_t row, const float (&maximum)[RR], float (&factor)[RR]) const {
        static_assert(RR <= W, "one vector holds a row tile's factors");
        alignas(64) float y[W] = {};
        make_room<RR>(row, maximum);
#pragma GCC unroll 16
        for (int r = 0; r < RR; ++r) y[r] = maximum[r] - top[row + r];
        store(y, exp2v(max(load(y), set(-126.0f))));
#pragma GCC unroll 16
        for (int r = 0; r < RR; ++r) factor[r] = maximum[r] == -kInfinity ? 0 : y[r];
    }

    template <int RR> void make_room(int64_t row, const float (&maximum)[RR]) const {
#pragma GCC unroll 16
        for (int r = 0; r < RR; ++r) {
            if (__builtin_expect(!(maximum[r] <= top[row + r] + kHeadroom), 0)) {
                if (!(maximum[r] < kInfinity)) poison(row + r);  // scores that overflowed
                move_top(row + r, maximum[r]);
            }
        }
    }

    void move_top(int64_t row, float maximum) const {
        if (top[row] != -kInfinity) {
            const F factor = set(exp2s(top[row] - maximum));
            for (int64_t d = 0; d < width; d += W) store(acc + row * width + d, load(acc + row * width + d) * factor);
            store(sum + row * W, load(sum + row * W) * factor);
        }
        top[row] = maximum;
    }
};

// Queries of a tile and what limits their scores.
struct Queries {
    uint8_t* cells;      // [kRows][stride] bytes: codes, or numbers of a native tile
    int64_t stride;
    int32_t* code_sum;   // [kRows]
    float* scale;        // [kRows]: integer product times key scale times this is the score, without `offset`
    float* offset;       // [kRows]: q.mean * scaling
    float* absolute;     // [kRows]: clip, inf = off
    float* floor;        // [kRows]: scores below get no weight, -inf = off
    uint64_t* word;      // [kRows]: visible keys of the current block
    float softcap;
    float scaling;
};

// Scores in natural units -> soft-capped and clipped.
inline F limited(F s, float softcap, float absolute) {
    if (softcap > 0) s = tanhv(div(s, set(softcap))) * set(softcap);
    return max(min(s, set(absolute)), set(-absolute));
}

// One row of a block's scores (natural units, hidden ones -inf) -> weights relative to the block's maximum.
// A weight is Scale at the maximum. Returns the maximum in log2, -inf where nothing is visible; adds to *sum.
template <int Scale> inline float weights_of(const F (&score)[kVectors], uint64_t word, float floor, F* sum, F (&weight)[kVectors]) {
    F top = set(-kInfinity);
    F s[kVectors];
#pragma GCC unroll 16
    for (int t = 0; t < kVectors; ++t) {
        s[t] = where(mask(word, t), score[t], set(-kInfinity));
        s[t] = where(less(s[t], set(floor)), set(-kInfinity), s[t]);
        top = max(top, s[t]);
    }
    const float maximum = hmax(top);
    if (maximum == -kInfinity) {
#pragma GCC unroll 16
        for (int t = 0; t < kVectors; ++t) weight[t] = set(0.0f);
        return -kInfinity;
    }
#pragma GCC unroll 16
    for (int t = 0; t < kVectors; ++t) {
        const F p = exp2v<Scale>(at_least_m126((s[t] - set(maximum)) * set(kLog2e)));
        weight[t] = where(less(s[t], set(-3.0e38f)), set(0.0f), p);
        *sum = *sum + weight[t];
    }
    return maximum * kLog2e;
}

inline void store_codes(uint8_t* p, const F (&weight)[kVectors]) {
    I code[kVectors];
#pragma GCC unroll 16
    for (int t = 0; t < kVectors; ++t) code[t] = to_int(weight[t]);
    store_weights(p, code);
}

// INT8 scores of RR rows over one block: cells of codes `keys` [groups][64], scales [64].
template <int RR>
inline void int8_sums(const Queries& q, int64_t row, const uint8_t* keys, int64_t groups, int32_t (&out)[RR][kBlock]) {
    for (int v = 0; v < kVectors; v += NV) {
        I acc[RR][NV];
#pragma GCC unroll 16
        for (int r = 0; r < RR; ++r) {
#pragma GCC unroll 16
            for (int t = 0; t < NV; ++t) acc[r][t] = set_i(kKeyStart * q.code_sum[row + r]);
        }
        product<KeysOp, RR, NV>(q.cells + row * q.stride, q.stride, keys + v * W * 4, kBlock, groups, acc);
#pragma GCC unroll 16
        for (int r = 0; r < RR; ++r) {
#pragma GCC unroll 16
            for (int t = 0; t < NV; ++t) store_i(&out[r][(v + t) * W], acc[r][t]);
        }
    }
}

// acc += factor * (weight codes . value codes) * scale, for NN vectors of channels.
template <class Op, int RR, int NN>
inline void add_codes(const uint8_t* weights, const uint8_t* values, int64_t width, const float* scale,
                      const float* factor, float* acc, int32_t start) {
    I sum[RR][NN];
#pragma GCC unroll 16
    for (int r = 0; r < RR; ++r) {
#pragma GCC unroll 16
        for (int t = 0; t < NN; ++t) sum[r][t] = set_i(start);
    }
    product<Op, RR, NN>(weights, kBlock, values, width, kBlock / 4, sum);
#pragma GCC unroll 16
    for (int r = 0; r < RR; ++r) {
#pragma GCC unroll 16
        for (int t = 0; t < NN; ++t) {
            float* to = acc + r * width + t * W;
            store(to, fma(to_float(sum[r][t]), load(scale + t * W) * set(factor[r]), load(to)));
        }
    }
}

// acc += factor * weights . values in native numbers, for NN vectors of channels.
template <class Op, int RR, int NN>
inline void add_native(const uint8_t* weights, const uint8_t* values, int64_t width, const float* factor, float* acc) {
    F sum[RR][NN];
#pragma GCC unroll 16
    for (int r = 0; r < RR; ++r) {
#pragma GCC unroll 16
        for (int t = 0; t < NN; ++t) sum[r][t] = set(0.0f);
    }
    product<Op, RR, NN>(weights, kBlock * 4 / Op::kCell, values, width, kBlock / Op::kCell, sum);
#pragma GCC unroll 16
    for (int r = 0; r < RR; ++r) {
#pragma GCC unroll 16
        for (int t = 0; t < NN; ++t) {
            float* to = acc + r * width + t * W;
            store(to, fma(sum[r][t], set(factor[r]), load(to)));
        }
    }
}

// Call f(first vector, count) with compile-time counts over all vectors of `width` channels.
template <class Call> inline void over_channels(int64_t width, Call&& call) {
    int64_t d = 0;
    for (; d + NV * W <= width; d += NV * W) call(d, std::integral_constant<int, NV>{});
    switch ((width - d) / W) {
        case 3: if constexpr (NV > 3) call(d, std::integral_constant<int, 3>{}); break;
        case 2: if constexpr (NV > 2) call(d, std::integral_constant<int, 2>{}); break;
        case 1: call(d, std::integral_constant<int, 1>{}); break;
        default: break;
    }
}

// Call f(first row, count) with compile-time counts over rows first..last.
template <class Call> inline void over_rows(int64_t first, int64_t last, Call&& call) {
    for (; first + R <= last; first += R) call(first, std::integral_constant<int, R>{});
    switch (last - first) {
        case 3: if constexpr (R > 3) call(first, std::integral_constant<int, 3>{}); break;
        case 2: if constexpr (R > 2) call(first, std::integral_constant<int, 2>{}); break;
        case 1: call(first, std::integral_constant<int, 1>{}); break;
        default: break;
    }
}

// A row tile's weights over one block, before they meet the values.
template <int RR> struct Weights {
    alignas(64) uint8_t codes[RR][kBlock];
    float factor[RR];
};

// The largest lane of each row's vector, and the sum of its lanes.
template <int RR> inline void largest_of_rows(const F (&a)[RR], float (&out)[RR]) {
#if defined(__AVX512F__)
    if constexpr (RR == 3 || RR == 4) {
        const F four[4] = {a[0], a[1], a[2], a[RR - 1]};
        float all[4];
        hmax_rows(four, all);
        for (int r = 0; r < RR; ++r) out[r] = all[r];
        return;
    }
#endif
#pragma GCC unroll 16
    for (int r = 0; r < RR; ++r) out[r] = hmax(a[r]);
}

template <int RR> inline void sums_of_rows(const F (&a)[RR], float (&out)[RR]) {
#if defined(__AVX512F__)
    if constexpr (RR == 3 || RR == 4) {
        const F four[4] = {a[0], a[1], a[2], a[RR - 1]};
        float all[4];
        hsum_rows(four, all);
        for (int r = 0; r < RR; ++r) out[r] = all[r];
        return;
    }
#endif
#pragma GCC unroll 16
    for (int r = 0; r < RR; ++r) out[r] = hsum(a[r]);
}

// Scores without the row's scale and offset -> weights. All rows pass each step together: their latencies overlap.
template <int RR, bool Partial>
inline void plain_weights(const Queries& q, int64_t row, F (&s)[RR][kVectors], float (&maximum)[RR], F (&total)[RR],
                          uint8_t (&codes)[RR][kBlock]) {
    F top[RR];
#pragma GCC unroll 16
    for (int r = 0; r < RR; ++r) {
#pragma GCC unroll 16
        for (int t = 0; t < kVectors; ++t) {
            if constexpr (Partial) s[r][t] = where(mask(q.word[row + r], t), s[r][t], set(-kInfinity));
            top[r] = t == 0 ? s[r][0] : max(top[r], s[r][t]);
        }
    }
    float most[RR];
    largest_of_rows<RR>(top, most);
#pragma GCC unroll 16
    for (int r = 0; r < RR; ++r) {
        const float slope = q.scale[row + r] * kLog2e, peak = most[r] * slope;
        // Differences first: scores of thousands keep their weights' precision.
        const F slopes = set(slope), tops = set(most[r]), least = set(-126 / slope);
        F weight[kVectors];
#pragma GCC unroll 16
        for (int t = 0; t < kVectors; ++t) {
            weight[t] = exp2v<kUnit>(at_least(s[r][t] - tops, least), slopes);
            if constexpr (Partial) weight[t] = where(mask(q.word[row + r], t), weight[t], set(0.0f));
            total[r] = t == 0 ? weight[0] : total[r] + weight[t];
        }
        maximum[r] = peak + q.offset[row + r] * kLog2e;
        if constexpr (Partial) maximum[r] = q.word[row + r] ? maximum[r] : -kInfinity;
        store_codes(codes[r], weight);
    }
}

// Integer sums -> weights of RR rows. General: soft-cap, clips; otherwise the short way.
template <int RR, bool General>
inline void int8_weights(const Queries& q, const State& state, int64_t row, const int32_t (&sums)[RR][kBlock],
                         const float* key_scale, Weights<RR>& out) {
    float maximum[RR];
    F total[RR], s[RR][kVectors];
#pragma GCC unroll 16
    for (int r = 0; r < RR; ++r) {
#pragma GCC unroll 16
        for (int t = 0; t < kVectors; ++t) s[r][t] = to_float(load_i(&sums[r][t * W])) * load(key_scale + t * W);
    }
    if constexpr (General) {
        for (int r = 0; r < RR; ++r) {
            F weight[kVectors];
            const F scale = set(q.scale[row + r]), offset = set(q.offset[row + r]);
            for (int t = 0; t < kVectors; ++t) {
                s[r][t] = limited(fma(s[r][t], scale, offset), q.softcap, q.absolute[row + r]);
            }
            total[r] = set(0.0f);
            maximum[r] = weights_of<kUnit>(s[r], q.word[row + r], q.floor[row + r], &total[r], weight);
            store_codes(out.codes[r], weight);
        }
    } else {
        uint64_t all = ~uint64_t{0};
        for (int r = 0; r < RR; ++r) all &= q.word[row + r];
        if (__builtin_expect(all == ~uint64_t{0}, 1)) {
            plain_weights<RR, false>(q, row, s, maximum, total, out.codes);
        } else {
            plain_weights<RR, true>(q, row, s, maximum, total, out.codes);
        }
    }
    state.admit<RR>(row, maximum, out.factor);
#pragma GCC unroll 16
    for (int r = 0; r < RR; ++r) {
        float* sum = state.sum + (row + r) * W;
        store(sum, fma(total[r], set(out.factor[r]), load(sum)));
    }
}

template <int RR>
inline void int8_values(const State& state, int64_t row, const Weights<RR>& weights, const uint8_t* values,
                        const float* value_scale) {
    over_channels(state.width, [&](int64_t d, auto n) {
        add_codes<ValuesOp, RR, n>(weights.codes[0], values + d * 4, state.width, value_scale + d, weights.factor,
                                   state.acc + row * state.width + d, 0);
    });
}

// One block of one KV head, packed (pack.h). What a caller does not need stays null.
struct Block {
    uint8_t* key_codes;      // cells [groups][64]
    float* key_scale;        // [64]
    uint8_t* value_codes;    // cells [16][width]
    float* value_scale;      // [width]
    uint8_t* rest_codes;     // the same without the sink tokens' values
    float* rest_scale;
    uint8_t* key_numbers;    // native cells [groups][64]
    uint8_t* value_numbers;  // native cells [64 / numbers in a cell][width]
    uint64_t* bad_keys;      // bits of keys that are not finite
    uint64_t* bad_values;
};

}  // namespace
}  // namespace quantsink
