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

// Blocks of 64 tokens as codes, [batch, heads of one width, blocks] by strides in bytes: the records of codes.py.
struct Bank {
    const uint8_t* data;
    int64_t batch, head, block;
    int bits;  // 8, 4, 3 or 2
};

// quantsink::coded_attention: sinks (exact) and blocks (codes), which every query sees, then the newest (exact), of which
// query i sees columns up to newest - queries + i. The mask of Common is not read.
struct CodedArgs : Common {
    int64_t sinks, newest;        // columns of the exact keys; the newest stand at the end of theirs
    View sink_key, sink_value;    // [batch, kv_heads, sinks, dim]
    View key, value;              // [batch, kv_heads, newest, dim]
    const Bank* banks;
    int64_t bank_count;
    const int64_t* places;        // [kv_heads][2]: bank, and head within it
    const int64_t* counts;        // [batch][2 + bank_count]: used sinks, newest, and blocks of each bank
};

struct AttentionKernels {
    void (*attention)(const AttentionArgs&);
    void (*coded)(const CodedArgs&);
};

}  // namespace quantsink
