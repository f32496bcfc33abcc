// How many bytes the codes of a block take: kernels/python/coded_attention/codes.py describes the layout.
#pragma once

#include <cstdint>

namespace quantsink {

constexpr int64_t kRecordTokens = 64;
constexpr int64_t kGroup = 64;  // channels that share a value's scale

inline int64_t byte_rows(int64_t cells, int64_t plane) { return (cells * plane + 7) / 8; }
inline int64_t code_bytes(int64_t cells, int64_t columns, int64_t bits) {
    return (bits == 3 ? byte_rows(cells, 2) + byte_rows(cells, 1) : byte_rows(cells, bits)) * columns * 4;
}

// 0 for bits or head sizes without a layout.
inline int64_t record_bytes(int64_t bits, int64_t head_dim, int64_t value_dim) {
    if ((bits != 8 && bits != 4 && bits != 3 && bits != 2) || head_dim % 8 || value_dim % 16) return 0;
    const int64_t groups = (value_dim + kGroup - 1) / kGroup;
    const int64_t keys = code_bytes(head_dim / 4, kRecordTokens, bits) + 4 * head_dim;
    return keys + code_bytes(kRecordTokens / 4, value_dim, bits) + 4 * groups * kRecordTokens;
}

}  // namespace quantsink
