// quantsink::coded_attention on random codes against plain attention over what they stand for: every path that reads
// records in place, in exactly sized memory. Its precision is tests/kernels/test_coded_attention.py's affair.
#include <limits>
#include <vector>

#include "../kernels.h"
#include "check.h"

namespace quantsink {
namespace {

struct Case {
    std::vector<int> bits;  // of each KV head
    int64_t batch, heads, queries, blocks, newest, sinks, dim, value_dim;
    bool limited = false;

    int64_t kv_heads() const { return static_cast<int64_t>(bits.size()); }
};

// Where things lie in a record, spelled out once more: byte offsets, and codes by bit.
struct Layout {
    int bits;
    int64_t dim, value_dim, key_scale, values, value_scale, size;

    Layout(int bits, int64_t dim, int64_t value_dim) : bits(bits), dim(dim), value_dim(value_dim) {
        key_scale = code_bytes(dim / 4, 64);
        values = key_scale + 4 * dim;
        value_scale = values + code_bytes(16, value_dim);
        size = value_scale + 4 * groups() * 64;
    }
    int64_t groups() const { return (value_dim + 63) / 64; }
    int64_t rows(int64_t cells, int plane) const { return (cells * plane + 7) / 8; }
    int64_t code_bytes(int64_t cells, int64_t columns) const {
        return (bits == 3 ? rows(cells, 2) + rows(cells, 1) : rows(cells, bits)) * columns * 4;
    }
    // Bits of a plane that starts at `from`, for code i of cell (cell, column).
    static int field(const uint8_t* from, int plane, int64_t columns, int64_t cell, int64_t column, int64_t i) {
        const int64_t share = 8 / plane;
        return from[(cell / share * columns + column) * 4 + i] >> cell % share * plane & ((1 << plane) - 1);
    }
    int code(const uint8_t* from, int64_t cells, int64_t columns, int64_t row, int64_t column) const {
        if (bits != 3) return field(from, bits, columns, row / 4, column, row % 4);
        const uint8_t* high = from + rows(cells, 2) * columns * 4;
        return field(from, 2, columns, row / 4, column, row % 4) | field(high, 1, columns, row / 4, column, row % 4) << 2;
    }
    double key(const uint8_t* record, int64_t j, int64_t d) const {
        const uint8_t* scale = record + key_scale;
        return get(scale, Type::f16, dim + d) + get(scale, Type::f16, d) * code(record, dim / 4, 64, d, j);
    }
    double value(const uint8_t* record, int64_t j, int64_t d) const {
        const uint8_t* scale = record + value_scale;
        const int64_t at = d / 64 * 64 + j;
        return get(scale, Type::f16, groups() * 64 + at) +
               get(scale, Type::f16, at) * code(record + values, 16, value_dim, j, d);
    }
    // Random codes, the padding among them too; scales and zero points are numbers.
    void fill(uint8_t* record, Random& random) const {
        for (int64_t i = 0; i < size; ++i) record[i] = static_cast<uint8_t>(random.below(256));
        const double step = 3.0 / ((1 << bits) - 1);
        for (int64_t i = 0; i < dim; ++i) {
            put(record + key_scale, Type::f16, i, (1 + 0.1 * random.below(10)) * step);
            put(record + key_scale, Type::f16, dim + i, -2 + 0.1 * random.below(10));
        }
        for (int64_t i = 0; i < groups() * 64; ++i) {
            put(record + value_scale, Type::f16, i, (1 + 0.1 * random.below(10)) * step);
            put(record + value_scale, Type::f16, groups() * 64 + i, -2 + 0.1 * random.below(10));
        }
    }
};

void check(const Case& c, Type type, const std::vector<const char*>& sets) {
    Random random(static_cast<uint32_t>(c.bits[0] * 100 + c.heads * 10 + c.dim + c.queries));
    const int64_t kv_heads = c.kv_heads(), pairs = c.batch * kv_heads;
    // One bank for each width, with room for one block more than is used; its last record ends the memory.
    std::vector<int> widths;
    std::vector<int64_t> places, held;
    for (const int bits : c.bits) {
        size_t n = 0;
        while (n < widths.size() && widths[n] != bits) ++n;
        if (n == widths.size()) widths.push_back(bits), held.push_back(0);
        places.push_back(static_cast<int64_t>(n));
        places.push_back(held[n]++);
    }
    const int64_t capacity = c.blocks + 1, columns = 2 + static_cast<int64_t>(widths.size());
    Buffer<int64_t> counts(c.batch * columns);
    for (int64_t b = 0; b < c.batch; ++b) {
        // The last row has less of everything.
        const bool less = c.batch > 1 && b == c.batch - 1;
        counts[b * columns] = less ? 0 : c.sinks;
        counts[b * columns + 1] = less ? (c.newest + 1) / 2 : c.newest;
        for (int64_t n = 2; n < columns; ++n) counts[b * columns + n] = less && n == 2 ? 0 : c.blocks;
    }
    std::vector<Layout> layouts;
    std::vector<Buffer<uint8_t>> memory;
    std::vector<Bank> banks;
    memory.reserve(widths.size());
    for (size_t n = 0; n < widths.size(); ++n) {
        const Layout layout(widths[n], c.dim, c.value_dim);
        layouts.push_back(layout);
        memory.emplace_back(c.batch * held[n] * capacity * layout.size);  // NaN where nothing is written
        const int64_t head = capacity * layout.size;
        banks.push_back({memory[n].data(), held[n] * head, head, layout.size, widths[n]});
        for (int64_t b = 0; b < c.batch; ++b) {
            for (int64_t h = 0; h < held[n]; ++h) {
                for (int64_t i = 0; i < counts[b * columns + 2 + static_cast<int64_t>(n)]; ++i) {
                    layout.fill(memory[n].data() + b * banks[n].batch + h * head + i * layout.size, random);
                }
            }
        }
    }
    Buffer<uint8_t> query(c.batch * c.heads * c.queries * c.dim * size_of(type));
    Buffer<uint8_t> sink_key(pairs * c.sinks * c.dim * size_of(type)), sink_value(pairs * c.sinks * c.value_dim * size_of(type));
    Buffer<uint8_t> key(pairs * c.newest * c.dim * size_of(type)), value(pairs * c.newest * c.value_dim * size_of(type));
    for (Buffer<uint8_t>* x : {&query, &sink_key, &sink_value, &key, &value}) {
        for (int64_t i = 0; i < x->size / size_of(type); ++i) put(x->data(), type, i, random.normal());
    }
    for (int64_t pair = 0; pair < pairs; ++pair) {  // what is not used is not a number
        for (int64_t j = 0; j < c.newest - counts[pair / kv_heads * columns + 1]; ++j) {
            std::memset(key.data() + (pair * c.newest + j) * c.dim * size_of(type), 0xff, c.dim * size_of(type));
            std::memset(value.data() + (pair * c.newest + j) * c.value_dim * size_of(type), 0xff, c.value_dim * size_of(type));
        }
    }
    Buffer<uint8_t> routes(c.heads);
    Buffer<float> clip_row(c.heads), clip_absolute(c.heads), s_aux(c.heads);
    for (int64_t h = 0; h < c.heads; ++h) {
        routes[h] = static_cast<uint8_t>(h % 3);
        clip_row[h] = h % 2 ? 6.0f : std::numeric_limits<float>::infinity();
        clip_absolute[h] = 3, s_aux[h] = 1;
    }
    const float scaling = 1 / std::sqrt(static_cast<float>(c.dim));

    Buffer<double> truth(c.batch * c.heads * c.queries * c.value_dim), actual(truth.size);
    for (int64_t row = 0; row < c.batch * c.heads * c.queries; ++row) {
        const int64_t i = row % c.queries, h = row / c.queries % c.heads, b = row / c.queries / c.heads;
        const int64_t kv_head = h / (c.heads / kv_heads), pair = b * kv_heads + kv_head, n = places[2 * kv_head];
        const int64_t *count = counts.data() + b * columns, sinks = count[0], coded = 64 * count[2 + n];
        const int64_t keys = sinks + coded + count[1];
        const Layout& layout = layouts[n];
        const uint8_t* first = banks[n].data + b * banks[n].batch + places[2 * kv_head + 1] * banks[n].head;
        const auto number = [&](int64_t j, int64_t d, bool of_key) {
            const int64_t dim = of_key ? c.dim : c.value_dim, at = j - sinks, column = c.newest - keys + j;
            if (j < sinks) return get((of_key ? sink_key : sink_value).data(), type, (pair * c.sinks + j) * dim + d);
            if (at >= coded) return get((of_key ? key : value).data(), type, (pair * c.newest + column) * dim + d);
            const uint8_t* record = first + at / 64 * layout.size;
            return of_key ? layout.key(record, at % 64, d) : layout.value(record, at % 64, d);
        };
        std::vector<double> out(c.value_dim), weight(keys);
        double top = -std::numeric_limits<double>::infinity(), total = 0;
        for (int64_t j = 0; j < keys; ++j) {
            double s = 0;
            for (int64_t d = 0; d < c.dim; ++d) s += number(j, d, true) * get(query.data(), type, row * c.dim + d);
            s *= scaling;
            if (c.limited) s = std::fmin(std::fmax(std::tanh(s / 5) * 5, -3.0), 3.0);
            weight[j] = j < sinks + coded || j <= i + keys - c.queries ? s : -std::numeric_limits<double>::infinity();
            top = std::fmax(top, weight[j]);
        }
        for (int64_t j = 0; j < keys; ++j) {
            if (weight[j] == -std::numeric_limits<double>::infinity() || (c.limited && weight[j] < top - clip_row[h])) continue;
            const double p = std::exp(weight[j] - top);
            total += p;
            for (int64_t d = 0; d < c.value_dim; ++d) out[d] += p * number(j, d, false);
        }
        if (c.limited) total += std::exp(s_aux[h] - top);
        for (int64_t d = 0; d < c.value_dim; ++d) truth[row * c.value_dim + d] = total > 0 ? out[d] / total : 0;
    }

    for (const char* set : sets) {
        select_kernels(set);
        for (int threads = 1; threads <= 3; ++threads) {
            const Buffer<uint8_t> out(truth.size * size_of(type));
            CodedArgs a{};
            a.batch = c.batch, a.heads = c.heads, a.kv_heads = kv_heads, a.queries = c.queries;
            a.head_dim = c.dim, a.value_dim = c.value_dim, a.type = type;
            a.sinks = c.sinks, a.newest = c.newest;
            a.query = {query.data(), c.heads * c.queries * c.dim, c.queries * c.dim, c.dim};
            a.sink_key = {sink_key.data(), kv_heads * c.sinks * c.dim, c.sinks * c.dim, c.dim};
            a.sink_value = {sink_value.data(), kv_heads * c.sinks * c.value_dim, c.sinks * c.value_dim, c.value_dim};
            a.key = {key.data(), kv_heads * c.newest * c.dim, c.newest * c.dim, c.dim};
            a.value = {value.data(), kv_heads * c.newest * c.value_dim, c.newest * c.value_dim, c.value_dim};
            a.out = out.data();
            a.out_view = {out.data(), c.heads * c.queries * c.value_dim, c.queries * c.value_dim, c.value_dim};
            a.routes = routes.data();
            if (c.limited) {
                a.clip_row = clip_row.data(), a.clip_absolute = clip_absolute.data(), a.s_aux = s_aux.data();
                a.softcap = 5;
            }
            a.scaling = scaling, a.threads = threads, a.poison = true;
            a.banks = banks.data(), a.bank_count = static_cast<int64_t>(banks.size());
            a.places = places.data(), a.counts = counts.data();
            kernels().attention.coded(a);
            for (int64_t i = 0; i < actual.size; ++i) actual[i] = get(out.data(), type, i);
            const std::string what = std::string(set) + " coded attention, " + std::to_string(c.bits[0]) + " bits, D" +
                                     std::to_string(c.dim) + " Lq" + std::to_string(c.queries) + " blocks " +
                                     std::to_string(c.blocks) + (c.limited ? " limited" : "");
            expect_close(what, actual, truth, 0.02);
        }
    }
}

}  // namespace

int test_coded(const std::vector<const char*>& sets) {
    std::vector<Case> cases;
    for (const int bits : {8, 4, 3, 2}) {
        for (const bool limited : {false, true}) {
            cases.push_back({{bits, bits}, 2, 6, 1, 2, 5, 1, 64, 64, limited});
            cases.push_back({{bits}, 1, 3, 8, 1, 67, 4, 40, 80, limited});
            cases.push_back({{bits, 8, bits}, 3, 3, 3, 3, 4, 0, 8, 16, limited});
        }
        cases.push_back({{bits, 4, 2}, 1, 3, 1, 1, 2, 2, 256, 144});
        cases.push_back({{bits}, 1, 40, 2, 2, 2, 1, 80, 64});     // more rows than a tile
        cases.push_back({{bits}, 1, 3, 1, 0, 70, 1, 64, 64});     // no codes yet
        cases.push_back({{bits}, 1, 3, 1, 40, 70, 1, 64, 64});    // shared out among the threads
        cases.push_back({{bits}, 2, 3, 70, 1, 90, 1, 16, 16});    // queries that see none of the newest
    }
    for (const Case& c : cases) {
        check(c, Type::f32, sets);
        check(c, Type::bf16, sets);
    }
    return static_cast<int>(cases.size());
}

}  // namespace quantsink
