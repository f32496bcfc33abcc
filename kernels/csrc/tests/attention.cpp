// quantsink::sink_attention against the formula in double: every path, odd sizes and strides, exactly sized memory.
#include <algorithm>
#include <limits>
#include <vector>

#include "../kernels.h"
#include "check.h"

namespace quantsink {
namespace {

constexpr double kNone = std::numeric_limits<double>::infinity();
constexpr int kBlock = 64;

enum class Mask { none, window, random, shared };

struct Case {
    int64_t batch, heads, kv_heads, queries, keys, dim, value_dim;
    const char* routes;  // one digit a head, repeated
    Mask mask = Mask::none;
    int64_t sink_size = 1;
    bool causal = true;
    bool started = false;  // sink_start is given: left padding, none, sinks that have left a cache
    bool limited = false;  // soft-cap, clips and learned sinks
    bool transposed = false;  // memory [B, L, H, D]
};

// One tensor [batch, heads, tokens, channels] in memory that ends with its last element.
struct Tensor {
    Tensor(Type type, int64_t batch, int64_t heads, int64_t tokens, int64_t channels, bool transposed)
        : type(type), memory(batch * heads * tokens * channels * size_of(type)) {
        view = {memory.data(), heads * tokens * channels, tokens * channels, channels};
        if (transposed) view.head = channels, view.token = heads * channels;
    }
    int64_t at(int64_t b, int64_t h, int64_t l, int64_t d) const { return b * view.batch + h * view.head + l * view.token + d; }
    double operator()(int64_t b, int64_t h, int64_t l, int64_t d) const { return get(memory.data(), type, at(b, h, l, d)); }

    Type type;
    Buffer<uint8_t> memory;
    View view;
};

struct Problem {
    Problem(const Case& c, Type type)
        : c(c), query(type, c.batch, c.heads, c.queries, c.dim, c.transposed),
          key(type, c.batch, c.kv_heads, c.keys, c.dim, c.transposed),
          value(type, c.batch, c.kv_heads, c.keys, c.value_dim, c.transposed), mean(c.kv_heads * c.dim), routes(c.heads),
          start(c.batch), clip_row(c.heads), clip_absolute(c.heads), s_aux(c.heads),
          mask_batches(c.mask == Mask::none ? 0 : c.mask == Mask::random ? c.batch : 1), mask_stride(c.keys + 3),
          mask(mask_batches ? (mask_batches * c.queries - 1) * mask_stride + c.keys : 0) {
        Random random(static_cast<uint32_t>(c.heads * 1000 + c.keys * 10 + c.dim + c.queries));
        for (int64_t h = 0; h < c.heads; ++h) {
            routes[h] = static_cast<uint8_t>(c.routes[h % static_cast<int64_t>(std::strlen(c.routes))] - '0');
            clip_row[h] = h % 2 ? std::numeric_limits<float>::infinity() : 3.0f;
            clip_absolute[h] = h % 3 ? 4.0f : std::numeric_limits<float>::infinity();
            s_aux[h] = 0.5f * static_cast<float>(h) - 1;
        }
        for (int64_t i = 0; i < mean.size; ++i) mean[i] = static_cast<float>(random.normal());
        for (const Tensor* x : {&query, &key, &value}) {
            for (int64_t i = 0; i < x->memory.size / size_of(type); ++i) put(x->memory.data(), type, i, random.normal());
        }
        for (int64_t b = 0; b < c.batch; ++b) start[b] = b % 3 == 0 ? smaller(5, c.keys - 1) : b % 3 == 1 ? 0 : -2;
        for (int64_t i = 0; i < mask.size; ++i) mask[i] = random.below(2) ? 255 : 0;
        for (int64_t i = 0; c.mask == Mask::window && i < c.queries; ++i) {
            const int64_t last = i + c.keys - c.queries;
            for (int64_t j = 0; j < c.keys; ++j) mask[i * mask_stride + j] = j <= last && j > last - 20;
        }
        // A row that sees nothing.
        if (c.mask == Mask::random) std::memset(mask.data(), 0, c.keys);
    }

    static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

    int64_t first(int64_t b) const { return c.started && start[b] > 0 ? start[b] : 0; }

    bool visible(int64_t b, int64_t i, int64_t j) const {
        if (j < first(b)) return false;
        if (mask.size) return mask[((mask_batches > 1 ? b : 0) * c.queries + i) * mask_stride + j] != 0;
        return !c.causal || j <= i + c.keys - c.queries;
    }

    int64_t sinks(int64_t b, int64_t h) const {
        if (routes[h] == kNative) return c.keys - first(b);
        if (routes[h] == kInt8) return 0;
        const int64_t left = c.started && start[b] < 0 ? c.sink_size + start[b] : c.sink_size;
        return std::clamp<int64_t>(left, 0, c.keys - first(b));
    }

    AttentionArgs arguments(const Tensor& out, int threads) const {
        AttentionArgs a{};
        a.batch = c.batch, a.heads = c.heads, a.kv_heads = c.kv_heads, a.queries = c.queries, a.keys = c.keys;
        a.head_dim = c.dim, a.value_dim = c.value_dim, a.type = query.type;
        a.query = query.view, a.key = key.view, a.value = value.view;
        a.out = out.memory.data(), a.out_view = out.view;
        if (mask.size) a.mask = {mask.data(), mask_batches > 1 ? c.queries * mask_stride : 0, mask_stride};
        a.routes = routes.data(), a.key_mean = mean.data();
        a.sink_start = c.started ? start.data() : nullptr;
        a.clip_row = c.limited ? clip_row.data() : nullptr;
        a.clip_absolute = c.limited ? clip_absolute.data() : nullptr;
        a.s_aux = c.limited ? s_aux.data() : nullptr;
        a.scaling = scaling(), a.softcap = c.limited ? 5.0f : 0.0f;
        a.sink_size = c.sink_size, a.causal = c.causal, a.threads = threads, a.poison = true;
        return a;
    }

    float scaling() const { return 1 / std::sqrt(static_cast<float>(c.dim)); }

    const Case c;
    Tensor query, key, value;
    Buffer<float> mean;
    Buffer<uint8_t> routes;
    Buffer<int64_t> start;
    Buffer<float> clip_row, clip_absolute, s_aux;
    int64_t mask_batches, mask_stride;
    Buffer<uint8_t> mask;
};

// The nearest multiples of max|x| / 127.
std::vector<double> rounded(std::vector<double> x) {
    double top = 0;
    for (double v : x) top = std::max(top, std::fabs(v));
    const double scale = top == 0 ? 1 : top / 127;
    for (double& v : x) v = std::nearbyint(v / scale) * scale;
    return x;
}

double dot(const std::vector<double>& x, const std::vector<double>& y) {
    double sum = 0;
    for (size_t i = 0; i < x.size(); ++i) sum += x[i] * y[i];
    return sum;
}

using Rows = std::vector<std::vector<double>>;

// One head: what its keys and values are where each is exact, and where it is in 8 bits.
struct Head {
    Rows key, key_8, value, value_8;

    Head(const Problem& p, int64_t b, int64_t h) {
        const Case& c = p.c;
        const int64_t group = h / (c.heads / c.kv_heads), first = p.first(b), keys = c.keys - first;
        const int64_t sinks = p.sinks(b, h);
        for (int64_t j = 0; j < keys; ++j) {
            bool seen = false;
            for (int64_t i = 0; i < c.queries; ++i) seen |= p.visible(b, i, first + j);
            std::vector<double> k, centred, v;
            for (int64_t d = 0; d < c.dim; ++d) {
                k.push_back(seen ? p.key(b, group, first + j, d) : 0);
                centred.push_back(k.back() - p.mean[group * c.dim + d]);
            }
            for (int64_t d = 0; d < c.value_dim; ++d) v.push_back(seen ? p.value(b, group, first + j, d) : 0);
            key.push_back(k);
            key_8.push_back(rounded(centred));
            value.push_back(v);
        }
        value_8 = value;
        for (int64_t d = 0; d < c.value_dim; ++d) {
            for (int64_t n = 0; n < keys; n += kBlock) {
                std::vector<double> column;
                for (int64_t j = n; j < std::min(n + kBlock, keys); ++j) column.push_back(j < sinks ? 0 : value[j][d]);
                column = rounded(column);
                for (size_t j = 0; j < column.size(); ++j) value_8[n + j][d] = column[j];
            }
        }
    }
};

void formula(const Problem& p, int64_t b, int64_t h, const Head& head, int64_t i, double* out) {
    const Case& c = p.c;
    const int64_t group = h / (c.heads / c.kv_heads), first = p.first(b), keys = c.keys - first, sinks = p.sinks(b, h);
    std::vector<double> q, mean(p.mean.data() + group * c.dim, p.mean.data() + (group + 1) * c.dim);
    for (int64_t d = 0; d < c.dim; ++d) q.push_back(p.query(b, h, i, d));
    const std::vector<double> q_8 = rounded(q);
    std::vector<double> s(keys, -kNone);
    double top = -kNone;
    for (int64_t j = 0; j < keys; ++j) {
        if (!p.visible(b, i, first + j)) continue;
        s[j] = (j < sinks ? dot(q, head.key[j]) : dot(q_8, head.key_8[j]) + dot(q, mean)) * p.scaling();
        if (c.limited) {
            s[j] = std::tanh(s[j] / 5) * 5;
            s[j] = std::clamp<double>(s[j], -p.clip_absolute[h], p.clip_absolute[h]);
        }
        top = std::max(top, s[j]);
    }
    std::fill(out, out + c.value_dim, 0);
    if (top == -kNone) return;
    double total = c.limited ? std::exp(p.s_aux[h] - top) : 0;
    for (int64_t n = 0; n < keys; n += kBlock) {
        double most = -kNone;
        for (int64_t j = n; j < std::min(n + kBlock, keys); ++j) {
            if (c.limited && s[j] < top - p.clip_row[h]) s[j] = -kNone;
            if (j >= sinks) most = std::max(most, s[j]);
        }
        for (int64_t j = n; j < std::min(n + kBlock, keys); ++j) {
            if (s[j] == -kNone) continue;
            const double weight = std::exp(s[j] - top), step = std::exp(most - top) / 127;
            total += weight;
            const double used = j < sinks ? weight : std::nearbyint(weight / step) * step;
            for (int64_t d = 0; d < c.value_dim; ++d) out[d] += used * (j < sinks ? head.value[j][d] : head.value_8[j][d]);
        }
    }
    for (int64_t d = 0; d < c.value_dim; ++d) out[d] /= total;
}

std::string describe(const Case& c, Type type) {
    char text[160];
    std::snprintf(text, sizeof text, "%s attention B%d H%d/%d Lq%d Lk%d D%d/%d routes %s mask %d%s%s%s %s", kernels().name,
                  static_cast<int>(c.batch), static_cast<int>(c.heads), static_cast<int>(c.kv_heads),
                  static_cast<int>(c.queries), static_cast<int>(c.keys), static_cast<int>(c.dim),
                  static_cast<int>(c.value_dim), c.routes, static_cast<int>(c.mask), c.started ? " started" : "",
                  c.limited ? " limited" : "", c.transposed ? " transposed" : "", type == Type::f32 ? "float32" : "bfloat16");
    return text;
}

void check(const Case& c, Type type, const std::vector<const char*>& sets) {
    const Problem p(c, type);
    const int64_t rows = c.batch * c.heads * c.queries;
    Buffer<double> truth(rows * c.value_dim), actual(rows * c.value_dim);
    for (int64_t b = 0; b < c.batch; ++b) {
        for (int64_t h = 0; h < c.heads; ++h) {
            const Head head(p, b, h);
            for (int64_t i = 0; i < c.queries; ++i) {
                formula(p, b, h, head, i, truth.data() + ((b * c.heads + h) * c.queries + i) * c.value_dim);
            }
        }
    }
    for (const char* set : sets) {
        select_kernels(set);
        for (int threads = 1; threads <= 3; ++threads) {
            const Tensor out(type, c.batch, c.heads, c.queries, c.value_dim, true);
            kernels().attention.attention(p.arguments(out, threads));
            int64_t n = 0;
            for (int64_t b = 0; b < c.batch; ++b) {
                for (int64_t h = 0; h < c.heads; ++h) {
                    for (int64_t i = 0; i < c.queries; ++i) {
                        for (int64_t d = 0; d < c.value_dim; ++d) actual[n++] = out(b, h, i, d);
                    }
                }
            }
            expect_close(describe(c, type), actual, truth, type == Type::f32 ? 1e-3 : 5e-3);
        }
    }
}

}  // namespace

int test_attention(const std::vector<const char*>& sets) {
    std::vector<Case> cases = {
        // Prefill: tails of rows, blocks and channels.
        {1, 3, 1, 70, 70, 64, 64, "012"},
        {3, 6, 2, 65, 65, 20, 20, "0121"},
        {1, 3, 3, 33, 130, 80, 96, "210"},
        {1, 2, 1, 17, 63, 1, 1, "01"},
        {1, 2, 2, 64, 64, 36, 7, "12"},
        {1, 1, 1, 40, 40, 128, 128, "0"},
        {1, 1, 1, 40, 40, 128, 128, "2"},
        {1, 1, 1, 40, 200, 256, 256, "1"},
        {1, 1, 1, 70, 20, 16, 16, "1"},  // more queries than keys
        // Few queries.
        {1, 1, 1, 1, 1, 64, 64, "0"},
        {1, 6, 2, 1, 65, 64, 64, "012"},
        {3, 4, 2, 8, 63, 30, 50, "0212"},
        {1, 40, 1, 2, 70, 20, 20, "012"},  // more rows than a tile
        {2, 3, 1, 16, 130, 96, 96, "211"},
        // Few queries over keys enough to be shared out among the threads.
        {1, 9, 1, 1, 2100, 64, 64, "012"},
        {2, 4, 1, 3, 1030, 33, 47, "0122"},
    };
    const size_t plain = cases.size();
    for (const Mask mask : {Mask::none, Mask::window, Mask::random, Mask::shared}) {
        for (const bool started : {false, true}) {
            for (const bool limited : {false, true}) {
                for (const int64_t queries : {37, 3}) {
                    Case c{3, 3, 1, queries, 131, 20, 20, "012", mask, limited ? 70 : 4};
                    c.causal = !limited;
                    c.started = started, c.limited = limited, c.transposed = started;
                    cases.push_back(c);
                }
            }
        }
    }
    for (size_t i = 0; i < plain; ++i) {
        Case c = cases[i];
        c.transposed = true;
        cases.push_back(c);
    }
    for (const Case& c : cases) {
        check(c, Type::f32, sets);
        check(c, Type::bf16, sets);
    }
    return static_cast<int>(cases.size());
}

}  // namespace quantsink
