// quantsink::coded_attention on random codes against plain attention over what they stand for: every path that reads
// codes in place, in exactly sized memory. Its precision is tests/kernels/test_coded_attention.py's affair.
#include <limits>
#include <vector>

#include "../kernels.h"
#include "check.h"

namespace quantsink {
namespace {

struct Case {
    int bits;
    int64_t batch, heads, kv_heads, queries, blocks, exact, sinks, dim, value_dim;
    bool masked = false, limited = false;
};

// Codes and their scales for `count` blocks of `rows` x `columns`; one scale for each of `scales`.
struct Codes {
    Codes(int bits, int64_t count, int64_t rows, int64_t columns, int64_t scales, Random& random)
        : bits(bits), bytes(rows * columns * bits / 8), columns(columns), scales(scales), cells(count * bytes),
          scale(count * scales), zero(count * scales) {
        for (int64_t i = 0; i < cells.size; ++i) cells[i] = static_cast<uint8_t>(random.below(256));
        for (int64_t i = 0; i < scale.size; ++i) {
            put(scale.data(), Type::f16, i, (1 + 0.1 * random.below(10)) / (bits == 8 ? 64 : 4));
            put(zero.data(), Type::f16, i, -2 + 0.1 * random.below(10));
        }
    }
    // Row and column of block n, under scale number s.
    double operator()(int64_t n, int64_t row, int64_t column, int64_t s) const {
        const int64_t group = row / 4, cell = bits == 8 ? group : group / 2;
        int code = cells[n * bytes + (cell * columns + column) * 4 + row % 4];
        if (bits == 4) code = group % 2 ? code >> 4 : code & 15;
        return get(zero.data(), Type::f16, n * scales + s) + get(scale.data(), Type::f16, n * scales + s) * code;
    }

    int bits;
    int64_t bytes, columns, scales;
    Buffer<uint8_t> cells;
    Buffer<uint16_t> scale, zero;
};

void check(const Case& c, Type type, const std::vector<const char*>& sets) {
    Random random(static_cast<uint32_t>(c.bits * 100 + c.heads * 10 + c.dim + c.queries));
    const int64_t keys = c.exact + c.blocks * 64, pairs = c.batch * c.kv_heads, groups = (c.value_dim + 63) / 64;
    const Codes key_codes(c.bits, pairs * c.blocks, c.dim, 64, c.dim, random);
    const Codes value_codes(c.bits, pairs * c.blocks, 64, c.value_dim, groups * 64, random);
    Buffer<uint8_t> query(c.batch * c.heads * c.queries * c.dim * size_of(type));
    Buffer<uint8_t> key(pairs * c.exact * c.dim * size_of(type)), value(pairs * c.exact * c.value_dim * size_of(type));
    for (Buffer<uint8_t>* x : {&query, &key, &value}) {
        for (int64_t i = 0; i < x->size / size_of(type); ++i) put(x->data(), type, i, random.normal());
    }
    const int64_t mask_stride = keys + 1;
    Buffer<uint8_t> mask(c.masked ? (c.batch * c.queries - 1) * mask_stride + keys : 0), routes(c.heads);
    for (int64_t i = 0; i < mask.size; ++i) mask[i] = random.below(4) != 0;
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
        const int64_t pair = b * c.kv_heads + h / (c.heads / c.kv_heads);
        std::vector<double> out(c.value_dim), weight(keys);
        double top = -std::numeric_limits<double>::infinity(), total = 0;
        for (int64_t j = 0; j < keys; ++j) {
            const int64_t coded = j - c.sinks, at = j < c.sinks ? j : j - c.blocks * 64;
            const bool exact = coded < 0 || coded >= c.blocks * 64;
            double s = 0;
            for (int64_t d = 0; d < c.dim; ++d) {
                const double k = exact ? get(key.data(), type, (pair * c.exact + at) * c.dim + d)
                                       : key_codes(pair * c.blocks + coded / 64, d, coded % 64, d);
                s += k * get(query.data(), type, row * c.dim + d);
            }
            s *= scaling;
            if (c.limited) s = std::fmin(std::fmax(std::tanh(s / 5) * 5, -3.0), 3.0);
            const bool seen = c.masked ? mask[(b * c.queries + i) * mask_stride + j] != 0 : j <= i + keys - c.queries;
            weight[j] = seen ? s : -std::numeric_limits<double>::infinity();
            top = std::fmax(top, weight[j]);
        }
        for (int64_t j = 0; j < keys; ++j) {
            const int64_t coded = j - c.sinks, at = j < c.sinks ? j : j - c.blocks * 64;
            const bool dropped = c.limited && weight[j] < top - clip_row[h];
            weight[j] = dropped ? 0 : std::exp(weight[j] - top);
            total += weight[j];
            for (int64_t d = 0; weight[j] > 0 && d < c.value_dim; ++d) {
                const bool exact = coded < 0 || coded >= c.blocks * 64;
                out[d] += weight[j] * (exact ? get(value.data(), type, (pair * c.exact + at) * c.value_dim + d)
                                             : value_codes(pair * c.blocks + coded / 64, coded % 64, d, d / 64 * 64 + coded % 64));
            }
        }
        if (c.limited) total += std::exp(s_aux[h] - top);
        for (int64_t d = 0; d < c.value_dim; ++d) truth[row * c.value_dim + d] = out[d] / total;
    }

    for (const char* set : sets) {
        select_kernels(set);
        for (int threads = 1; threads <= 3; ++threads) {
            const Buffer<uint8_t> out(truth.size * size_of(type));
            CodedArgs a{};
            a.batch = c.batch, a.heads = c.heads, a.kv_heads = c.kv_heads, a.queries = c.queries;
            a.head_dim = c.dim, a.value_dim = c.value_dim, a.type = type;
            a.query = {query.data(), c.heads * c.queries * c.dim, c.queries * c.dim, c.dim};
            a.exact_key = {key.data(), c.kv_heads * c.exact * c.dim, c.exact * c.dim, c.dim};
            a.exact_value = {value.data(), c.kv_heads * c.exact * c.value_dim, c.exact * c.value_dim, c.value_dim};
            a.out = out.data();
            a.out_view = {out.data(), c.heads * c.queries * c.value_dim, c.queries * c.value_dim, c.value_dim};
            if (c.masked) a.mask = {mask.data(), c.queries * mask_stride, mask_stride};
            a.routes = routes.data();
            if (c.limited) {
                a.clip_row = clip_row.data(), a.clip_absolute = clip_absolute.data(), a.s_aux = s_aux.data();
                a.softcap = 5;
            }
            a.scaling = scaling, a.threads = threads, a.poison = true, a.causal = true;
            a.blocks = c.blocks, a.exact = c.exact, a.sinks = c.sinks, a.bits = c.bits;
            a.key_codes = key_codes.cells.data(), a.key_scale = key_codes.scale.data(), a.key_zero = key_codes.zero.data();
            a.value_codes = value_codes.cells.data(), a.value_scale = value_codes.scale.data();
            a.value_zero = value_codes.zero.data();
            kernels().attention.coded(a);
            for (int64_t i = 0; i < actual.size; ++i) actual[i] = get(out.data(), type, i);
            const std::string what = std::string(set) + " coded attention, " + std::to_string(c.bits) + " bits, D" +
                                     std::to_string(c.dim) + " Lq" + std::to_string(c.queries) + " blocks " +
                                     std::to_string(c.blocks) + (c.masked ? " masked" : "") + (c.limited ? " limited" : "");
            expect_close(what, actual, truth, 0.02);
        }
    }
}

}  // namespace

int test_coded(const std::vector<const char*>& sets) {
    std::vector<Case> cases;
    for (const int bits : {8, 4}) {
        for (const bool other : {false, true}) {
            cases.push_back({bits, 2, 6, 2, 1, 2, 5, 1, 64, 64, other, other});
            cases.push_back({bits, 1, 3, 1, 8, 1, 67, 4, 40, 80, !other, other});
            cases.push_back({bits, 1, 3, 3, 3, 3, 1, 0, 8, 16, other, !other});
        }
        cases.push_back({bits, 1, 3, 3, 1, 1, 2, 2, 256, 144});
        cases.push_back({bits, 1, 40, 1, 2, 2, 1, 1, 64, 64});     // more rows than a tile
        cases.push_back({bits, 1, 3, 1, 1, 0, 70, 1, 64, 64});     // no codes yet
        cases.push_back({bits, 1, 3, 1, 1, 40, 70, 1, 64, 64});    // shared out among the threads
    }
    for (const Case& c : cases) {
        check(c, Type::f32, sets);
        check(c, Type::bf16, sets);
    }
    return static_cast<int>(cases.size());
}

}  // namespace quantsink
