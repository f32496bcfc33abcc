// Rows of queries over one block of codes: products, weights, weighted values. coded_kernel.h says which rows meet which
// blocks. Included once per instruction set, after its simd_*.h.
#pragma once

#include "coded_codes.h"
#include "tile_blocks.h"

namespace quantsink {
namespace {

// One block as a tile of rows meets it.
struct CodedBlock {
    Codes codes;
    int64_t ahead;            // bytes to the record that is prefetched
    const float* numbers;     // [kRows][row_width]: the tile's queries
    const float* scale;       // [row_width]: of the keys
    const float* zero;
    int64_t row_width, head_dim, value_dim;
};

// What products of codes with numbers start at, given the numbers' sums lane by lane.
template <int Bits, int RR> inline void starts(const I (&sum)[RR], int32_t (&start)[RR]) {
    F lanes[RR];
    float all[RR];
#pragma GCC unroll 16
    for (int r = 0; r < RR; ++r) lanes[r] = to_float(sum[r]);
    sums_of_rows<RR>(lanes, all);
#pragma GCC unroll 16
    for (int r = 0; r < RR; ++r) start[r] = (kCodeStart - kMiddle<Bits>) * static_cast<int32_t>(all[r]);
}

// `rows` of numbers, `stride` apart, times `scale` -> INT8 codes in the rows of `to`; what a code stands for in `step`.
// `dot` becomes rows . (zero + middle scale), and `start` what sums of products with the codes start at.
template <int Bits, int RR>
inline void encode_scaled(const float* rows, int64_t stride, int64_t width, const float* scale, const float* zero,
                          int8_t* to, float (&step)[RR], float (&dot)[RR], int32_t (&start)[RR]) {
    F most[RR], product[RR], inverse[RR];
    I sum[RR];
#pragma GCC unroll 16
    for (int r = 0; r < RR; ++r) {
        most[r] = product[r] = set(0.0f);
        sum[r] = set_i(0);
    }
    for (int64_t d = 0; d < width; d += W) {
        const F s = load(scale + d), z = fma(s, set(kMiddle<Bits>), load(zero + d));
#pragma GCC unroll 16
        for (int r = 0; r < RR; ++r) {
            const F x = load(rows + r * stride + d);
            most[r] = max(abs(x * s), most[r]);
            product[r] = fma(x, z, product[r]);
        }
    }
    float top[RR];
    largest_of_rows<RR>(most, top);
    sums_of_rows<RR>(product, dot);
#pragma GCC unroll 16
    for (int r = 0; r < RR; ++r) {
        inverse[r] = set(top[r] > 0 ? 127.0f / top[r] : 0.0f);
        step[r] = top[r] * (1.0f / 127);
    }
    for (int64_t d = 0; d < width; d += W) {
        const F s = load(scale + d);
#pragma GCC unroll 16
        for (int r = 0; r < RR; ++r) {
            const I code = to_int(load(rows + r * stride + d) * s * inverse[r]);
            sum[r] = add_i(sum[r], code);
            store_bytes(to + r * stride + d, code);
        }
    }
    starts<Bits, RR>(sum, start);
}

// The same without rounding: `rows` times `scale` in `to`.
template <int Bits, int RR>
inline void scale_rows(const float* rows, int64_t width, const float* scale, const float* zero, float* to, float (&dot)[RR]) {
    F product[RR];
#pragma GCC unroll 16
    for (int r = 0; r < RR; ++r) product[r] = set(0.0f);
    for (int64_t d = 0; d < width; d += W) {
        const F s = load(scale + d), z = fma(s, set(kMiddle<Bits>), load(zero + d));
#pragma GCC unroll 16
        for (int r = 0; r < RR; ++r) {
            const F x = load(rows + r * width + d);
            store(to + r * width + d, x * s);
            product[r] = fma(x, z, product[r]);
        }
    }
    sums_of_rows<RR>(product, dot);
}

// Products of RR rows with one block's keys: scores are sums * slope + offset.
template <int Bits, bool Native, int RR>
inline void coded_sums(const Queries& q, int64_t row, const CodedBlock& block, float (&sums)[RR][kBlock],
                       float (&slope)[RR], float (&offset)[RR]) {
    const int64_t width = block.row_width;
    const float* from = block.numbers + row * width;
    uint8_t* cells = q.cells + row * width * (Native ? 4 : 1);
    int32_t start[RR];
    if constexpr (Native) {
        scale_rows<Bits, RR>(from, width, block.scale, block.zero, reinterpret_cast<float*>(cells), offset);
    } else {
        encode_scaled<Bits, RR>(from, width, width, block.scale, block.zero, reinterpret_cast<int8_t*>(cells), slope,
                                offset, start);
    }
    for (int r = 0; r < RR; ++r) {
        slope[r] = (Native ? kTiny<Bits> : slope[r]) * q.scaling;
        offset[r] *= q.scaling;
    }
    for (int v = 0; v < kVectors; v += NV) {
        typename std::conditional_t<Native, Float32Op, CodesOp>::Acc acc[RR][NV];
#pragma GCC unroll 16
        for (int r = 0; r < RR; ++r) {
#pragma GCC unroll 16
            for (int t = 0; t < NV; ++t) {
                if constexpr (!Native) acc[r][t] = set_i(start[r]);
            }
        }
        const uint8_t* keys = block.codes.keys + v * W * 4;
        if constexpr (Native) {
            number_product<Bits, RR, NV>(reinterpret_cast<const float*>(cells), width, keys, kBlock, block.head_dim / 4,
                                         block.ahead, acc);
        } else {
            code_product<Bits, RR, NV>(cells, width, keys, kBlock, block.head_dim / 4, block.ahead, acc);
        }
#pragma GCC unroll 16
        for (int r = 0; r < RR; ++r) {
#pragma GCC unroll 16
            for (int t = 0; t < NV; ++t) {
                if constexpr (Native) store(&sums[r][(v + t) * W], acc[r][t]);
                if constexpr (!Native) store(&sums[r][(v + t) * W], to_float(acc[r][t]));
            }
        }
    }
}

// Scores of RR rows -> weights, 1 at each row's maximum (returned in log2).
template <int RR, bool General>
inline void coded_weights(const Queries& q, int64_t row, const float (&sums)[RR][kBlock], const float (&slope)[RR],
                          const float (&offset)[RR], F (&weight)[RR][kVectors], F (&total)[RR], float (&maximum)[RR]) {
    if constexpr (General) {
        for (int r = 0; r < RR; ++r) {
            F s[kVectors];
            for (int t = 0; t < kVectors; ++t) {
                s[t] = limited(fma(load(&sums[r][t * W]), set(slope[r]), set(offset[r])), q.softcap, q.absolute[row + r]);
            }
            total[r] = set(0.0f);
            maximum[r] = weights_of<1>(s, q.word[row + r], q.floor[row + r], &total[r], weight[r]);
        }
        return;
    }
    F s[RR][kVectors], top[RR];
#pragma GCC unroll 16
    for (int r = 0; r < RR; ++r) {
#pragma GCC unroll 16
        for (int t = 0; t < kVectors; ++t) {
            s[r][t] = load(&sums[r][t * W]);
            top[r] = t == 0 ? s[r][0] : max(top[r], s[r][t]);
        }
    }
    float most[RR];
    largest_of_rows<RR>(top, most);
#pragma GCC unroll 16
    for (int r = 0; r < RR; ++r) {
        const float steep = slope[r] * kLog2e, peak = most[r] * steep;
        const F slopes = set(steep), tops = set(most[r]);
#pragma GCC unroll 16
        for (int t = 0; t < kVectors; ++t) {
            weight[r][t] = exp2v(at_least_m126((s[r][t] - tops) * slopes));
            total[r] = t == 0 ? weight[r][0] : total[r] + weight[r][t];
        }
        maximum[r] = peak + offset[r] * kLog2e;
    }
}

// The weights of one group of channels, scaled: numbers for native rows, else INT8 codes with what one stands for in
// `step`. `base` becomes weights . (zero + middle scale), and `start` what sums of products with the codes start at.
template <int Bits, bool Native, int RR>
inline void encode_weights(const F (&weight)[RR][kVectors], const uint16_t* scale, const uint16_t* zero, uint8_t* to,
                           float (&step)[RR], float (&base)[RR], int32_t (&start)[RR]) {
    F scaled[RR][kVectors], most[RR], zeros[RR];
#pragma GCC unroll 16
    for (int t = 0; t < kVectors; ++t) {
        const F s = load_half(scale + t * W), z = fma(s, set(kMiddle<Bits>), load_half(zero + t * W));
#pragma GCC unroll 16
        for (int r = 0; r < RR; ++r) {
            scaled[r][t] = weight[r][t] * s;
            zeros[r] = fma(weight[r][t], z, t == 0 ? set(0.0f) : zeros[r]);
            if constexpr (Native) store(reinterpret_cast<float*>(to) + r * kBlock + t * W, scaled[r][t]);
            if constexpr (!Native) most[r] = t == 0 ? scaled[r][0] : max(scaled[r][t], most[r]);
        }
    }
    sums_of_rows<RR>(zeros, base);
    if constexpr (Native) {
        for (int r = 0; r < RR; ++r) step[r] = kTiny<Bits>;
        return;
    }
    float top[RR];
    I sum[RR];
    largest_of_rows<RR>(most, top);
#pragma GCC unroll 16
    for (int r = 0; r < RR; ++r) {
        const F inverse = set(top[r] > 0 ? 127.0f / top[r] : 0.0f);
        step[r] = top[r] * (1.0f / 127);
        I code[kVectors];
        sum[r] = set_i(0);
#pragma GCC unroll 16
        for (int t = 0; t < kVectors; ++t) {
            code[t] = to_int(scaled[r][t] * inverse);
            sum[r] = add_i(sum[r], code[t]);
        }
        store_weights(to + r * kBlock, code);
    }
    starts<Bits, RR>(sum, start);
}

// acc += factor * (step * (weights . codes) + base) for NN vectors of channels.
template <int Bits, bool Native, int RR, int NN>
inline void add_coded(const uint8_t* weights, const uint8_t* values, int64_t value_dim, int64_t ahead,
                      const float (&step)[RR], const float (&base)[RR], const int32_t (&start)[RR],
                      const float (&factor)[RR], float* acc, int64_t width) {
    typename std::conditional_t<Native, Float32Op, CodesOp>::Acc sum[RR][NN];
#pragma GCC unroll 16
    for (int r = 0; r < RR; ++r) {
#pragma GCC unroll 16
        for (int t = 0; t < NN; ++t) {
            if constexpr (!Native) sum[r][t] = set_i(start[r]);
        }
    }
    if constexpr (Native) {
        number_product<Bits, RR, NN>(reinterpret_cast<const float*>(weights), kBlock, values, value_dim, kBlock / 4, ahead, sum);
    } else {
        code_product<Bits, RR, NN>(weights, kBlock, values, value_dim, kBlock / 4, ahead, sum);
    }
#pragma GCC unroll 16
    for (int r = 0; r < RR; ++r) {
        const F steps = set(step[r] * factor[r]), bases = set(base[r] * factor[r]);
#pragma GCC unroll 16
        for (int t = 0; t < NN; ++t) {
            float* to = acc + r * width + t * W;
            F x;
            if constexpr (Native) x = sum[r][t];
            if constexpr (!Native) x = to_float(sum[r][t]);
            store(to, fma(x, steps, load(to) + bases));
        }
    }
}

// The largest score of RR INT8 rows in one block of codes, for the row clip.
template <int Bits, int RR>
inline void coded_tops(const Queries& q, int64_t row, const CodedBlock& block, float* top) {
    alignas(64) float sums[RR][kBlock];
    float slope[RR], offset[RR];
    coded_sums<Bits, false, RR>(q, row, block, sums, slope, offset);
    for (int r = 0; r < RR; ++r) {
        F s[kVectors];
        for (int t = 0; t < kVectors; ++t) {
            s[t] = limited(fma(load(&sums[r][t * W]), set(slope[r]), set(offset[r])), q.softcap, q.absolute[row + r]);
        }
        top[r] = top_of(s, q.word[row + r], top[r]);
    }
}

// RR rows over one block of codes.
template <int Bits, bool Native, int RR, bool General>
inline void coded_rows(const Queries& q, const State& state, int64_t row, const CodedBlock& block) {
    alignas(64) float sums[RR][kBlock];
    alignas(64) uint8_t weights[RR * kBlock * (Native ? 4 : 1)];
    F weight[RR][kVectors], total[RR];
    float slope[RR], offset[RR], maximum[RR], factor[RR], step[RR], base[RR];
    int32_t start[RR];
    coded_sums<Bits, Native, RR>(q, row, block, sums, slope, offset);
    coded_weights<RR, General>(q, row, sums, slope, offset, weight, total, maximum);
    state.admit<RR>(row, maximum, factor);
    for (int r = 0; r < RR; ++r) {
        float* sum = state.sum + (row + r) * W;
        store(sum, fma(total[r], set(factor[r]), load(sum)));
    }
    for (int64_t g = 0; g < block.value_dim; g += kGroup) {
        encode_weights<Bits, Native, RR>(weight, block.codes.value_scale + g, block.codes.value_zero + g, weights, step,
                                         base, start);
        over_channels(smaller(kGroup, block.value_dim - g), [&](int64_t d, auto count) {
            add_coded<Bits, Native, RR, count>(weights, block.codes.values + (g + d) * 4, block.value_dim, block.ahead,
                                               step, base, start, factor, state.acc + row * state.width + g + d, state.width);
        });
    }
}

}  // namespace
}  // namespace quantsink
