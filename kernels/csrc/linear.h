// A quantized linear layer on plain memory: what the kernels of every instruction set take. No Python, no torch.
#pragma once

#include <cstdint>

#include "type.h"

namespace quantsink {

enum class Inputs : int { native = 0, per_token = 1, fixed = 2 };

// One layer of N outputs. `weight` is [N, K] row-major int8 with zeros at the C native columns.
struct LinearLayer {
    int64_t n;
    const int8_t* weight;
    const float* weight_scale;  // [N]
    Type native_type;           // of bias and columns
    const void* bias;           // [N] or null
    const void* columns;        // [N, C]
    void* out;                  // [M, N], dense, in the type of x
};

// y = x W^T of M rows and K inputs, for layers that read the same rows as the same codes.
struct LinearArgs {
    const void* x;  // [M, K], rows `x_stride` elements apart
    int64_t x_stride;
    Type type;  // of x and the outputs
    int64_t m, k;
    const LinearLayer* layers;
    int64_t count;
    const int32_t* column_index;  // [C]
    int64_t c;
    Inputs inputs;
    const float* input_scale;  // [1], where inputs are fixed
    const float* sink_scale;   // [1]: sink rows take this scale; null: they are multiplied unquantized
    const int64_t* sinks;      // [S] rows of sink tokens
    int64_t s;
    int threads;
};

struct QuantizeArgs {
    const void* x;  // [M, K], rows `x_stride` elements apart
    int64_t x_stride;
    Type type;
    int64_t m, k;
    int8_t* codes;  // [M, K], dense
    float* scale;   // [M]
    int threads;
};

struct LinearKernels {
    // False where memory ran out.
    bool (*linear)(const LinearArgs&);
    bool (*quantize)(const QuantizeArgs&);
};

}  // namespace quantsink
