// Addresses and sizes come as integers: converting a dozen tensors would cost more than a small layer does.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <new>
#include <vector>

#include "bind.h"

namespace nb = nanobind;
using namespace quantsink;

namespace {

// A layer's numbers as Python lists them.
enum Field { kOutputs, kWeight, kWeightScale, kNativeType, kBias, kColumns, kColumnIndex, kColumnCount, kInputScale, kSinkScale, kOut, kFields };
using Fields = std::array<int64_t, kFields>;

bool same(const float* a, const float* b) { return a == b || (a && b && *a == *b); }

// Whether two layers turn the same input into the same codes.
bool agree(const Fields& a, const Fields& b) {
    return a[kColumnCount] == b[kColumnCount] && same(pointer<float>(a[kInputScale]), pointer<float>(b[kInputScale])) &&
           same(pointer<float>(a[kSinkScale]), pointer<float>(b[kSinkScale])) &&
           std::equal(pointer<int32_t>(a[kColumnIndex]), pointer<int32_t>(a[kColumnIndex]) + a[kColumnCount],
                      pointer<int32_t>(b[kColumnIndex]));
}

// Whether the native columns are among the K inputs.
bool inside(const Fields& f, int64_t k) {
    const int32_t* index = pointer<int32_t>(f[kColumnIndex]);
    return std::all_of(index, index + f[kColumnCount], [&](int32_t at) { return at >= 0 && at < k; });
}

bool linear(uintptr_t x, int64_t x_stride, int type, int64_t rows, int64_t k, int inputs, uintptr_t sinks, int64_t s,
            const std::vector<Fields>& layers, int threads) {
    LinearArgs a{};
    a.x = (const void*)x, a.x_stride = x_stride, a.type = (Type)type, a.m = rows, a.k = k;
    a.inputs = (Inputs)inputs, a.sinks = (const int64_t*)sinks, a.s = s, a.threads = threads;
    if (!std::all_of(layers.begin(), layers.end(), [&](const Fields& f) { return inside(f, k); })) return false;
    nb::gil_scoped_release unlocked;
    for (size_t from = 0, to; from < layers.size(); from = to) {
        const Fields& first = layers[from];
        std::vector<LinearLayer> some;
        for (to = from; to < layers.size() && agree(first, layers[to]); ++to) {
            const Fields& f = layers[to];
            some.push_back({f[kOutputs], pointer<int8_t>(f[kWeight]), pointer<float>(f[kWeightScale]), (Type)f[kNativeType],
                            pointer<void>(f[kBias]), pointer<void>(f[kColumns]), (void*)f[kOut]});
        }
        a.layers = some.data(), a.count = static_cast<int64_t>(some.size());
        a.column_index = pointer<int32_t>(first[kColumnIndex]), a.c = first[kColumnCount];
        a.input_scale = pointer<float>(first[kInputScale]), a.sink_scale = pointer<float>(first[kSinkScale]);
        if (!kernels().linear.linear(a)) throw std::bad_alloc();
    }
    return true;
}

}  // namespace

void bind_linear(nb::module_& m) {
    m.def("linear", &linear,
          "Quantized linear layers of one input, which those that follow one another and agree on its codes read once; see "
          "linear.h. False where a native column lies outside.");
    m.def(
        "quantize",
        [](uintptr_t x, int64_t x_stride, int type, int64_t rows, int64_t k, uintptr_t codes, uintptr_t scale,
           int threads) {
            QuantizeArgs a;
            a.x = (const void*)x;
            a.x_stride = x_stride;
            a.type = (Type)type;
            a.m = rows;
            a.k = k;
            a.codes = (int8_t*)codes;
            a.scale = (float*)scale;
            a.threads = threads;
            nb::gil_scoped_release unlocked;
            return kernels().linear.quantize(a);
        },
        "INT8 codes and scales of each row. False where memory ran out.");
}
