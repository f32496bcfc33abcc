// A block of 64 tokens of one KV head as codes: where things lie in its record, and products that unpack them in registers.
// Included once per instruction set, after tile.h. kernels/python/coded_attention/codes.py writes these records.
//
// Cells of 4 codes: keys [head_dim / 4][64 keys], values [16][value_dim]. A row of bytes, [columns][4], holds one row of
// cells in 8 bits, two in 4 (low bits first), four in 2. 3 bits are two planes: the low two bits as in 2 bits, then the
// high ones, eight rows of cells to a row of bytes. Rows of cells that a last row of bytes only pads meet zeros.
#pragma once

#include <utility>

#include "records.h"
#include "tile.h"

namespace quantsink {
namespace {

constexpr int kPad = 32;    // a row of numbers or their codes is padded to a multiple: what the products step by
static_assert(kBlock == kRecordTokens);

template <int Bits> constexpr int kMiddle = 1 << (Bits - 1);
template <int Bits> constexpr int kShare = Bits == 8 ? 1 : Bits == 4 ? 2 : 4;  // rows of cells in a row of bytes
template <int Bits> constexpr int kTurns = Bits == 3 ? 2 : 1;                  // of those, until a high plane's row is done

// One record.
struct Codes {
    const uint8_t* keys;
    const uint16_t* key_scale;
    const uint16_t* key_zero;
    const uint8_t* values;
    const uint16_t* value_scale;
    const uint16_t* value_zero;

    Codes(const uint8_t* record, int bits, int64_t head_dim, int64_t value_dim) : keys(record) {
        key_scale = reinterpret_cast<const uint16_t*>(record + code_bytes(head_dim / 4, kBlock, bits));
        key_zero = key_scale + head_dim;
        values = reinterpret_cast<const uint8_t*>(key_zero + head_dim);
        value_scale = reinterpret_cast<const uint16_t*>(values + code_bytes(kBlock / 4, value_dim, bits));
        value_zero = value_scale + ceil_div(value_dim, kGroup) * kBlock;
    }
};

inline I xor_i(I a, I b) { return a ^ b; }

template <class Call, int... N>
inline __attribute__((always_inline)) void each_of(Call&& call, std::integer_sequence<int, N...>) {
    (call(std::integral_constant<int, N>{}), ...);
}
// call(0), ..., call(Count - 1), each a constant.
template <int Count, class Call> inline __attribute__((always_inline)) void each(Call&& call) {
    each_of(call, std::make_integer_sequence<int, Count>{});
}

// Cell i of a row of bytes; of 3 bits, `high` has the high plane's row.
template <int Bits, int i> inline I cell_of(I low, I high) {
    if constexpr (Bits == 8) return low;
    if constexpr (Bits == 4) return and_i(i ? shr<4>(low) : low, set_i(0x0f0f0f0f));
    constexpr int at = 2 * (i % 4);
    if constexpr (at) low = shr<at>(low);
    low = and_i(low, set_i(0x03030303));
    if constexpr (Bits == 3) {
        if constexpr (i < 2) high = shl<2 - i>(high);
        if constexpr (i > 2) high = shr<i - 2>(high);
        low = or_i(low, and_i(high, set_i(0x04040404)));
    }
    return low;
}

template <int NN> inline __attribute__((always_inline)) void prefetch(const uint8_t* p) {
    for (int64_t i = 0; i < NN * W * 4; i += 64) __builtin_prefetch(p + i, 0, 2);
}

// Call f(first row of cells, i, cells): row first + i of the cells `b`, NN vectors of its columns. What lies `ahead`
// bytes further is asked for at the same time, into the second-level cache: into the first it made things slower.
template <int Bits, int NN, class Call>
inline __attribute__((always_inline)) void walk(const uint8_t* b, int64_t columns, int64_t cells, int64_t ahead, Call&& call) {
    const int64_t row = columns * 4;
    const uint8_t* high = b + byte_rows(cells, 2) * row;
    for (int64_t first = 0; first < cells;) {
        each<kTurns<Bits>>([&](auto turn) __attribute__((always_inline)) {
            I low[NN], top[NN];
            prefetch<NN>(b + ahead);
#pragma GCC unroll 16
            for (int t = 0; t < NN; ++t) {
                low[t] = load_i(b + t * W * 4);
                if constexpr (Bits == 3) top[t] = load_i(high + t * W * 4);
            }
            each<kShare<Bits>>([&](auto i) __attribute__((always_inline)) {
                I cell[NN];
#pragma GCC unroll 16
                for (int t = 0; t < NN; ++t) {
                    cell[t] = cell_of<Bits, decltype(turn)::value * kShare<Bits> + decltype(i)::value>(low[t], top[t]);
                }
                call(first, i, cell);
            });
            first += kShare<Bits>;
            b += row;
        });
        if constexpr (Bits == 3) {
            prefetch<NN>(high + ahead);
            high += row;
        }
    }
}

// acc[r][t] += codes `a` of RR rows (bytes `stride` apart) times NN vectors of columns of cells `b`.
template <int Bits, int RR, int NN>
inline __attribute__((always_inline)) void code_product(const uint8_t* a, int64_t stride, const uint8_t* b, int64_t columns,
                                                        int64_t cells, int64_t ahead, I (&acc)[RR][NN]) {
    walk<Bits, NN>(b, columns, cells, ahead, [&](int64_t first, auto i, const I (&cell)[NN]) __attribute__((always_inline)) {
#pragma GCC unroll 16
        for (int r = 0; r < RR; ++r) {
            const I row = broadcast4(a + r * stride + 4 * (first + i));
#pragma GCC unroll 16
            for (int t = 0; t < NN; ++t) acc[r][t] = dot_codes(acc[r][t], row, cell[t]);
        }
    });
}

// Codes become floats by their place in the highest bits of an integer, the middle taken off by flipping the first one.
template <int Bits> constexpr float kTiny = 1.0f / (1 << 16) / (1 << (16 - Bits));  // such a float is a code times 1 / kTiny

template <int Bits> constexpr int32_t kFlip = static_cast<int32_t>(kMiddle<Bits> * 0x01010101u);

// Code j of each cell less the middle, over kTiny.
template <int Bits, int j> inline F centred(I flipped) {
    constexpr int up = 8 * (3 - j) + 8 - Bits;
    if constexpr (up > 0) flipped = shl<up>(flipped);
    if constexpr (j > 0) flipped = and_i(flipped, set_i(static_cast<int32_t>(0xff000000u)));
    return to_float(flipped);
}

// As code_product() with numbers `a` (`stride` apart) and floating-point sums, which are of codes less the middle, over kTiny.
template <int Bits, int RR, int NN>
inline void number_product(const float* a, int64_t stride, const uint8_t* b, int64_t columns, int64_t cells, int64_t ahead,
                           F (&sum)[RR][NN]) {
    F acc[RR][NN];  // in registers, which `sum` is not when this is a call
#pragma GCC unroll 16
    for (int r = 0; r < RR; ++r) {
#pragma GCC unroll 16
        for (int t = 0; t < NN; ++t) acc[r][t] = set(0.0f);
    }
    walk<Bits, NN>(b, columns, cells, ahead, [&](int64_t first, auto i, const I (&cell)[NN]) __attribute__((always_inline)) {
        I flipped[NN];
#pragma GCC unroll 16
        for (int t = 0; t < NN; ++t) flipped[t] = xor_i(cell[t], set_i(kFlip<Bits>));
        each<4>([&](auto j) __attribute__((always_inline)) {
            F row[RR];
#pragma GCC unroll 16
            for (int r = 0; r < RR; ++r) row[r] = set(a[r * stride + 4 * (first + i) + j]);
#pragma GCC unroll 16
            for (int t = 0; t < NN; ++t) {
                const F x = centred<Bits, decltype(j)::value>(flipped[t]);
#pragma GCC unroll 16
                for (int r = 0; r < RR; ++r) acc[r][t] = fma(row[r], x, acc[r][t]);
            }
        });
    });
#pragma GCC unroll 16
    for (int r = 0; r < RR; ++r) {
#pragma GCC unroll 16
        for (int t = 0; t < NN; ++t) sum[r][t] = acc[r][t];
    }
}

// The numbers that NN vectors of columns stand for, `width` apart, for rows below `rows`: zero[row] + scale[row] * code.
template <int Bits, int NN>
inline void decode_columns(const uint8_t* b, int64_t columns, int64_t rows, int64_t ahead, const float* scale,
                           const float* zero, float* to, int64_t width) {
    walk<Bits, NN>(b, columns, rows / 4, ahead, [&](int64_t first, auto i, const I (&cell)[NN]) __attribute__((always_inline)) {
        if (4 * (first + i) >= rows) return;
        each<4>([&](auto j) __attribute__((always_inline)) {
            const int64_t row = 4 * (first + i) + j;
            const F step = set(scale[row] * kTiny<Bits>), base = set(zero[row] + kMiddle<Bits> * scale[row]);
#pragma GCC unroll 16
            for (int t = 0; t < NN; ++t) {
                const I flipped = xor_i(cell[t], set_i(kFlip<Bits>));
                store(to + row * width + t * W, fma(centred<Bits, decltype(j)::value>(flipped), step, base));
            }
        });
    });
}

}  // namespace
}  // namespace quantsink
