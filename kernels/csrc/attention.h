// Mixed-route attention on plain memory: what the kernels of every instruction set take. No Python, no torch.
#pragma once

#include <cstdint>

#include "type.h"

namespace quantsink {

// Routes, as in quantsink.kernels.Route.
constexpr uint8_t kInt8 = 0, kSink = 1, kNative = 2;

// A tensor [batch, heads, tokens, channels] by strides in elements; the last one is 1.
struct View {
    const void* data;
    int64_t batch, head, token;
};

// Boolean [batch or 1, 1, queries, keys] by strides in bytes, the last one 1; null data: none.
struct MaskView {
    const uint8_t* data;
    int64_t batch, query;
};

// What both operators share. Null pointers: none.
struct Common {
    int64_t batch, heads, kv_heads, queries, head_dim, value_dim;
    Type type;               // of query, key, value and out
    View query;
    void* out;               // by the strides of out_view
    View out_view;
    MaskView mask;
    const uint8_t* routes;   // [heads]
    const float* clip_row;   // [heads], inf = off
    const float* clip_absolute;
    const float* s_aux;
    float scaling;
    float softcap;           // 0 = off
    int threads;
    bool poison;             // fill workspaces with NaN first (tests)
};

// quantsink::sink_attention with weight_scale "block" and block 64.
struct AttentionArgs : Common {
    int64_t keys;
    View key, value;
    const float* key_mean;      // [kv_heads, head_dim]
    const int64_t* sink_start;  // [batch]
    int64_t sink_size;
    bool causal;
};

// quantsink::coded_attention: keys in the order sinks (exact), blocks of 64 (codes), the newest (exact).
struct CodedArgs : Common {
    int64_t blocks, exact, sinks;  // exact: sinks and newest together
    int bits;                      // 8 or 4
    View exact_key, exact_value;   // [batch, kv_heads, exact, dim]
    // Dense, [batch, kv_heads, blocks, ...]: the cells of coded.h, then float16 scales and zero points.
    const uint8_t* key_codes;
    const uint16_t* key_scale;     // [head_dim]
    const uint16_t* key_zero;
    const uint8_t* value_codes;
    const uint16_t* value_scale;   // [channel groups of 64][64 keys]
    const uint16_t* value_zero;
    bool causal;
};

struct AttentionKernels {
    void (*attention)(const AttentionArgs&);
    void (*coded)(const CodedArgs&);
};

}  // namespace quantsink
