// quantsink::coded_attention: a few queries over keys and values that lie in memory as codes, read once and in place.
// Included once per instruction set, after its simd_*.h.
//
// A key is zero + scale * code with one scale and zero point per (block of 64 keys, channel), a value the same per (key,
// group of 64 channels). With m the middle code, q.k = sum (q * scale) (code - m) + q.(zero + m scale). INT8 rows: the
// query is scaled and rounded to INT8 for each block, and a block's weights take their values' scales on before they are
// rounded to INT8. Native rows: the same products in float32, without rounding. Only what the rounding multiplies is
// centred: the middle is computed exactly.
#pragma once

#include <atomic>
#include <thread>

#include "attention_parts.h"
#include "coded_rows.h"
#include "exact_rows.h"

namespace quantsink {
namespace {

constexpr int kAhead = 2;             // blocks that codes are prefetched ahead
constexpr int kShares = 8;            // of the keys, for each thread
constexpr int kSpins = 1 << 14;       // looks at a flag before the processor is given to others
constexpr int kExactRows = 2 * R;     // rows up to which exact keys are read where they lie, not packed
constexpr int kDirectRows = 4 * R;    // native rows up to which codes are unpacked for each R rows, not once into floats

template <class T> class CodedAttention {
public:
    explicit CodedAttention(const CodedArgs& args) : a(args), z(sizes_of(args)) {}

    void run() {
        Arena measure;
        lay_out(measure);
        Arena arena(measure.size(), a.poison);
        lay_out(arena);
        attend_all();
        if (group_tiles > 1) merge_all();
    }

private:
    const CodedArgs& a;
    const Sizes z;
    int64_t tiles, chunks, group_tiles, part_rows;
    int threads, kinds;  // of rows: INT8, native or both
    bool row_clip, limits;
    Scratch* scratch;   // [threads]
    float* numbers;     // [threads][kRows][row_width]: a tile's queries
    float* steps;       // [threads][2][row_width]: a block's scales and zero points
    TileRows* tile;     // [threads]
    float* parts;       // [tiles][chunks][part_rows][width + 2]

    static Sizes sizes_of(const CodedArgs& args) {
        Sizes z(args, 1);
        z.row_width = round_up(args.head_dim, kPad);
        return z;
    }

    // Of batch row b: used sinks, newest, and blocks of a KV head.
    const int64_t* counts(int64_t b) const { return a.counts + b * (2 + a.bank_count); }
    int64_t blocks(int64_t b, int64_t kv_head) const { return counts(b)[2 + a.places[2 * kv_head]]; }

    void lay_out(Arena& arena) {
        row_clip = false;
        limits = a.softcap > 0 || a.clip_row || a.clip_absolute;
        for (int64_t h = 0; h < a.heads && a.clip_row; ++h) row_clip |= a.clip_row[h] < kInfinity;
        group_tiles = ceil_div(z.group * a.queries, kRows);
        bool kind[2] = {};
        for (int64_t h = 0; h < a.heads; ++h) kind[a.routes[h] == kNative] = true;
        kinds = kind[0] + kind[1];
        tiles = a.batch * a.kv_heads * group_tiles * kinds;
        int64_t most = 0, keys = 0;
        for (int64_t b = 0; b < a.batch; ++b) {
            for (int64_t h = 0; h < a.kv_heads; ++h) {
                most = larger(most, blocks(b, h));
                keys += blocks(b, h) * kBlock + counts(b)[0] + counts(b)[1];
            }
        }
        const double work = static_cast<double>(keys) * (a.head_dim + a.value_dim) * ceil_div(z.group * a.queries, R);
        threads = work < 2e5 ? 1 : a.threads;
        // Many shares of the keys for each thread, so that none waits long for another.
        chunks = row_clip || threads == 1 ? 1 : larger(1, smaller(ceil_div(threads * kShares, tiles), most / 4));
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

    void choose_rows(int64_t t, TileRows& to) const {
        to.native = kinds == 2 ? t % 2 : a.routes[0] == kNative;
        to.count = to.sink_from = 0;
        const int64_t part = t / kinds % group_tiles, bh = t / kinds / group_tiles;
        to.batch = bh / a.kv_heads;
        to.kv_head = bh % a.kv_heads;
        for (int64_t n = part * kRows; n < smaller(z.group * a.queries, (part + 1) * kRows); ++n) {
            const int64_t head = to.kv_head * z.group + n / a.queries;
            if ((a.routes[head] == kNative) == to.native) to.id[to.count++] = {head, n % a.queries, false};
        }
    }

    // The calling thread goes last: it turns to the others' results when it has seen them all, and does not sleep at the
    // end of the loop for the 50 us that waking it takes.
    void attend_all() const {
        std::atomic<int64_t> next{0};
        std::atomic<int> done{0};
#pragma omp parallel num_threads(threads)
        {
            const int index = thread_index();
            // Where there are many, one is taken ahead, so that its first blocks are under way when it begins.
            const int64_t all = tiles * chunks;
            const bool many = all > 2 * omp_get_num_threads();
            int64_t n = next.fetch_add(1, std::memory_order_relaxed);
            while (n < all) {
                const int64_t then = many ? next.fetch_add(1, std::memory_order_relaxed) : all;
                choose_rows(n / chunks, tile[index]);
                if (tile[index].count) attend(n, then, index);
                n = many ? then : next.fetch_add(1, std::memory_order_relaxed);
            }
            done.fetch_add(1, std::memory_order_release);
            if (index == 0 && group_tiles == 1) {
                wait_for(done, omp_get_num_threads());
                merge_all();
            }
        }
    }

    static void wait_for(const std::atomic<int>& done, int count) {
        int spins = 0;
        while (done.load(std::memory_order_acquire) < count) {
            if (spins < kSpins) {
                ++spins;
            } else {
                std::this_thread::yield();
            }
        }
    }

    void attend(int64_t n, int64_t then, int index) const {
        const TileRows& of = tile[index];
        const Scratch& own = scratch[index];
        own.state.reset(of.count);
        set_queries(of, own, numbers + index * kRows * z.row_width);
        if (row_clip) {
            float top[kRows];
            for (int64_t r = 0; r < of.count; ++r) top[r] = -kInfinity;
            pass(of, n, n, index, top);
            for (int64_t r = 0; r < of.count; ++r) own.q.floor[r] = top[r] - a.clip_row[of.id[r].head];
        }
        pass(of, n, then, index, nullptr);
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

    // Blocks of codes that follow each other.
    struct Records {
        const uint8_t* first = nullptr;
        int64_t stride = 0, count = 0;
        int bits = 8;
    };

    static uintptr_t address(const uint8_t* p) { return reinterpret_cast<uintptr_t>(p); }

    // Those of the n-th chunk of all tiles; none where it has none.
    Records records(int64_t n) const {
        if (n >= tiles * chunks) return {};
        const int64_t bh = n / chunks / kinds / group_tiles, batch = bh / a.kv_heads, kv_head = bh % a.kv_heads;
        const int64_t* place = a.places + 2 * kv_head;
        const Bank& bank = a.banks[place[0]];
        const int64_t all = blocks(batch, kv_head), chunk = n % chunks;
        const int64_t from = chunk * all / chunks, to = (chunk + 1) * all / chunks;
        if (from == to) return {};
        return {bank.data + batch * bank.batch + place[1] * bank.head + from * bank.block, bank.block, to - from, bank.bits};
    }

    // All keys of the n-th chunk; with `top` only the rows' largest scores are wanted. `then`: the chunk after it.
    void pass(const TileRows& of, int64_t n, int64_t then, int index, float* top) const {
        if (n % chunks == chunks - 1) {
            const int64_t* count = counts(of.batch);
            exact_keys(of, a.sink_key, a.sink_value, 0, count[0], false, index, top);
            exact_keys(of, a.key, a.value, a.newest - count[1], a.newest, true, index, top);
        }
        const Records now = records(n), next = records(then);
        switch (now.bits) {
            case 8: return coded_keys<8>(of, now, next, index, top);
            case 4: return coded_keys<4>(of, now, next, index, top);
            case 3: return coded_keys<3>(of, now, next, index, top);
            default: return coded_keys<2>(of, now, next, index, top);
        }
    }

    template <int Bits>
    void coded_keys(const TileRows& of, const Records& now, const Records& next, int index, float* top) const {
        const Scratch& own = scratch[index];
        float* scale = steps + index * 2 * z.row_width;
        float* zero = scale + z.row_width;
        // Both passes of a row clip have to find the same scores to the bit.
        const bool decoded = of.native && (of.count > kDirectRows || row_clip);
        for (int64_t r = 0; r < of.count; ++r) own.q.word[r] = ~uint64_t{0};
        const uint8_t* record = now.first;
        for (int64_t n = 0; n < now.count; ++n, record += now.stride) {
            int64_t ahead = kAhead * now.stride;
            if (n + kAhead >= now.count && next.first) {
                ahead = (n + kAhead - now.count) * next.stride + static_cast<int64_t>(address(next.first) - address(record));
            }
            const CodedBlock block{Codes(record, Bits, a.head_dim, a.value_dim), ahead,
                                   numbers + index * kRows * z.row_width, scale, zero, z.row_width, a.head_dim, a.value_dim};
            prefetch_halves(block.codes.key_scale, 2 * a.head_dim, block.ahead);
            prefetch_halves(block.codes.value_scale, 2 * ceil_div(a.value_dim, kGroup) * kBlock, block.ahead);
            load_halves(block.codes.key_scale, a.head_dim, scale, z.row_width);
            load_halves(block.codes.key_zero, a.head_dim, zero, z.row_width);
            if (!finite(largest(scale, z.row_width)) || !finite(largest(zero, z.row_width))) {
                for (int64_t r = 0; r < of.count; ++r) own.state.poison(r);
            }
            if (decoded) {
                decode_block<Bits>(block, own);
                native_block(of, own, index, top);
                continue;
            }
            over_rows(0, of.count, [&](int64_t r, auto rows) {
                if (of.native) {
                    coded_part<Bits, true, rows>(own, r, block);
                } else if (top) {
                    coded_tops<Bits, rows>(own.q, r, block, top + r);
                } else {
                    coded_part<Bits, false, rows>(own, r, block);
                }
            });
        }
    }

    template <int Bits, bool Native, int RR> void coded_part(const Scratch& own, int64_t r, const CodedBlock& block) const {
        if (limits) {
            coded_rows<Bits, Native, RR, true>(own.q, own.state, r, block);
        } else {
            coded_rows<Bits, Native, RR, false>(own.q, own.state, r, block);
        }
    }

    static void prefetch_halves(const uint16_t* p, int64_t count, int64_t ahead) {
        for (int64_t i = 0; i < count; i += 32) __builtin_prefetch(reinterpret_cast<const uint8_t*>(p + i) + ahead, 0, 2);
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

    // Columns first..last of exact keys, the newest of which are causal.
    void exact_keys(const TileRows& of, const View& key, const View& value, int64_t first, int64_t last, bool causal,
                    int index, float* top) const {
        const Scratch& own = scratch[index];
        for (int64_t from = first; from < last; from += kBlock) {
            const int64_t count = smaller(kBlock, last - from);
            uint64_t any = 0;
            for (int64_t r = 0; r < of.count; ++r) {
                const int64_t reach = causal ? a.newest - a.queries + of.id[r].query + 1 : last;
                own.q.word[r] = low_bits(smaller(count, reach - from));
                any |= own.q.word[r];
            }
            if (!any) break;
            if (of.count <= kExactRows) {
                over_rows(0, of.count, [&](int64_t r, auto rows) {
                    exact_rows<rows>(own.q, own.state, r, numbers + index * kRows * z.row_width, z.row_width,
                                     at<T>(key, of.batch, of.kv_head, from), key.token,
                                     at<T>(value, of.batch, of.kv_head, from), value.token, 64 - __builtin_clzll(any),
                                     a.head_dim, top ? top + r : nullptr);
                });
                continue;
            }
            pack_native_keys<Float32Op>(at<T>(key, of.batch, of.kv_head, from), key.token, any, a.head_dim, own.pack,
                                        own.block);
            pack_native_values<Float32Op>(at<T>(value, of.batch, of.kv_head, from), value.token, any, a.value_dim, z.width,
                                          own.pack, own.block);
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
    template <int Bits> void decode_block(const CodedBlock& block, const Scratch& own) const {
        auto* key = reinterpret_cast<float*>(own.block.key_numbers);
        auto* value = reinterpret_cast<float*>(own.block.value_numbers);
        for (int v = 0; v < kVectors; v += NV) {
            decode_columns<Bits, NV>(block.codes.keys + v * W * 4, kBlock, a.head_dim, block.ahead, block.scale, block.zero,
                                     key + v * W, kBlock);
        }
        float step[kBlock], base[kBlock];
        for (int64_t g = 0; g < a.value_dim; g += kGroup) {
            load_halves(block.codes.value_scale + g, kBlock, step, kBlock);
            load_halves(block.codes.value_zero + g, kBlock, base, kBlock);
            over_channels(smaller(kGroup, a.value_dim - g), [&](int64_t d, auto count) {
                decode_columns<Bits, count>(block.codes.values + (g + d) * 4, a.value_dim, kBlock, block.ahead, step, base,
                                            value + g + d, z.width);
            });
        }
    }

    void merge_all() const {
#pragma omp parallel for num_threads(threads) schedule(static) if (group_tiles > 1)
        for (int64_t t = 0; t < tiles; ++t) {
            TileRows& of = tile[thread_index()];
            choose_rows(t, of);
            for (int64_t r = 0; r < of.count; ++r) {
                merge_parts<T>(a, of.batch, of.id[r], parts + (t * chunks * part_rows + r) * (z.width + 2), chunks,
                               part_rows * (z.width + 2), z.width, 1);
            }
        }
    }
};

void coded_attention(const CodedArgs& args) {
    if (args.type == Type::bf16) {
        CodedAttention<BF16>(args).run();
    } else {
        CodedAttention<float>(args).run();
    }
}

}  // namespace
}  // namespace quantsink
