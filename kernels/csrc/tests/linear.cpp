// The quantized linear layer against exact integer sums, in exactly sized memory.
#include <algorithm>
#include <vector>

#include "../kernels.h"
#include "check.h"

namespace quantsink {
namespace {

struct Case {
    int64_t m, n, k, native;
    Inputs inputs;
    int sinks;         // rows of sink tokens
    bool sink_scaled;  // they have a scale of their own; otherwise they are multiplied unquantized
    int64_t gap = 0;   // between the rows of x
};

float scale_of(const std::vector<float>& row) {
    float top = 0;
    for (float v : row) top = std::max(top, std::fabs(v));
    return top == 0 ? 1 : top / 127;
}

double code(float x, float scale) { return std::clamp(std::nearbyint(static_cast<double>(x / scale)), -127.0, 127.0); }

void check(const Case& c, Type type, const std::vector<const char*>& sets) {
    Random random(static_cast<uint32_t>(c.m * 7 + c.n * 5 + c.k * 3 + c.native));
    const int64_t stride = c.k + c.gap;
    Buffer<uint8_t> x(((c.m - 1) * stride + c.k) * size_of(type)), bias(c.n * size_of(type));
    Buffer<uint8_t> columns(c.n * c.native * size_of(type));
    Buffer<int8_t> weight(c.n * c.k);
    Buffer<float> weight_scale(c.n), input_scale(1), sink_scale(1);
    Buffer<int32_t> index(c.native);
    Buffer<int64_t> sinks(c.sinks);
    for (int64_t i = 0; i < x.size / size_of(type); ++i) put(x.data(), type, i, random.normal());
    for (int64_t i = 0; i < c.n; ++i) put(bias.data(), type, i, random.normal());
    for (int64_t i = 0; i < c.n * c.native; ++i) put(columns.data(), type, i, random.normal());
    for (int64_t i = 0; i < weight.size; ++i) weight[i] = static_cast<int8_t>(random.below(255) - 127);
    for (int64_t i = 0; i < c.n; ++i) weight_scale[i] = 0.001f + 0.0001f * static_cast<float>(random.below(100));
    for (int64_t i = 0; i < c.native; ++i) {
        index[i] = static_cast<int32_t>(i * c.k / c.native);
        for (int64_t n = 0; n < c.n; ++n) weight[n * c.k + index[i]] = 0;
    }
    for (int i = 0; i < c.sinks; ++i) sinks[i] = i * c.m / c.sinks;
    input_scale[0] = 0.02f, sink_scale[0] = 0.05f;

    Buffer<double> truth(c.m * c.n), actual(c.m * c.n);
    for (int64_t m = 0; m < c.m; ++m) {
        std::vector<float> row, given;
        for (int64_t k = 0; k < c.k; ++k) row.push_back(static_cast<float>(get(x.data(), type, m * stride + k)));
        given = row;
        for (int64_t i = 0; i < c.native; ++i) row[index[i]] = 0;
        const bool sink = std::find(sinks.data(), sinks.data() + c.sinks, m) != sinks.data() + c.sinks;
        const bool as_is = c.inputs == Inputs::native || (sink && !c.sink_scaled);
        const float fixed = sink ? sink_scale[0] : input_scale[0];
        const float scale = c.inputs == Inputs::per_token ? scale_of(row) : fixed;
        for (int64_t n = 0; n < c.n; ++n) {
            double sum = 0;
            for (int64_t k = 0; k < c.k; ++k) {
                sum += (as_is ? row[k] : code(row[k], scale) * scale) * weight[n * c.k + k];
            }
            sum = sum * weight_scale[n] + get(bias.data(), type, n);
            for (int64_t i = 0; i < c.native; ++i) sum += given[index[i]] * get(columns.data(), type, n * c.native + i);
            truth[m * c.n + n] = sum;
        }
    }
    for (const char* set : sets) {
        select_kernels(set);
        const std::string what = std::string(set) + " linear M" + std::to_string(c.m) + " N" + std::to_string(c.n) + " K" +
                                 std::to_string(c.k) + " native " + std::to_string(c.native) + " inputs " +
                                 std::to_string(static_cast<int>(c.inputs)) + " sinks " + std::to_string(c.sinks) +
                                 " type " + std::to_string(static_cast<int>(type));
        for (int threads = 1; threads <= 3; ++threads) {
            // As one layer, then cut into several that are computed together.
            const int64_t cuts[] = {c.n, c.n / 2, c.n / 3};
            std::vector<LinearLayer> layers;
            std::vector<Buffer<uint8_t>> outs;
            for (int64_t from = 0, count; from < c.n; from += count) {
                count = std::min(std::max<int64_t>(cuts[threads - 1], 1), c.n - from);
                outs.emplace_back(c.m * count * size_of(type));
                const int64_t size = size_of(type);
                layers.push_back({count, weight.data() + from * c.k, weight_scale.data() + from, type, bias.data() + from * size,
                                  columns.data() + from * c.native * size, outs.back().data()});
            }
            LinearArgs a{};
            a.x = x.data(), a.x_stride = stride, a.type = type, a.m = c.m, a.k = c.k;
            a.layers = layers.data(), a.count = static_cast<int64_t>(layers.size());
            a.column_index = index.data(), a.c = c.native, a.inputs = c.inputs, a.input_scale = input_scale.data();
            a.sink_scale = c.sink_scaled ? sink_scale.data() : nullptr;
            a.sinks = sinks.data(), a.s = c.sinks, a.threads = threads;
            if (!kernels().linear.linear(a)) fail(what, "no memory");
            for (int64_t m = 0, from = 0; m < c.m; ++m, from = 0) {
                for (const LinearLayer& layer : layers) {
                    for (int64_t n = 0; n < layer.n; ++n) actual[m * c.n + from + n] = get(layer.out, type, m * layer.n + n);
                    from += layer.n;
                }
            }
            expect_close(what, actual, truth, type == Type::f32 ? 1e-5 : type == Type::bf16 ? 4e-3 : 1e-3);
        }
        const Buffer<int8_t> codes(c.m * c.k);
        const Buffer<float> scale(c.m);
        QuantizeArgs q{x.data(), stride, type, c.m, c.k, codes.data(), scale.data(), 2};
        if (!kernels().linear.quantize(q)) fail(what, "no memory");
        for (int64_t m = 0; m < c.m; ++m) {
            for (int64_t k = 0; k < c.k; ++k) {
                const float given = static_cast<float>(get(x.data(), type, m * stride + k));
                if (codes[m * c.k + k] != code(given, scale[m])) fail(what, "a code is not the nearest");
            }
        }
    }
}

}  // namespace

int test_linear(const std::vector<const char*>& sets) {
    std::vector<Case> cases;
    const int64_t shapes[][3] = {{1, 1, 1}, {1, 50, 130}, {3, 97, 64}, {8, 48, 31}, {9, 49, 65}, {33, 100, 200}, {130, 16, 577}};
    for (const auto& [m, n, k] : shapes) {
        for (const int64_t native : {int64_t{0}, k < 3 ? int64_t{0} : int64_t{3}}) {
            cases.push_back({m, n, k, native, Inputs::native, 0, false});
            cases.push_back({m, n, k, native, Inputs::per_token, 0, false, 5});
            cases.push_back({m, n, k, native, Inputs::per_token, 1, false});
            cases.push_back({m, n, k, native, Inputs::fixed, 1, true, 1});
            cases.push_back({m, n, k, native, Inputs::fixed, m > 2 ? 2 : 1, false});
        }
    }
    // Large enough for several threads: panels shared out, and rows where there are few panels.
    cases.push_back({2, 4100, 512, 4, Inputs::per_token, 0, false});
    cases.push_back({200, 100, 1100, 4, Inputs::per_token, 3, false});
    for (const Case& c : cases) {
        for (const Type type : {Type::f32, Type::bf16, Type::f16}) check(c, type, sets);
    }
    return static_cast<int>(cases.size());
}

}  // namespace quantsink
