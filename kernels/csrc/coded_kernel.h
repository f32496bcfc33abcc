// quantsink::coded_attention: a few queries over keys and values that lie in memory as codes, read once and in place.
// Included once per instruction set, after attention_kernel.h.
//
// A key is zero + scale * code with one scale and zero point per (block of 64 keys, channel), a value the same per (key,
// group of 64 channels). With m the middle code, q.k = sum (q * scale) (code - m) + q.(zero + m scale): the query is
// scaled and rounded to INT8 for each block, and a block's weights take their values' scales on before they are rounded
// to INT8. Only what the rounding multiplies is centred: the middle is computed exactly.
//
// Cells of 4 codes in 8 bits: keys [head_dim / 4][64 keys], values [16][value_dim]. In 4 bits a byte holds the code of a
// cell in its low half and that of the next cell in its high half.
#pragma once

#include "attention_kernel.h"

namespace quantsink {
namespace {

constexpr int kGroup = 64;  // channels that share a value's scale
constexpr int kAhead = 2;   // blocks that codes are prefetched ahead

template <int Bits> constexpr int kMiddle = 1 << (Bits - 1);

template <int Bits> inline int64_t code_bytes(int64_t channels) { return kBlock * channels * Bits / 8; }

// As product(), with codes of `b` in 8 or 4 bits, which are read this once. What lies `ahead` bytes further is asked for
// at the same time, into the second-level cache: into the first it made things slower.
template <int Bits, int RR, int NN>
inline void code_product(const uint8_t* a, int64_t stride, const uint8_t* b, int64_t columns, int64_t groups, int64_t ahead,
                         I (&acc)[RR][NN]) {
    for (groups /= 8 / Bits; groups; --groups) {
        I cell[8 / Bits][NN];
        for (int64_t i = 0; i < NN * W * 4; i += 64) __builtin_prefetch(b + ahead + i, 0, 2);
#pragma GCC unroll 16
        for (int t = 0; t < NN; ++t) {
            cell[0][t] = load_i(b + t * W * 4);
            if constexpr (Bits == 4) {
                cell[1][t] = and_i(shr<4>(cell[0][t]), set_i(0x0f0f0f0f));
                cell[0][t] = and_i(cell[0][t], set_i(0x0f0f0f0f));
            }
        }
#pragma GCC unroll 2
        for (int i = 0; i < 8 / Bits; ++i) {
#pragma GCC unroll 16
            for (int r = 0; r < RR; ++r) {
                const I row = broadcast4(a + r * stride + 4 * i);
#pragma GCC unroll 16
                for (int t = 0; t < NN; ++t) acc[r][t] = dot_codes(acc[r][t], row, cell[i][t]);
            }
        }
        a += 4 * (8 / Bits);
        b += columns * 4;
    }
}

// One block of one KV head's codes.
struct Codes {
    const uint8_t* keys;
    const uint16_t* key_scale;
    const uint16_t* key_zero;
    const uint8_t* values;
    const uint16_t* value_scale;
    const uint16_t* value_zero;
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

// Scores of RR rows -> weights, 1 at each row's maximum (returned in log2).
template <int RR, bool General>
inline void coded_weights(const Queries& q, int64_t row, const int32_t (&sums)[RR][kBlock], const float (&slope)[RR],
                          const float (&offset)[RR], F (&weight)[RR][kVectors], F (&total)[RR], float (&maximum)[RR]) {
    if constexpr (General) {
        for (int r = 0; r < RR; ++r) {
            F s[kVectors];
            for (int t = 0; t < kVectors; ++t) {
                s[t] = limited(fma(to_float(load_i(&sums[r][t * W])), set(slope[r]), set(offset[r])), q.softcap,
                               q.absolute[row + r]);
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
            s[r][t] = to_float(load_i(&sums[r][t * W]));
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

// The weights of one group of channels: scaled, rounded.
template <int Bits, int RR>
inline void encode_weights(const F (&weight)[RR][kVectors], const uint16_t* scale, const uint16_t* zero,
                           uint8_t (&codes)[RR][kBlock], float (&step)[RR], float (&base)[RR], int32_t (&start)[RR]) {
    F scaled[RR][kVectors], most[RR], zeros[RR];
    I sum[RR];
#pragma GCC unroll 16
    for (int t = 0; t < kVectors; ++t) {
        const F s = load_half(scale + t * W), z = fma(s, set(kMiddle<Bits>), load_half(zero + t * W));
#pragma GCC unroll 16
        for (int r = 0; r < RR; ++r) {
            scaled[r][t] = weight[r][t] * s;
            most[r] = t == 0 ? scaled[r][0] : max(scaled[r][t], most[r]);
            zeros[r] = fma(weight[r][t], z, t == 0 ? set(0.0f) : zeros[r]);
        }
    }
    float top[RR];
    largest_of_rows<RR>(most, top);
    sums_of_rows<RR>(zeros, base);
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
        store_weights(codes[r], code);
    }
    starts<Bits, RR>(sum, start);
}

// Integer scores of RR rows over one block of codes: sums * slope + offset. `numbers` holds the rows as float32,
// `row_width` apart.
template <int Bits, int RR>
inline void coded_sums(const Queries& q, int64_t row, const float* numbers, int64_t row_width, int64_t head_dim,
                       const Codes& block, const float* scale, const float* zero, int32_t (&sums)[RR][kBlock],
                       float (&slope)[RR], float (&offset)[RR]) {
    int32_t start[RR];
    uint8_t* cells = q.cells + row * row_width;
    encode_scaled<Bits, RR>(numbers + row * row_width, row_width, row_width, scale, zero, reinterpret_cast<int8_t*>(cells),
                            slope, offset, start);
    for (int r = 0; r < RR; ++r) {
        slope[r] *= q.scaling;
        offset[r] *= q.scaling;
    }
    for (int v = 0; v < kVectors; v += NV) {
        I acc[RR][NV];
#pragma GCC unroll 16
        for (int r = 0; r < RR; ++r) {
#pragma GCC unroll 16
            for (int t = 0; t < NV; ++t) acc[r][t] = set_i(start[r]);
        }
        code_product<Bits, RR, NV>(cells, row_width, block.keys + v * W * 4, kBlock, head_dim / 4,
                                   kAhead * code_bytes<Bits>(head_dim), acc);
#pragma GCC unroll 16
        for (int r = 0; r < RR; ++r) {
#pragma GCC unroll 16
            for (int t = 0; t < NV; ++t) store_i(&sums[r][(v + t) * W], acc[r][t]);
        }
    }
}

// The largest visible score of RR rows in one block of codes, for the row clip.
template <int Bits, int RR>
inline void coded_tops(const Queries& q, int64_t row, const float* numbers, int64_t row_width, int64_t head_dim,
                       const Codes& block, const float* scale, const float* zero, float* top) {
    alignas(64) int32_t sums[RR][kBlock];
    float slope[RR], offset[RR];
    coded_sums<Bits, RR>(q, row, numbers, row_width, head_dim, block, scale, zero, sums, slope, offset);
    for (int r = 0; r < RR; ++r) {
        F s[kVectors];
        for (int t = 0; t < kVectors; ++t) {
            s[t] = limited(fma(to_float(load_i(&sums[r][t * W])), set(slope[r]), set(offset[r])), q.softcap,
                           q.absolute[row + r]);
        }
        top[r] = top_of(s, q.word[row + r], top[r]);
    }
}

// RR rows over one block of codes.
template <int Bits, int RR, bool General>
inline void coded_rows(const Queries& q, const State& state, int64_t row, const float* numbers, int64_t row_width,
                       int64_t head_dim, int64_t value_dim, const Codes& block, const float* scale, const float* zero) {
    alignas(64) int32_t sums[RR][kBlock];
    alignas(64) uint8_t codes[RR][kBlock];
    F weight[RR][kVectors], total[RR];
    float slope[RR], offset[RR], maximum[RR], factor[RR], step[RR], base[RR];
    int32_t start[RR];
    coded_sums<Bits, RR>(q, row, numbers, row_width, head_dim, block, scale, zero, sums, slope, offset);
    coded_weights<RR, General>(q, row, sums, slope, offset, weight, total, maximum);
    state.admit<RR>(row, maximum, factor);
    for (int r = 0; r < RR; ++r) {
        float* sum = state.sum + (row + r) * W;
        store(sum, fma(total[r], set(factor[r]), load(sum)));
    }
    for (int64_t g = 0; g * kGroup < value_dim; ++g) {
        encode_weights<Bits, RR>(weight, block.value_scale + g * kBlock, block.value_zero + g * kBlock, codes, step, base, start);
        over_channels(smaller(kGroup, value_dim - g * kGroup), [&](int64_t d, auto count) {
            constexpr int NN = decltype(count)::value;
            I sum[RR][NN];
#pragma GCC unroll 16
            for (int r = 0; r < RR; ++r) {
#pragma GCC unroll 16
                for (int t = 0; t < NN; ++t) sum[r][t] = set_i(start[r]);
            }
            code_product<Bits, RR, NN>(codes[0], kBlock, block.values + (g * kGroup + d) * 4, value_dim, kBlock / 4,
                                       kAhead * code_bytes<Bits>(value_dim), sum);
#pragma GCC unroll 16
            for (int r = 0; r < RR; ++r) {
                const F steps = set(step[r] * factor[r]), bases = set(base[r] * factor[r]);
#pragma GCC unroll 16
                for (int t = 0; t < NN; ++t) {
                    float* to = state.acc + (row + r) * state.width + g * kGroup + d + t * W;
                    store(to, fma(to_float(sum[r][t]), steps, load(to) + bases));
                }
            }
        });
    }
}

// One code of a block, for native heads.
template <int Bits> inline float code_at(const uint8_t* cells, int64_t columns, int64_t group, int64_t column, int64_t i) {
    if constexpr (Bits == 8) return cells[(group * columns + column) * 4 + i];
    const uint8_t both = cells[(group / 2 * columns + column) * 4 + i];
    return group % 2 ? both >> 4 : both & 15;
}

template <class T, int Bits> class CodedAttention {
public:
    explicit CodedAttention(const CodedArgs& args) : a(args), z(args, 1) {}

    void run() {
        Arena measure;
        lay_out(measure);
        Arena arena(measure.size(), a.poison);
        lay_out(arena);
        attend_all();
        merge_all();
    }

private:
    const CodedArgs& a;
    const Sizes z;
    int64_t tiles, chunks, group_tiles, part_rows;
    int threads;
    bool row_clip, limits;
    Scratch* scratch;   // [threads]
    float* numbers;     // [threads][kRows][row_width]: a tile's queries
    float* steps;       // [threads][2][row_width]: a block's scales and zero points
    TileRows* tile;     // [threads]
    float* parts;       // [tiles][chunks][part_rows][width + 2]

    void lay_out(Arena& arena) {
        row_clip = false;
        limits = a.softcap > 0 || a.clip_row || a.clip_absolute;
        for (int64_t h = 0; h < a.heads && a.clip_row; ++h) row_clip |= a.clip_row[h] < kInfinity;
        group_tiles = ceil_div(z.group * a.queries, kRows);
        tiles = a.batch * a.kv_heads * group_tiles * 2;  // INT8 and native apart
        const double work = static_cast<double>(a.batch) * a.kv_heads * a.blocks * kBlock * (a.head_dim + a.value_dim);
        threads = work < 2e5 ? 1 : a.threads;
        // Several shares of the keys for each thread, so that none waits long for another.
        chunks = row_clip || threads == 1 ? 1 : larger(1, smaller(ceil_div(threads * 16, tiles), a.blocks / 4));
        part_rows = smaller(kRows, z.group * a.queries);
        parts = arena.take<float>(tiles * chunks * part_rows * (z.width + 2));
        numbers = arena.take<float>(threads * kRows * z.row_width);
        steps = arena.take<float>(threads * 2 * z.row_width);
        scratch = arena.take<Scratch>(threads);
        tile = arena.take<TileRows>(threads);
        for (int t = 0; t < threads; ++t) {
            const Scratch own(arena, a, z, 0);
            if (arena.real()) scratch[t] = own;
        }
    }

    int64_t keys() const { return a.exact + a.blocks * kBlock; }

    // Visible ones of the `count` keys from position `from` on.
    uint64_t visible(int64_t b, int64_t i, int64_t from, int64_t count) const {
        if (a.mask.data) {
            const uint8_t* row = a.mask.data + b * a.mask.batch + i * a.mask.query + from;
            if (count == kBlock) return bits_of_bytes(row);
            uint64_t bits = 0;
            for (int64_t j = 0; j < count; ++j) bits |= static_cast<uint64_t>(row[j] != 0) << j;
            return bits;
        }
        const int64_t reach = a.causal ? keys() - a.queries + i + 1 : keys();
        return low_bits(smaller(count, reach - from));
    }

    void choose_rows(int64_t t, TileRows& to) const {
        to.native = t % 2;
        to.count = to.sink_from = 0;
        const int64_t part = t / 2 % group_tiles, bh = t / 2 / group_tiles;
        to.batch = bh / a.kv_heads;
        to.kv_head = bh % a.kv_heads;
        for (int64_t n = part * kRows; n < smaller(z.group * a.queries, (part + 1) * kRows); ++n) {
            const int64_t head = to.kv_head * z.group + n / a.queries;
            if ((a.routes[head] == kNative) == to.native) to.id[to.count++] = {head, n % a.queries, false};
        }
    }

    void attend_all() const {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
        for (int64_t n = 0; n < tiles * chunks; ++n) {
            const int index = thread_index();
            choose_rows(n / chunks, tile[index]);
            if (tile[index].count) attend(n, index);
        }
    }

    void attend(int64_t n, int index) const {
        const TileRows& of = tile[index];
        const Scratch& own = scratch[index];
        own.state.reset(of.count);
        set_queries(of, own, numbers + index * kRows * z.row_width);
        if (row_clip) {
            float top[kRows];
            for (int64_t r = 0; r < of.count; ++r) top[r] = -kInfinity;
            pass(of, 0, index, top);
            for (int64_t r = 0; r < of.count; ++r) own.q.floor[r] = top[r] - a.clip_row[of.id[r].head];
        }
        pass(of, n % chunks, index, nullptr);
        for (int64_t r = 0; r < of.count; ++r) {
            float* part = parts + (n * part_rows + r) * (z.width + 2);
            part[0] = own.state.top[r];
            part[1] = hsum(load(own.state.sum + r * W));
            std::memcpy(part + 2, own.state.acc + r * z.width, sizeof(float) * z.width);
        }
    }

    void set_queries(const TileRows& of, const Scratch& own, float* to) const {
        for (int64_t r = 0; r < of.count; ++r) {
            const RowId& id = of.id[r];
            load_row(at<T>(a.query, of.batch, id.head, id.query), a.head_dim, to + r * z.row_width, z.row_width);
            if (!finite(largest(to + r * z.row_width, z.row_width))) own.state.poison(r);
            own.q.absolute[r] = a.clip_absolute ? a.clip_absolute[id.head] : kInfinity;
            own.q.floor[r] = -kInfinity;
        }
    }

    // All keys of this chunk; with `top` only the rows' largest scores are wanted.
    void pass(const TileRows& of, int64_t chunk, int index, float* top) const {
        const Scratch& own = scratch[index];
        if (chunk == chunks - 1) {
            exact_keys(of, 0, a.sinks, 0, index, top);
            exact_keys(of, a.sinks, a.exact, a.sinks + a.blocks * kBlock, index, top);
        }
        for (int64_t n = chunk * a.blocks / chunks; n < (chunk + 1) * a.blocks / chunks; ++n) {
            const Codes block = codes_of(of.batch, of.kv_head, n);
            if (!set_words(of, a.sinks + n * kBlock, kBlock, own)) continue;
            float* scale = steps + index * 2 * z.row_width;
            float* zero = scale + z.row_width;
            load_halves(block.key_scale, a.head_dim, scale, z.row_width);
            load_halves(block.key_zero, a.head_dim, zero, z.row_width);
            if (!finite(largest(scale, z.row_width)) || !finite(largest(zero, z.row_width))) {
                for (int64_t r = 0; r < of.count; ++r) {
                    if (own.q.word[r]) own.state.poison(r);
                }
            }
            if (of.native) {
                decode_block(block, scale, zero, own);
                native_block(of, own, index, top);
                continue;
            }
            const float* from = numbers + index * kRows * z.row_width;
            const bool general = limits || !all_visible(of, own);
            over_rows(0, of.count, [&](int64_t r, auto count) {
                if (top) {
                    coded_tops<Bits, count>(own.q, r, from, z.row_width, a.head_dim, block, scale, zero, top + r);
                } else if (general) {
                    coded_rows<Bits, count, true>(own.q, own.state, r, from, z.row_width, a.head_dim, a.value_dim, block,
                                                  scale, zero);
                } else {
                    coded_rows<Bits, count, false>(own.q, own.state, r, from, z.row_width, a.head_dim, a.value_dim, block,
                                                   scale, zero);
                }
            });
        }
    }

    static bool all_visible(const TileRows& of, const Scratch& own) {
        uint64_t all = ~uint64_t{0};
        for (int64_t r = 0; r < of.count; ++r) all &= own.q.word[r];
        return all == ~uint64_t{0};
    }

    static void load_halves(const uint16_t* from, int64_t count, float* to, int64_t width) {
        for (int64_t d = 0; d < width; d += W) {
            if (d + W <= count) {
                store(to + d, load_half(from + d));
                continue;
            }
            uint16_t tail[W] = {};
            if (d < count) std::memcpy(tail, from + d, sizeof(uint16_t) * (count - d));
            store(to + d, load_half(tail));
        }
    }

    Codes codes_of(int64_t b, int64_t h, int64_t n) const {
        const int64_t i = (b * a.kv_heads + h) * a.blocks + n, groups = ceil_div(a.value_dim, kGroup);
        return {a.key_codes + i * code_bytes<Bits>(a.head_dim),     a.key_scale + i * a.head_dim,
                a.key_zero + i * a.head_dim,                        a.value_codes + i * code_bytes<Bits>(a.value_dim),
                a.value_scale + i * groups * kBlock,                a.value_zero + i * groups * kBlock};
    }

    bool set_words(const TileRows& of, int64_t from, int64_t count, const Scratch& own) const {
        uint64_t any = 0;
        for (int64_t r = 0; r < of.count; ++r) {
            own.q.word[r] = visible(of.batch, of.id[r].query, from, count);
            any |= own.q.word[r];
        }
        return any;
    }

    // Exact keys first..last, which lie at `position` on among all keys.
    void exact_keys(const TileRows& of, int64_t first, int64_t last, int64_t position, int index, float* top) const {
        const Scratch& own = scratch[index];
        for (int64_t from = first; from < last; from += kBlock) {
            const int64_t count = smaller(kBlock, last - from);
            if (!set_words(of, position + from - first, count, own)) continue;
            pack_native_keys<Float32Op>(at<T>(a.exact_key, of.batch, of.kv_head, from), a.exact_key.token, low_bits(count),
                                        a.head_dim, own.pack, own.block);
            pack_native_values<Float32Op>(at<T>(a.exact_value, of.batch, of.kv_head, from), a.exact_value.token,
                                          low_bits(count), a.value_dim, z.width, own.pack, own.block);
            for (int64_t r = 0; r < of.count; ++r) {
                if (own.q.word[r] & (*own.block.bad_keys | *own.block.bad_values)) own.state.poison(r);
            }
            native_block(of, own, index, top);
        }
    }

    void native_block(const TileRows& of, const Scratch& own, int index, float* top) const {
        Queries q = own.q;
        q.cells = reinterpret_cast<uint8_t*>(numbers + index * kRows * z.row_width);
        q.stride = z.row_width * 4;
        over_rows(0, of.count, [&](int64_t r, auto count) {
            if (top) {
                native_tops<Float32Op, count>(q, r, own.block.key_numbers, a.head_dim, top + r);
            } else {
                native_rows<Float32Op, count>(q, own.state, r, own.block.key_numbers, a.head_dim, own.block.value_numbers);
            }
        });
    }

    // Codes -> the numbers they stand for, in own.block.
    void decode_block(const Codes& block, const float* scale, const float* zero, const Scratch& own) const {
        auto* key = reinterpret_cast<float*>(own.block.key_numbers);
        auto* value = reinterpret_cast<float*>(own.block.value_numbers);
        for (int64_t d = 0; d < a.head_dim; ++d) {
            for (int64_t j = 0; j < kBlock; ++j) {
                key[d * kBlock + j] = zero[d] + scale[d] * code_at<Bits>(block.keys, kBlock, d / 4, j, d % 4);
            }
        }
        float step[kBlock], base[kBlock];
        for (int64_t d = 0; d < z.width; ++d) {
            if (d % kGroup == 0 && d < a.value_dim) {
                load_halves(block.value_scale + d / kGroup * kBlock, kBlock, step, kBlock);
                load_halves(block.value_zero + d / kGroup * kBlock, kBlock, base, kBlock);
            }
            for (int64_t j = 0; j < kBlock; ++j) {
                value[j * z.width + d] =
                    d < a.value_dim ? base[j] + step[j] * code_at<Bits>(block.values, a.value_dim, j / 4, d, j % 4) : 0;
            }
        }
    }

    void merge_all() const {
        for (int64_t t = 0; t < tiles; ++t) {
            choose_rows(t, tile[0]);
            for (int64_t r = 0; r < tile[0].count; ++r) {
                merge_parts<T>(a, tile[0].batch, tile[0].id[r], parts + (t * chunks * part_rows + r) * (z.width + 2), chunks,
                               part_rows * (z.width + 2), z.width, 1);
            }
        }
    }
};

void coded_attention(const CodedArgs& args) {
    const bool half = args.type == Type::bf16;
    if (args.bits == 8) {
        half ? CodedAttention<BF16, 8>(args).run() : CodedAttention<float, 8>(args).run();
    } else {
        half ? CodedAttention<BF16, 4>(args).run() : CodedAttention<float, 4>(args).run();
    }
}

}  // namespace
}  // namespace quantsink
