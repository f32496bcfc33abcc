// quantsink::sink_attention: which blocks each tile of rows meets, in which form. tile_blocks.h has what happens then.
// Included once per instruction set, after its simd_*.h.
#pragma once

#include "attention_parts.h"

namespace quantsink {
namespace {

template <class T> class SinkAttention {
public:
    using Op = typename NativeOf<T>::Op;

    explicit SinkAttention(const AttentionArgs& args) : a(args), z(args, Op::kCell) {}

    void run() {
        Arena measure;
        lay_out(measure);
        Arena arena(measure.size(), a.poison);
        lay_out(arena);
        prepare();
        if (packed) pack_all();
        attend_all();
        if (chunks > 1) merge_all();
    }

private:
    const AttentionArgs& a;
    const Sizes z;
    BatchRow* rows;           // [batch]
    MaskBits mask;
    float* mean;              // [kv_heads][row_width]
    float* sink_keys;         // [batch][kv_heads][sinks][row_width]
    float* sink_values;       // [batch][kv_heads][sinks][width]
    Block* blocks;            // [batch][kv_heads][block_count], where everything is packed beforehand
    Scratch* scratch;         // [threads]
    TileRows* tile;           // [threads]
    float* parts;             // [tiles][chunks][kRows][width + 2]
    int64_t block_count, sinks, tiles, chunks, query_tiles, group_tiles;
    int threads;
    bool packed, codes, split, numbers;

    // Few queries: the rows of all heads of a KV head form a tile, packed as they come, split over the keys.
    bool few() const { return a.queries <= 16; }

    void lay_out(Arena& arena) {
        block_count = ceil_div(a.keys, kBlock);
        sinks = smaller(a.sink_size, a.keys);
        codes = split = numbers = false;
        for (int64_t h = 0; h < a.heads; ++h) {
            codes |= a.routes[h] != kNative;
            split |= a.routes[h] == kSink && sinks > 0;
            numbers |= a.routes[h] == kNative;
        }
        bool row_clip = false;
        for (int64_t h = 0; h < a.heads && a.clip_row; ++h) row_clip |= a.clip_row[h] < kInfinity;
        const double work = static_cast<double>(a.batch) * a.heads * a.queries * a.keys * (a.head_dim + a.value_dim) +
                            8.0 * a.batch * a.kv_heads * a.keys * (a.head_dim + a.value_dim);
        threads = work < 4e6 ? 1 : a.threads;
        packed = !few();
        if (packed) {
            query_tiles = ceil_div(a.queries, kRows);
            tiles = a.batch * a.heads * query_tiles;
            group_tiles = chunks = 1;
        } else {
            group_tiles = ceil_div(z.group * a.queries, kRows);
            query_tiles = 1;
            tiles = a.batch * a.kv_heads * group_tiles * 2;  // INT8 and native apart
            chunks = row_clip ? 1 : larger(1, smaller(ceil_div(threads * 4, tiles), block_count / 4));
            if (threads == 1) chunks = 1;
        }
        rows = arena.take<BatchRow>(a.batch);
        if (a.mask.data) {
            mask.batches = a.sink_start || a.mask.batch ? a.batch : 1;
            mask.queries = a.queries;
            mask.blocks = block_count;
            mask.word = arena.take<uint64_t>(mask.batches * a.queries * block_count);
            mask.seen = arena.take<uint64_t>(mask.batches * block_count);
        }
        mean = arena.take<float>(a.kv_heads * z.row_width);
        sink_keys = arena.take<float>(split ? a.batch * a.kv_heads * sinks * z.row_width : 0);
        sink_values = arena.take<float>(split ? a.batch * a.kv_heads * sinks * z.width : 0);
        if (packed) {
            const int64_t count = a.batch * a.kv_heads * block_count;
            blocks = arena.take<Block>(count);
            for (int64_t n = 0; n < count; ++n) {
                const bool edge = split && n % block_count * kBlock < sinks;
                const Block block = Scratch::take_block(arena, z, codes, edge, numbers);
                if (arena.real()) blocks[n] = block;
            }
        }
        parts = arena.take<float>(chunks > 1 ? tiles * chunks * kRows * (z.width + 2) : 0);
        scratch = arena.take<Scratch>(threads);
        tile = arena.take<TileRows>(threads);
        for (int t = 0; t < threads; ++t) {
            const Scratch thread(arena, a, z, sinks);
            if (arena.real()) scratch[t] = thread;
        }
    }

    void prepare() {
        for (int64_t b = 0; b < a.batch; ++b) {
            const int64_t start = a.sink_start ? a.sink_start[b] : 0;
            const int64_t first = smaller(larger(start, 0), a.keys);
            const int64_t exact = larger(a.sink_size + smaller(start, 0), 0);
            rows[b] = {first, a.keys - first, smaller(exact, a.keys - first)};
            if (a.mask.data && (mask.batches > 1 || b == 0)) mask.build(a.mask, b, first, a.keys - first, threads);
        }
        for (int64_t h = 0; h < a.kv_heads; ++h) {
            load_row(a.key_mean + h * a.head_dim, a.head_dim, mean + h * z.row_width, z.row_width);
        }
        for (int64_t b = 0; split && b < a.batch; ++b) {
            for (int64_t h = 0; h < a.kv_heads; ++h) {
                for (int64_t s = 0; s < rows[b].sinks; ++s) {
                    const int64_t to = (b * a.kv_heads + h) * sinks + s, column = rows[b].first + s;
                    load_row(at<T>(a.key, b, h, column), a.head_dim, sink_keys + to * z.row_width, z.row_width);
                    load_row(at<T>(a.value, b, h, column), a.value_dim, sink_values + to * z.width, z.width);
                }
            }
        }
    }

    // Keys of block n that any query of batch row b sees.
    uint64_t seen(int64_t b, int64_t n) const {
        if (mask.word) return mask.seen_of(b)[n];
        return low_bits(rows[b].keys - n * kBlock);
    }

    // Keys of block n that query i sees.
    uint64_t visible(int64_t b, int64_t i, int64_t n) const {
        if (mask.word) return mask.of(b, i)[n];
        return low_bits(limit(b, i) - n * kBlock);
    }

    int64_t limit(int64_t b, int64_t i) const {
        const int64_t reach = a.causal ? i + a.keys - a.queries + 1 - rows[b].first : rows[b].keys;
        return larger(0, smaller(reach, rows[b].keys));
    }

    void pack_codes(int64_t b, int64_t h, int64_t n, const PackScratch& memory, const Block& block) const {
        const uint64_t bits = seen(b, n);
        const int64_t column = rows[b].first + n * kBlock;
        pack_key_codes(at<T>(a.key, b, h, column), a.key.token, bits, a.head_dim, mean + h * z.row_width, memory, block);
        const int64_t exact = split ? rows[b].sinks - n * kBlock : 0;
        pack_value_codes(at<T>(a.value, b, h, column), a.value.token, bits, exact, a.value_dim, z.width, memory, block);
    }

    void pack_numbers(int64_t b, int64_t h, int64_t n, const PackScratch& memory, const Block& block) const {
        const uint64_t bits = seen(b, n);
        const int64_t column = rows[b].first + n * kBlock;
        pack_native_keys<Op>(at<T>(a.key, b, h, column), a.key.token, bits, a.head_dim, memory, block);
        pack_native_values<Op>(at<T>(a.value, b, h, column), a.value.token, bits, a.value_dim, z.width, memory, block);
    }

    bool any_of_group(int64_t h, bool native) const {
        for (int64_t g = 0; g < z.group; ++g) {
            if ((a.routes[h * z.group + g] == kNative) == native) return true;
        }
        return false;
    }

    void pack_all() const {
        const int64_t count = a.batch * a.kv_heads * block_count;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 4)
        for (int64_t n = 0; n < count; ++n) {
            const int64_t b = n / block_count / a.kv_heads, h = n / block_count % a.kv_heads;
            const Scratch& memory = scratch[thread_index()];
            if (any_of_group(h, false)) pack_codes(b, h, n % block_count, memory.pack, blocks[n]);
            if (any_of_group(h, true)) pack_numbers(b, h, n % block_count, memory.pack, blocks[n]);
        }
    }

    // The t-th tile's rows; none where its heads take other routes.
    void choose_rows(int64_t t, TileRows& to) const {
        to.count = to.sink_from = 0;
        if (packed) {
            const int64_t bh = t % (a.batch * a.heads), last = query_tiles - 1 - t / (a.batch * a.heads);
            const int64_t head = bh % a.heads;
            to.batch = bh / a.heads;
            to.kv_head = head / z.group;
            to.native = a.routes[head] == kNative;
            const bool sink = a.routes[head] == kSink;
            for (int64_t i = last * kRows; i < smaller(a.queries, (last + 1) * kRows); ++i) {
                to.id[to.count++] = {head, i, sink};
            }
            to.sink_from = sink ? 0 : to.count;
            return;
        }
        to.native = t % 2;
        const int64_t part = t / 2 % group_tiles, bh = t / 2 / group_tiles;
        to.batch = bh / a.kv_heads;
        to.kv_head = bh % a.kv_heads;
        for (int pass = 0; pass < 2; ++pass) {
            if (pass == 1) to.sink_from = to.count;
            for (int64_t n = part * kRows; n < smaller(z.group * a.queries, (part + 1) * kRows); ++n) {
                const int64_t head = to.kv_head * z.group + n / a.queries;
                const uint8_t route = a.routes[head];
                if ((route == kNative) != to.native || (route == kSink) != (pass == 1)) continue;
                to.id[to.count++] = {head, n % a.queries, route == kSink};
            }
        }
    }

    void attend_all() const {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
        for (int64_t n = 0; n < tiles * chunks; ++n) {
            const int index = thread_index();
            TileRows& rows_of = tile[index];
            choose_rows(n / chunks, rows_of);
            if (rows_of.count) attend(rows_of, n / chunks, n % chunks, scratch[index]);
        }
    }

    void set_queries(const TileRows& rows_of, Scratch& memory) const {
        Queries& q = memory.q;
        q.stride = rows_of.native ? z.row_width * 4 : z.row_width;
        for (int64_t r = 0; r < rows_of.count; ++r) {
            const RowId& id = rows_of.id[r];
            const T* from = at<T>(a.query, rows_of.batch, id.head, id.query);
            q.absolute[r] = a.clip_absolute ? a.clip_absolute[id.head] : kInfinity;
            q.floor[r] = -kInfinity;
            load_row(from, a.head_dim, memory.pack.row, z.row_width);
            if (rows_of.native) {
                if (!finite(largest(memory.pack.row, z.row_width))) memory.state.poison(r);
                native_cells<Op>(from, a.head_dim, memory.pack.row, z.row_width, q.cells + r * q.stride);
                continue;
            }
            const float* centre = mean + rows_of.kv_head * z.row_width;
            F product = set(0.0f);
            for (int64_t d = 0; d < z.row_width; d += W) product = fma(load(memory.pack.row + d), load(centre + d), product);
            q.offset[r] = hsum(product) * a.scaling;
            auto* code = reinterpret_cast<int8_t*>(q.cells + r * q.stride);
            const float scale = encode_row(memory.pack.row, z.row_width, code, &q.code_sum[r]);
            if (!finite(scale)) memory.state.poison(r);
            q.scale[r] = scale * a.scaling;
        }
    }

    // The exact part of a `sink` head's row, before any block; with `top` only its largest score is wanted.
    void meet_sinks(const TileRows& of, int64_t r, const Scratch& memory, float* top) const {
        const RowId& id = of.id[r];
        const int64_t count = rows[of.batch].sinks, base = (of.batch * a.kv_heads + of.kv_head) * sinks;
        load_row(at<T>(a.query, of.batch, id.head, id.query), a.head_dim, memory.pack.row, z.row_width);
        float most = -kInfinity;
        for (int64_t s = 0; s < count; ++s) {
            memory.sink_scores[s] = -kInfinity;
            if (!(visible(of.batch, id.query, s / kBlock) >> (s % kBlock) & 1)) continue;
            const float* key = sink_keys + (base + s) * z.row_width;
            F product = set(0.0f);
            for (int64_t d = 0; d < z.row_width; d += W) product = fma(load(memory.pack.row + d), load(key + d), product);
            const float raw = hsum(product) * a.scaling;
            if (!finite(raw)) memory.state.poison(r);
            float lanes[W];
            store(lanes, limited(set(raw), a.softcap, memory.q.absolute[r]));
            memory.sink_scores[s] = lanes[0] < memory.q.floor[r] ? -kInfinity : lanes[0];
            most = most < memory.sink_scores[s] ? memory.sink_scores[s] : most;
        }
        if (top) {
            *top = *top < most ? most : *top;
            return;
        }
        if (most == -kInfinity) return;
        memory.state.top[r] = most * kLog2e;
        float* acc = memory.state.acc + r * z.width;
        for (int64_t s = 0; s < count; ++s) {
            if (memory.sink_scores[s] == -kInfinity) continue;
            const float weight = kUnit * std::exp(memory.sink_scores[s] - most);
            const float* value = sink_values + (base + s) * z.width;
            for (int64_t d = 0; d < z.width; d += W) store(acc + d, fma(set(weight), load(value + d), load(acc + d)));
            memory.state.sum[r * W] += weight;
        }
    }

    bool needs_limits(const TileRows& of, bool* row_clip) const {
        *row_clip = false;
        bool absolute = false;
        for (int64_t r = 0; r < of.count; ++r) {
            *row_clip |= a.clip_row && a.clip_row[of.id[r].head] < kInfinity;
            absolute |= a.clip_absolute && a.clip_absolute[of.id[r].head] < kInfinity;
        }
        return *row_clip || absolute || a.softcap > 0;
    }

    void attend(const TileRows& of, int64_t t, int64_t chunk, Scratch& memory) const {
        memory.state.reset(of.count);
        set_queries(of, memory);
        bool row_clip;
        const bool general = needs_limits(of, &row_clip);
        int64_t last = block_count;
        if (!mask.word) {
            last = 0;
            memory.free = a.keys;
            for (int64_t r = 0; r < of.count; ++r) {
                const int64_t reach = limit(of.batch, of.id[r].query);
                last = larger(last, ceil_div(reach, kBlock));
                memory.free = smaller(memory.free, reach);
            }
        }
        if (row_clip) find_floors(of, last, memory);
        if (chunk == 0 && !of.native) {
            for (int64_t r = of.sink_from; r < of.count; ++r) meet_sinks(of, r, memory, nullptr);
        }
        const int64_t from = chunk * block_count / chunks, to = (chunk + 1) * block_count / chunks;
        for (int64_t n = from; n < smaller(to, last); ++n) {
            if (packed && !of.native && !general) {
                n += int8_run_of(of, n, smaller(to, last), memory);
                if (n == smaller(to, last)) break;
            }
            if (!set_words(of, n, memory)) continue;
            const Block& block = block_of(of, n, memory);
            poison_rows(of, block, memory);
            if (of.native) {
                over_rows(0, of.count, [&](int64_t r, auto count) {
                    native_rows<Op, count>(memory.q, memory.state, r, block.key_numbers, z.native_groups, block.value_numbers);
                });
                continue;
            }
            int8_part(block, 0, of.sink_from, false, general, memory);
            int8_part(block, of.sink_from, of.count, n * kBlock < rows[of.batch].sinks, general, memory);
        }
        for (int64_t r = 0; r < of.count; ++r) {
            const float* acc = memory.state.acc + r * z.width;
            const float sum = hsum(load(memory.state.sum + r * W)), top = memory.state.top[r];
            if (chunks == 1) {
                write_row<T>(a, of.batch, of.id[r], acc, sum, top, unit_of(of));
                continue;
            }
            float* part = parts + ((t * chunks + chunk) * kRows + r) * (z.width + 2);
            part[0] = top;
            part[1] = sum;
            std::memcpy(part + 2, acc, sizeof(float) * z.width);
        }
    }

    void int8_part(const Block& block, int64_t first, int64_t last, bool rest, bool general, const Scratch& memory) const {
        if (general) {
            int8_block<true>(memory.q, memory.state, first, last, block, rest, z.code_groups);
        } else {
            int8_block<false>(memory.q, memory.state, first, last, block, rest, z.code_groups);
        }
    }

    // Of blocks n..last, those beyond the sinks that every row of a packed tile sees, together; how many that was.
    int64_t int8_run_of(const TileRows& of, int64_t n, int64_t last, const Scratch& memory) const {
        if (mask.word || n * kBlock < rows[of.batch].sinks) return 0;
        const int64_t count = smaller(last, memory.free / kBlock) - n;
        const Block* first = &blocks[(of.batch * a.kv_heads + of.kv_head) * block_count + n];
        return int8_run(memory.q, memory.state, of.count, first, count, z.code_groups) ? count : 0;
    }

    static float unit_of(const TileRows& of) { return of.native ? 1 : kUnit; }

    // The visible keys of block n for each row, without the exact ones; false where there are none.
    bool set_words(const TileRows& of, int64_t n, const Scratch& memory) const {
        if (!mask.word && (n + 1) * kBlock <= memory.free && n * kBlock >= rows[of.batch].sinks) {
            for (int64_t r = 0; r < of.count; ++r) memory.q.word[r] = ~uint64_t{0};
            return true;
        }
        const uint64_t exact = low_bits(rows[of.batch].sinks - n * kBlock);
        uint64_t any = 0;
        for (int64_t r = 0; r < of.count; ++r) {
            uint64_t word = visible(of.batch, of.id[r].query, n);
            if (of.id[r].sink) word &= ~exact;
            memory.q.word[r] = word;
            any |= word;
        }
        return any;
    }

    const Block& block_of(const TileRows& of, int64_t n, const Scratch& memory) const {
        if (packed) return blocks[(of.batch * a.kv_heads + of.kv_head) * block_count + n];
        if (of.native) {
            pack_numbers(of.batch, of.kv_head, n, memory.pack, memory.block);
        } else {
            pack_codes(of.batch, of.kv_head, n, memory.pack, memory.block);
        }
        return memory.block;
    }

    // Rows that see a key or value that is not finite are not finite either.
    void poison_rows(const TileRows& of, const Block& block, const Scratch& memory) const {
        if (!(*block.bad_keys | *block.bad_values)) return;
        for (int64_t r = 0; r < of.count; ++r) {
            if ((memory.q.word[r] & *block.bad_keys) || (memory.q.word[r] && *block.bad_values)) memory.state.poison(r);
        }
    }

    // Row clip: a first pass finds each row's largest score.
    void find_floors(const TileRows& of, int64_t last, const Scratch& memory) const {
        float top[kRows];
        for (int64_t r = 0; r < of.count; ++r) top[r] = -kInfinity;
        for (int64_t r = of.sink_from; !of.native && r < of.count; ++r) meet_sinks(of, r, memory, &top[r]);
        for (int64_t n = 0; n < last; ++n) {
            if (!set_words(of, n, memory)) continue;
            const Block& block = block_of(of, n, memory);
            over_rows(0, of.count, [&](int64_t first, auto count) {
                constexpr int RR = decltype(count)::value;
                if (of.native) {
                    native_tops<Op, RR>(memory.q, first, block.key_numbers, z.native_groups, top + first);
                } else {
                    int8_tops<RR>(memory.q, first, block.key_codes, block.key_scale, z.code_groups, top + first);
                }
            });
        }
        for (int64_t r = 0; r < of.count; ++r) memory.q.floor[r] = top[r] - a.clip_row[of.id[r].head];
    }

    void merge_all() const {
        for (int64_t t = 0; t < tiles; ++t) {
            TileRows& of = tile[0];
            choose_rows(t, of);
            for (int64_t r = 0; r < of.count; ++r) {
                merge_parts<T>(a, of.batch, of.id[r], parts + (t * chunks * kRows + r) * (z.width + 2), chunks,
                               kRows * (z.width + 2), z.width, unit_of(of));
            }
        }
    }
};

void attention(const AttentionArgs& args) {
    if (args.type == Type::bf16) {
        SinkAttention<BF16>(args).run();
    } else {
        SinkAttention<float>(args).run();
    }
}

}  // namespace
}  // namespace quantsink
