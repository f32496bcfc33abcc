// Addresses and sizes come as integers: converting a dozen tensors would cost more than a small layer does.
#include <nanobind/nanobind.h>

#include "kernels.h"

namespace nb = nanobind;
using namespace quantsink;

void bind_linear(nb::module_& m) {
    m.def(
        "linear",
        [](uintptr_t x, int64_t x_stride, int type, int64_t rows, int64_t n, int64_t k, uintptr_t weight,
           uintptr_t weight_scale, int native_type, uintptr_t bias, uintptr_t columns, uintptr_t column_index, int64_t c,
           int inputs, uintptr_t input_scale, uintptr_t sink_scale, uintptr_t sinks, int64_t s, uintptr_t out,
           int threads) {
            LinearArgs a;
            a.x = (const void*)x;
            a.x_stride = x_stride;
            a.type = (Type)type;
            a.m = rows;
            a.n = n;
            a.k = k;
            a.weight = (const int8_t*)weight;
            a.weight_scale = (const float*)weight_scale;
            a.native_type = (Type)native_type;
            a.bias = (const void*)bias;
            a.columns = (const void*)columns;
            a.column_index = (const int32_t*)column_index;
            a.c = c;
            a.inputs = (Inputs)inputs;
            a.input_scale = (const float*)input_scale;
            a.sink_scale = (const float*)sink_scale;
            a.sinks = (const int64_t*)sinks;
            a.s = s;
            a.out = (void*)out;
            a.threads = threads;
            nb::gil_scoped_release unlocked;
            return kernels().linear.linear(a);
        },
        "One quantized linear layer; see linear.h. False where memory ran out.");
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
