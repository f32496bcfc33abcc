// What attention over numbers and over codes share: a tile's rows, sizes and memory, masks, the result of a row.
// Included once per instruction set, after its simd_*.h.
#pragma once

#include "memory.h"
#include "pack.h"
#include "tile_blocks.h"

namespace quantsink {
namespace {

struct RowId {
    int64_t head, query;
    bool sink;
};

// Rows of one batch row and KV head that go together: all INT8 (those of `sink` heads last), or all native.
struct TileRows {
    RowId id[kRows];
    int64_t count, sink_from;
    int64_t batch, kv_head;
    bool native;
};

template <class T> const T* at(const View& view, int64_t batch, int64_t head, int64_t token) {
    return static_cast<const T*>(view.data) + batch * view.batch + head * view.head + token * view.token;
}

// The number format of native heads.
template <class T> struct NativeOf { using Op = Float32Op; };
#if defined(__AVX512BF16__)
template <> struct NativeOf<BF16> { using Op = BFloat16Op; };
#endif

// Sizes that follow from the shapes.
struct Sizes {
    int64_t group, width, row_width, code_groups, native_groups, native_rows;

    Sizes(const Common& a, int64_t cell)
        : group(a.heads / a.kv_heads), width(round_up(a.value_dim, 16)), row_width(round_up(a.head_dim, 16)),
          code_groups(ceil_div(a.head_dim, 4)), native_groups(ceil_div(a.head_dim, cell)), native_rows(kBlock / cell) {}

    int64_t key_code_bytes() const { return code_groups * kBlock * 4; }
    int64_t value_code_bytes() const { return kBlock * width; }
    int64_t key_number_bytes() const { return native_groups * kBlock * 4; }
    int64_t value_number_bytes() const { return native_rows * width * 4; }
};

// What one thread works in.
struct Scratch {
    Queries q;
    State state;
    PackScratch pack;
    float* sink_scores;  // [sinks]
    int64_t free = 0;    // without a mask: keys that every row of the tile sees
    Block block;

    Scratch(Arena& arena, const Common& a, const Sizes& z, int64_t sinks) {
        q.cells = arena.take<uint8_t>(kRows * z.row_width * 4);
        q.code_sum = arena.take<int32_t>(kRows);
        q.scale = arena.take<float>(kRows);
        q.offset = arena.take<float>(kRows);
        q.absolute = arena.take<float>(kRows);
        q.floor = arena.take<float>(kRows);
        q.word = arena.take<uint64_t>(kRows);
        q.softcap = a.softcap;
        q.scaling = a.scaling;
        state.width = z.width;
        state.acc = arena.take<float>(kRows * z.width);
        state.sum = arena.take<float>(kRows * W);
        state.top = arena.take<float>(kRows);
        pack.row = arena.take<float>(z.row_width > z.width ? z.row_width : z.width);
        pack.codes = arena.take<int8_t>(z.row_width);
        pack.values = arena.take<float>(kBlock * z.width > z.row_width ? kBlock * z.width : z.row_width);
        sink_scores = arena.take<float>(sinks + 1);
        block = take_block(arena, z, true, true, true);
    }

    static Block take_block(Arena& arena, const Sizes& z, bool codes, bool rest, bool numbers) {
        Block b{};
        if (codes) {
            b.key_codes = arena.take<uint8_t>(z.key_code_bytes());
            b.key_scale = arena.take<float>(kBlock);
            b.value_codes = arena.take<uint8_t>(z.value_code_bytes());
            b.value_scale = arena.take<float>(z.width);
        }
        if (rest) {
            b.rest_codes = arena.take<uint8_t>(z.value_code_bytes());
            b.rest_scale = arena.take<float>(z.width);
        }
        if (numbers) {
            b.key_numbers = arena.take<uint8_t>(z.key_number_bytes());
            b.value_numbers = arena.take<uint8_t>(z.value_number_bytes());
        }
        b.bad_keys = arena.take<uint64_t>(1);
        b.bad_values = arena.take<uint64_t>(1);
        return b;
    }
};

// One row's result: the weighted values over the weights, the learned sink in the denominator.
template <class T>
void write_row(const Common& a, int64_t batch, const RowId& id, const float* acc, float sum, float top, float unit) {
    T* out = static_cast<T*>(a.out) + batch * a.out_view.batch + id.head * a.out_view.head + id.query * a.out_view.token;
    float factor = sum == 0 ? 0 : 1 / sum;
    if (a.s_aux && sum > 0) {
        const float lse = (top + std::log2(sum / unit)) / kLog2e;
        factor *= 1 / (1 + std::exp(a.s_aux[id.head] - lse));
    }
    for (int64_t d = 0; d < a.value_dim; d += W) {
        const F x = load(acc + d) * set(factor);
        const int64_t left = a.value_dim - d;
        if constexpr (sizeof(T) == sizeof(float)) {
            if (left >= W) {
                store(out + d, x);
            } else {
                float tail[W];
                store(tail, x);
                std::memcpy(out + d, tail, sizeof(float) * left);
            }
        } else {
            BF16 tail[W];
            store_words(left >= W ? out + d : tail, factor == factor ? rounded_bf16(x) : set_i(0x7fc0));
            if (left < W) std::memcpy(out + d, tail, sizeof(BF16) * left);
        }
    }
}

// Parts of one row's keys meet through their maxima (Flash-Decoding).
template <class T>
void merge_parts(const Common& a, int64_t batch, const RowId& id, float* part, int64_t count, int64_t stride,
                 int64_t width, float unit) {
    float top = -kInfinity;
    for (int64_t c = 0; c < count; ++c) top = top < part[c * stride] ? part[c * stride] : top;
    float sum = 0;
    float* acc = part + 2;
    for (int64_t c = 0; c < count; ++c) {
        const float* from = part + c * stride;
        const float weight = from[0] == -kInfinity ? 0 : exp2s(from[0] - top);
        // A sum that is not a number stays one, whatever its maximum.
        sum += from[1] == from[1] ? from[1] * weight : from[1];
        for (int64_t d = 0; d < width; d += W) {
            const F before = c == 0 ? set(0.0f) : load(acc + d);
            store(acc + d, fma(load(from + 2 + d), set(weight), before));
        }
    }
    write_row<T>(a, batch, id, acc, sum, top, unit);
}

// A mask as bits: [batches][queries][blocks], counted from each row's first real key; and which keys anyone sees.
struct MaskBits {
    uint64_t* word = nullptr;
    uint64_t* seen = nullptr;
    int64_t batches = 0, queries = 0, blocks = 0;

    uint64_t* of(int64_t batch, int64_t query) const {
        return word + ((batches == 1 ? 0 : batch) * queries + query) * blocks;
    }
    uint64_t* seen_of(int64_t batch) const { return seen + (batches == 1 ? 0 : batch) * blocks; }

    void build(const MaskView& mask, int64_t batch, int64_t first, int64_t keys, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int64_t i = 0; i < queries; ++i) {
            const uint8_t* row = mask.data + batch * mask.batch + i * mask.query + first;
            uint64_t* words = of(batch, i);
            for (int64_t n = 0; n < blocks; ++n) {
                const int64_t left = keys - n * kBlock;
                uint64_t bits = 0;
                if (left >= kBlock) {
                    bits = bits_of_bytes(row + n * kBlock);
                } else {
                    for (int64_t j = 0; j < left; ++j) bits |= static_cast<uint64_t>(row[n * kBlock + j] != 0) << j;
                }
                words[n] = bits;
            }
        }
        uint64_t* all = seen_of(batch);
        for (int64_t n = 0; n < blocks; ++n) all[n] = 0;
        for (int64_t i = 0; i < queries; ++i) {
            for (int64_t n = 0; n < blocks; ++n) all[n] |= of(batch, i)[n];
        }
    }
};

// The column of a batch row's first real key, how many keys there are from it on, and how many of them are exact.
struct BatchRow {
    int64_t first, keys, sinks;
};

}  // namespace
}  // namespace quantsink
