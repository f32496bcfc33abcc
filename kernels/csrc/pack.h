// Keys and values of one block of 64 -> cells that tile.h multiplies: INT8 codes with scales, or native numbers.
// Included once per instruction set, after tile.h.
#pragma once

#include "tile.h"

namespace quantsink {
namespace {

using BF16 = uint16_t;

inline F load_as_float(const float* p) { return load(p); }
inline F load_as_float(const BF16* p) { return load_bf16(p); }
inline float as_float(float x) { return x; }
inline float as_float(BF16 x) {
    const uint32_t word = static_cast<uint32_t>(x) << 16;
    float out;
    std::memcpy(&out, &word, sizeof out);
    return out;
}

// `count` numbers as float32, followed by zeros up to `width` (a multiple of W).
template <class T> inline void load_row(const T* from, int64_t count, float* to, int64_t width) {
    int64_t d = 0;
    for (; d + W <= count; d += W) store(to + d, load_as_float(from + d));
    for (; d < count; ++d) to[d] = as_float(from[d]);
    for (; d < width; ++d) to[d] = 0;
}

// The largest |x|; not finite where any of them is not.
inline float largest(const float* x, int64_t width) {
    I top = set_i(0);  // as bits: they order like the numbers, and NaN above all
    for (int64_t d = 0; d < width; d += W) top = max_i(top, and_i(bits(load(x + d)), set_i(0x7fffffff)));
    const int32_t word = hmax_i(top);
    float out;
    std::memcpy(&out, &word, sizeof out);
    return out;
}

// Symmetric INT8 codes of a row as bytes, and their sum; returns their scale (not finite where the row is not).
inline float encode_row(const float* x, int64_t width, int8_t* codes, int32_t* sum = nullptr) {
    const float most = largest(x, width), scale = most == 0 ? 1.0f : most / 127.0f;
    I all = set_i(0);
    for (int64_t d = 0; d < width; d += W) {
        const I code = to_int(div(load(x + d), set(scale)));
        all = add_i(all, code);
        store_bytes(codes + d, code);
    }
    if (sum) *sum = static_cast<int32_t>(hsum(to_float(all)));
    return scale;
}

inline bool finite(float x) { return x - x == 0; }

// Memory for packing one block: not shared between threads.
struct PackScratch {
    float* row;      // [row width]
    int8_t* codes;   // [row width]
    float* values;   // [64][width]
};

// `seen` has a bit for each key that some query sees: the others count as zero.
template <class T>
void pack_key_codes(const T* key, int64_t stride, uint64_t seen, int64_t head_dim, const float* mean,
                    const PackScratch& scratch, const Block& block) {
    const int64_t width = round_up(head_dim, 16), groups = ceil_div(head_dim, 4);
    auto* cells = reinterpret_cast<uint32_t*>(block.key_codes);
    const uint32_t flip = kKeyFlip * 0x01010101u;
    *block.bad_keys = 0;
    for (int j = 0; j < kBlock; ++j) {
        if (!(seen >> j & 1)) {
            for (int64_t g = 0; g < groups; ++g) cells[g * kBlock + j] = flip;
            block.key_scale[j] = 1;
            continue;
        }
        load_row(key + j * stride, head_dim, scratch.row, width);
        for (int64_t d = 0; d < width; d += W) store(scratch.row + d, load(scratch.row + d) - load(mean + d));
        const float scale = encode_row(scratch.row, width, scratch.codes);
        const bool good = finite(scale);
        *block.bad_keys |= static_cast<uint64_t>(!good) << j;
        block.key_scale[j] = good ? scale : 1;
        for (int64_t g = 0; g < groups; ++g) {
            uint32_t cell;
            std::memcpy(&cell, scratch.codes + 4 * g, sizeof cell);
            cells[g * kBlock + j] = cell ^ flip;
        }
    }
}

// Float32 values of the block in scratch.values; rows outside `seen` are zero.
template <class T>
void load_values(const T* value, int64_t stride, uint64_t seen, int64_t value_dim, int64_t width,
                 const PackScratch& scratch, uint64_t* bad) {
    *bad = 0;
    for (int j = 0; j < kBlock; ++j) {
        float* row = scratch.values + j * width;
        if (seen >> j & 1) {
            load_row(value + j * stride, value_dim, row, width);
            *bad |= static_cast<uint64_t>(!finite(largest(row, width))) << j;
        } else {
            std::memset(row, 0, sizeof(float) * width);
        }
    }
}

// scratch.values -> codes and scales per channel.
inline void encode_values(const PackScratch& scratch, int64_t width, uint8_t* codes, float* scale) {
    for (int64_t d = 0; d < width; d += W) {
        const float* column = scratch.values + d;
        F most = set(0.0f);
        for (int j = 0; j < kBlock; ++j) most = max(abs(load(column + j * width)), most);
        const F step = where(less(set(0.0f), most), div(most, set(127.0f)), set(1.0f));
        store(scale + d, step);
        for (int j = 0; j < kBlock; j += 4) {
            I byte[4];
            for (int i = 0; i < 4; ++i) {
                byte[i] = and_i(to_int(div(load(column + (j + i) * width), step)), set_i(0xff));
            }
            const I cell = or_i(or_i(byte[0], shl<8>(byte[1])), or_i(shl<16>(byte[2]), shl<24>(byte[3])));
            store_i(codes + (j / 4 * width + d) * 4, cell);
        }
    }
}

template <class T>
void pack_value_codes(const T* value, int64_t stride, uint64_t seen, int64_t sinks, int64_t value_dim, int64_t width,
                      const PackScratch& scratch, const Block& block) {
    load_values(value, stride, seen, value_dim, width, scratch, block.bad_values);
    encode_values(scratch, width, block.value_codes, block.value_scale);
    if (sinks <= 0 || !block.rest_codes) return;
    std::memset(scratch.values, 0, sizeof(float) * smaller(sinks, kBlock) * width);
    encode_values(scratch, width, block.rest_codes, block.rest_scale);
}

// A row of native cells: float32, or bfloat16 as it is.
template <class Op, class T>
inline void native_cells(const T* from, int64_t count, float* row, int64_t width, uint8_t* to) {
    if constexpr (Op::kCell == 1) {
        load_row(from, count, row, width);
        std::memcpy(to, row, sizeof(float) * count);
    } else {
        const int64_t cells = ceil_div(count, 2);
        std::memset(to + 4 * (cells - 1), 0, 4);
        std::memcpy(to, from, sizeof(BF16) * count);
    }
}

template <class Op, class T>
void pack_native_keys(const T* key, int64_t stride, uint64_t seen, int64_t head_dim, const PackScratch& scratch,
                      const Block& block) {
    const int64_t width = round_up(head_dim, 16), groups = ceil_div(head_dim, Op::kCell);
    auto* cells = reinterpret_cast<uint32_t*>(block.key_numbers);
    *block.bad_keys = 0;
    for (int j = 0; j < kBlock; ++j) {
        if (!(seen >> j & 1)) {
            for (int64_t g = 0; g < groups; ++g) cells[g * kBlock + j] = 0;
            continue;
        }
        load_row(key + j * stride, head_dim, scratch.row, width);
        const bool good = finite(largest(scratch.row, width));
        *block.bad_keys |= static_cast<uint64_t>(!good) << j;
        if constexpr (Op::kCell == 2) {
            for (int64_t d = 0; d < width; d += W) {
                store_words(reinterpret_cast<BF16*>(scratch.values) + d, rounded_bf16(load(scratch.row + d)));
            }
            const auto* pair = reinterpret_cast<const uint32_t*>(scratch.values);
            for (int64_t g = 0; g < groups; ++g) cells[g * kBlock + j] = pair[g];
        } else {
            const auto* number = reinterpret_cast<const uint32_t*>(scratch.row);
            for (int64_t g = 0; g < groups; ++g) cells[g * kBlock + j] = number[g];
        }
    }
}

template <class Op, class T>
void pack_native_values(const T* value, int64_t stride, uint64_t seen, int64_t value_dim, int64_t width,
                        const PackScratch& scratch, const Block& block) {
    load_values(value, stride, seen, value_dim, width, scratch, block.bad_values);
    if constexpr (Op::kCell == 1) {
        std::memcpy(block.value_numbers, scratch.values, sizeof(float) * kBlock * width);
    } else {
        for (int j = 0; j < kBlock; j += 2) {
            for (int64_t d = 0; d < width; d += W) {
                const I low = rounded_bf16(load(scratch.values + j * width + d));
                const I high = rounded_bf16(load(scratch.values + (j + 1) * width + d));
                store_i(block.value_numbers + (j / 2 * width + d) * 4, or_i(low, shl<16>(high)));
            }
        }
    }
}

}  // namespace
}  // namespace quantsink
