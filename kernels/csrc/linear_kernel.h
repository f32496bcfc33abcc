// Included once per instruction set: everything here has internal linkage.
//
// Rows are quantized once, then panels of NR output channels are shared out among the threads. Many rows: a panel's
// weights are packed so that one vector holds a few inputs of many channels, and blocks of MR rows run over it. Few
// rows: the weights are read once as they lie. Both leave int32 sums of MR x NR in a tile; scales, native columns and
// bias are applied to it while it is in the first cache.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "linear.h"

namespace quantsink {
namespace {

// Padding of a row of codes, so that vectors of inputs need no tail on that side.
constexpr int64_t KPAD = 64;
constexpr int QMAX = 127;
// Below this estimate another thread costs more to wake than it saves.
constexpr int64_t SERIAL_US = 100;

inline int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }
inline void prefetch(const void* from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch((const char*)from + at, 0, 3);
}

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

inline int this_thread() {
#if defined(_OPENMP)
    return omp_get_thread_num();
#else
    return 0;
#endif
}

// ---------------------------------------------------------------------------------------------------- 16-bit types

inline float bits_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline uint32_t float_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

inline uint16_t to_bf16(float value) {
    const uint32_t bits = float_bits(value);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (uint16_t)rounded;
}

inline float from_f16(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = (half >> 10) & 31, mantissa = half & 1023;
    if (exponent == 31) return bits_float(sign | 0x7f800000 | mantissa << 13);
    if (exponent) return bits_float(sign | (exponent + 112) << 23 | mantissa << 13);
    const float tiny = (float)mantissa * 5.9604644775390625e-8f;  // 2^-24
    return sign ? -tiny : tiny;
}

inline uint16_t to_f16(float value) {
    const uint32_t bits = float_bits(value), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (size >= 0x477ff000) return (uint16_t)(sign | 0x7c00);  // rounds to 65,536 or more
    if (size < 0x38800000) {                                   // below 2^-14: steps of 2^-24
        const float steps = bits_float(size) * 16777216.0f;
        return (uint16_t)(sign | (uint32_t)((steps + 8388608.0f) - 8388608.0f));
    }
    return (uint16_t)(sign | (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13);
}

void load(Type type, const void* from, int64_t offset, int64_t count, float* to) {
    if (type == Type::f32) {
        std::memcpy(to, (const float*)from + offset, count * sizeof(float));
        return;
    }
    const uint16_t* half = (const uint16_t*)from + offset;
    if (type == Type::bf16) {
        for (int64_t i = 0; i < count; ++i) to[i] = bits_float((uint32_t)half[i] << 16);
        return;
    }
    int64_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= count; i += 8) {
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(half + i))));
    }
#endif
    for (; i < count; ++i) to[i] = from_f16(half[i]);
}

void store(Type type, const float* from, int64_t count, void* to, int64_t offset) {
    if (type == Type::f32) {
        std::memcpy((float*)to + offset, from, count * sizeof(float));
        return;
    }
    uint16_t* half = (uint16_t*)to + offset;
    if (type == Type::bf16) {
        for (int64_t i = 0; i < count; ++i) half[i] = to_bf16(from[i]);
        return;
    }
    int64_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= count; i += 8) {
        _mm_storeu_si128((__m128i*)(half + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
    }
#endif
    for (; i < count; ++i) half[i] = to_f16(from[i]);
}

// ------------------------------------------------------------------------------------- integer products, by machine

#if defined(__AVX512VNNI__)

// vpdpbusd multiplies unsigned by signed: weights are shifted by 128 and 128 times the row's sum of codes comes off.
using Code = int8_t;
constexpr int64_t MR = 8, NR = 48, FEW = 8, OFFSET = 128;
using Packed = uint8_t;

inline __m512i shifted(__m512i weights) { return _mm512_xor_si512(weights, _mm512_set1_epi8((char)0x80)); }

// Transpose 16 rows of 16 dwords; the rows are `stride` bytes apart, the result's `step` dwords.
inline void transpose(const int8_t* from, int64_t stride, int64_t rows, int64_t bytes, int32_t* to, int64_t step) {
    const __mmask64 mask = bytes >= 64 ? ~0ull : (1ull << bytes) - 1;
    __m512i a[16], b[16];
    for (int i = 0; i < 16; ++i) {
        a[i] = i < rows ? _mm512_maskz_loadu_epi8(mask, from + i * stride) : _mm512_setzero_si512();
        a[i] = shifted(a[i]);
    }
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    // a[4 g + j] holds dwords j, 4 + j, 8 + j, 12 + j of rows 4 g .. 4 g + 3, one in each quarter.
    for (int j = 0; j < 4; ++j) {
        const __m512i low01 = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88), high01 = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd);
        const __m512i low23 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88);
        const __m512i high23 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd);
        _mm512_storeu_si512(to + j * step, _mm512_shuffle_i32x4(low01, low23, 0x88));
        _mm512_storeu_si512(to + (8 + j) * step, _mm512_shuffle_i32x4(low01, low23, 0xdd));
        _mm512_storeu_si512(to + (4 + j) * step, _mm512_shuffle_i32x4(high01, high23, 0x88));
        _mm512_storeu_si512(to + (12 + j) * step, _mm512_shuffle_i32x4(high01, high23, 0xdd));
    }
}

// [KP / 4][NR][4]
void pack(const int8_t* weight, int64_t rows, int64_t k, Packed* to) {
    for (int64_t at = 0; at < k; at += 64) {
        for (int64_t group = 0; group < NR; group += 16) {
            const int64_t real = smaller(rows - group, 16);
            transpose(weight + group * k + at, k, real, k - at, (int32_t*)to + at / 4 * NR + group, NR);
        }
    }
}

void many_rows(const Code* const* rows, const Packed* panel, int64_t kp, int32_t* tile) {
    __m512i sum[MR][3];
    for (int i = 0; i < MR; ++i) {
        for (int j = 0; j < 3; ++j) sum[i][j] = _mm512_setzero_si512();
    }
    const Code *r0 = rows[0], *r1 = rows[1], *r2 = rows[2], *r3 = rows[3];
    const Code *r4 = rows[4], *r5 = rows[5], *r6 = rows[6], *r7 = rows[7];
    for (int64_t at = 0; at < kp; at += 4, panel += 4 * NR) {
        const __m512i w0 = _mm512_load_si512(panel), w1 = _mm512_load_si512(panel + 64);
        const __m512i w2 = _mm512_load_si512(panel + 128);
#define QUANTSINK_ROW(I)                                              \
    {                                                                 \
        const __m512i x = _mm512_set1_epi32(*(const int32_t*)(r##I + at)); \
        sum[I][0] = _mm512_dpbusd_epi32(sum[I][0], w0, x);            \
        sum[I][1] = _mm512_dpbusd_epi32(sum[I][1], w1, x);            \
        sum[I][2] = _mm512_dpbusd_epi32(sum[I][2], w2, x);            \
    }
        QUANTSINK_ROW(0)
        QUANTSINK_ROW(1)
        QUANTSINK_ROW(2)
        QUANTSINK_ROW(3)
        QUANTSINK_ROW(4)
        QUANTSINK_ROW(5)
        QUANTSINK_ROW(6)
        QUANTSINK_ROW(7)
#undef QUANTSINK_ROW
    }
    for (int i = 0; i < MR; ++i) {
        for (int j = 0; j < 3; ++j) _mm512_storeu_si512(tile + i * NR + 16 * j, sum[i][j]);
    }
}

inline __m128i sums_of_four(__m512i a, __m512i b, __m512i c, __m512i d) {
    const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    const __m512i all = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
    return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

// One row of codes against four rows of weights as they lie. One row of weights after the other: the processor fetches a
// single stream ahead by itself, four interleaved ones at 0.6 of the speed, and with prefetch instructions slower still.
inline __m128i four_dots(const Code* x, const int8_t* const* w, int64_t k) {
    __m512i sum[4];
    for (int j = 0; j < 4; ++j) {
        __m512i even = _mm512_setzero_si512(), odd = _mm512_setzero_si512();
        int64_t at = 0;
        for (; at + 128 <= k; at += 128) {
            even = _mm512_dpbusd_epi32(even, shifted(_mm512_loadu_si512(w[j] + at)), _mm512_load_si512(x + at));
            odd = _mm512_dpbusd_epi32(odd, shifted(_mm512_loadu_si512(w[j] + at + 64)), _mm512_load_si512(x + at + 64));
        }
        for (; at < k; at += 64) {
            const __mmask64 mask = k - at >= 64 ? ~0ull : (1ull << (k - at)) - 1;
            even = _mm512_dpbusd_epi32(even, shifted(_mm512_maskz_loadu_epi8(mask, w[j] + at)), _mm512_load_si512(x + at));
        }
        sum[j] = _mm512_add_epi32(even, odd);
    }
    return sums_of_four(sum[0], sum[1], sum[2], sum[3]);
}

void few_rows(const Code* const* rows, int64_t m, const int8_t* weight, int64_t n, int64_t k, int32_t* tile) {
    for (int64_t j = 0; j < n; j += 4) {
        const int8_t* w[4];
        for (int64_t i = 0; i < 4; ++i) w[i] = weight + smaller(j + i, n - 1) * k;
        for (int64_t i = 0; i < m; ++i) {
            _mm_storeu_si128((__m128i*)(tile + i * NR + j), four_dots(rows[i], w, k));
        }
    }
}

float float_dot(const float* x, const int8_t* w, int64_t k) {
    __m512 sum[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
    int64_t at = 0;
    for (; at + 64 <= k; at += 64) {
        for (int j = 0; j < 4; ++j) {
            const __m512i wide = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(w + at + 16 * j)));
            sum[j] = _mm512_fmadd_ps(_mm512_loadu_ps(x + at + 16 * j), _mm512_cvtepi32_ps(wide), sum[j]);
        }
    }
    for (; at < k; at += 16) {
        const __mmask16 mask = k - at >= 16 ? 0xffff : (1u << (k - at)) - 1;
        const __m512i wide = _mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(mask, w + at));
        sum[0] = _mm512_fmadd_ps(_mm512_loadu_ps(x + at), _mm512_cvtepi32_ps(wide), sum[0]);
    }
    return _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(sum[0], sum[1]), _mm512_add_ps(sum[2], sum[3])));
}

#else

// Pairs of 16-bit numbers, whose products and sum are exact in 32 bits.
using Code = int16_t;
constexpr int64_t NR = 16, FEW = 4, OFFSET = 0;
using Packed = int16_t;

// [KP / 2][NR][2]
void pack(const int8_t* weight, int64_t rows, int64_t k, Packed* to) {
    for (int64_t at = 0; at < k; at += 2) {
        for (int64_t j = 0; j < NR; ++j) {
            const int8_t* w = weight + smaller(j, rows - 1) * k + at;
            to[at * NR + 2 * j] = w[0];
            to[at * NR + 2 * j + 1] = at + 1 < k ? w[1] : 0;
        }
    }
    std::memset(to + round_up(k, 2) * NR, 0, (round_up(k, KPAD) - round_up(k, 2)) * NR * sizeof(Packed));
}

#if defined(__AVX2__)

constexpr int64_t MR = 6;

void many_rows(const Code* const* rows, const Packed* panel, int64_t kp, int32_t* tile) {
    __m256i sum[MR][2];
    for (int i = 0; i < MR; ++i) sum[i][0] = sum[i][1] = _mm256_setzero_si256();
    for (int64_t at = 0; at < kp; at += 2, panel += 2 * NR) {
        const __m256i w0 = _mm256_load_si256((const __m256i*)panel), w1 = _mm256_load_si256((const __m256i*)panel + 1);
#pragma GCC unroll 6
        for (int i = 0; i < MR; ++i) {
            const __m256i x = _mm256_set1_epi32(*(const int32_t*)(rows[i] + at));
            sum[i][0] = _mm256_add_epi32(sum[i][0], _mm256_madd_epi16(w0, x));
            sum[i][1] = _mm256_add_epi32(sum[i][1], _mm256_madd_epi16(w1, x));
        }
    }
    for (int i = 0; i < MR; ++i) {
        _mm256_storeu_si256((__m256i*)(tile + i * NR), sum[i][0]);
        _mm256_storeu_si256((__m256i*)(tile + i * NR + 8), sum[i][1]);
    }
}

inline int32_t sum_of(__m256i v) {
    __m128i half = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1)));
}

inline int32_t dot(const Code* x, const int8_t* w, int64_t k) {
    __m256i low = _mm256_setzero_si256(), high = low;
    int64_t at = 0;
    for (; at + 32 <= k; at += 32) {
        const __m256i w0 = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(w + at)));
        const __m256i w1 = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(w + at + 16)));
        low = _mm256_add_epi32(low, _mm256_madd_epi16(w0, _mm256_load_si256((const __m256i*)(x + at))));
        high = _mm256_add_epi32(high, _mm256_madd_epi16(w1, _mm256_load_si256((const __m256i*)(x + at + 16))));
    }
    int32_t sum = sum_of(_mm256_add_epi32(low, high));
    for (; at < k; ++at) sum += x[at] * w[at];
    return sum;
}

float float_dot(const float* x, const int8_t* w, int64_t k) {
    __m256 sum[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
    int64_t at = 0;
    for (; at + 32 <= k; at += 32) {
        for (int j = 0; j < 4; ++j) {
            const __m256i wide = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(w + at + 8 * j)));
            sum[j] = _mm256_fmadd_ps(_mm256_loadu_ps(x + at + 8 * j), _mm256_cvtepi32_ps(wide), sum[j]);
        }
    }
    float lanes[8], rest = 0;
    _mm256_storeu_ps(lanes, _mm256_add_ps(_mm256_add_ps(sum[0], sum[1]), _mm256_add_ps(sum[2], sum[3])));
    for (; at < k; ++at) rest += x[at] * w[at];
    for (int j = 0; j < 8; ++j) rest += lanes[j];
    return rest;
}

#else

constexpr int64_t MR = 4;

void many_rows(const Code* const* rows, const Packed* panel, int64_t kp, int32_t* tile) {
    std::memset(tile, 0, MR * NR * sizeof(int32_t));
    for (int64_t at = 0; at < kp; at += 2, panel += 2 * NR) {
        for (int64_t i = 0; i < MR; ++i) {
            const int32_t x0 = rows[i][at], x1 = rows[i][at + 1];
            for (int64_t j = 0; j < NR; ++j) tile[i * NR + j] += x0 * panel[2 * j] + x1 * panel[2 * j + 1];
        }
    }
}

inline int32_t dot(const Code* x, const int8_t* w, int64_t k) {
    int32_t sum = 0;
    for (int64_t at = 0; at < k; ++at) sum += x[at] * w[at];
    return sum;
}

float float_dot(const float* x, const int8_t* w, int64_t k) {
    float lanes[8] = {}, sum = 0;
    int64_t at = 0;
    for (; at + 8 <= k; at += 8) {
        for (int j = 0; j < 8; ++j) lanes[j] += x[at + j] * w[at + j];
    }
    for (; at < k; ++at) sum += x[at] * w[at];
    for (int j = 0; j < 8; ++j) sum += lanes[j];
    return sum;
}

#endif

void few_rows(const Code* const* rows, int64_t m, const int8_t* weight, int64_t n, int64_t k, int32_t* tile) {
    for (int64_t j = 0; j < n; ++j) {
        for (int64_t i = 0; i < m; ++i) tile[i * NR + j] = dot(rows[i], weight + j * k, k);
    }
}

#endif

// ------------------------------------------------------------------------------------------------ activations to codes

inline uint32_t largest_bits(const float* row, int64_t k) {
    // As integers, so that NaN is the largest of all.
    int32_t most = 0;
    for (int64_t i = 0; i < k; ++i) {
        const int32_t bits = (int32_t)(float_bits(row[i]) & 0x7fffffff);
        most = bits > most ? bits : most;
    }
    return (uint32_t)most;
}

// Returns the sum of the codes.
template <typename To>
int32_t round_codes(const float* row, int64_t k, float scale, To* codes) {
    constexpr float ties = 12582912.0f;  // 1.5 x 2^23: adding it rounds half to even
    int32_t sum = 0;
    for (int64_t i = 0; i < k; ++i) {
        float v = row[i] / scale;
        v = v > -(float)QMAX ? v : -(float)QMAX;
        v = v < (float)QMAX ? v : (float)QMAX;
        int32_t code = (int32_t)((v + ties) - ties);
        code = row[i] == 0 ? 0 : code;  // the scale of a row below 127 x 2^-150 is 0
        codes[i] = (To)code;
        sum += code;
    }
    return sum;
}

#if defined(__AVX512VNNI__)

// The same codes without a division for most: x * (1 / scale) is within 3e-5 of x / scale, so only what lies that near
// to a tie is divided.
int32_t round_codes(const float* row, int64_t k, float scale, int8_t* codes) {
    const __m512 inverse = _mm512_set1_ps(1.0f / scale), divisor = _mm512_set1_ps(scale);
    const __m512 low = _mm512_set1_ps(-(float)QMAX), high = _mm512_set1_ps((float)QMAX), near = _mm512_set1_ps(0.4999f);
    const bool extreme = scale < 1e-30f || scale > 1e30f;
    __m512i sum = _mm512_setzero_si512();
    for (int64_t i = 0; i < k; i += 16) {
        const __mmask16 real = k - i >= 16 ? 0xffff : (1u << (k - i)) - 1;
        const __m512 x = _mm512_maskz_loadu_ps(real, row + i);
        __m512 v = _mm512_min_ps(_mm512_max_ps(_mm512_mul_ps(x, inverse), low), high);
        const __m512 away = _mm512_abs_ps(_mm512_sub_ps(v, _mm512_roundscale_ps(v, 0)));
        if (_mm512_cmp_ps_mask(away, near, _CMP_NLE_UQ) || extreme) {
            v = _mm512_maskz_div_ps(_mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_NEQ_UQ), x, divisor);
            v = _mm512_min_ps(_mm512_max_ps(v, low), high);
        }
        const __m512i code = _mm512_cvtps_epi32(v);
        sum = _mm512_add_epi32(sum, code);
        const __m128i bytes = _mm512_cvtepi32_epi8(code);
        if (k - i >= 16) {
            _mm_storeu_si128((__m128i*)(codes + i), bytes);  // a masked store takes several times as long
        } else {
            _mm_mask_storeu_epi8(codes + i, real, bytes);
        }
    }
    return _mm512_reduce_add_epi32(sum);
}

#endif

inline float per_token_scale(uint32_t largest) { return largest == 0 ? 1.0f : bits_float(largest) / (float)QMAX; }

inline bool finite(uint32_t largest) { return largest < 0x7f800000; }

// ------------------------------------------------------------------------------------------------------------ the layer

struct Work {
    int64_t kp;
    Code* codes;       // [M, KP]
    float* scale;      // [M]
    int32_t* sum;      // [M]: sum of a row's codes
    float* gathered;   // [M, C]: inputs at the native columns
    float* unquantized;  // [S or M, KP]: rows that are multiplied as they are
    uint8_t* is_sink;  // [M], null without sink rows
    uintptr_t threads;   // `thread_bytes` for each
    int64_t thread_bytes;
};

#pragma GCC diagnostic ignored "-Wpsabi"  // nothing here is called from other translation units
// Vectors of any machine; the compiler splits them where its registers are shorter.
constexpr int LANES = 16, NV = NR / LANES;
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef int32_t Signed __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

inline Halves to_bf16(const Floats& values) {
    const Words bits = (Words)values;
    const Words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const Words nan = (Words)((bits & 0x7fffffff) > 0x7f800000);
    return __builtin_convertvector((nan & 0x7fc0) | (~nan & rounded), Halves);
}

// One thread's own.
struct Local {
    Packed* panel;
    float* row;      // [KP]
    float* columns;  // [C, NR]
    float* flat;     // [NR, C]
    float *weight_scale, *bias;  // [NR]
    int32_t* tile;               // [MR or FEW, NR]
};

template <typename T>
T* take(uintptr_t& at, int64_t count) {
    T* found = (T*)at;
    at += round_up(count * (int64_t)sizeof(T), 64);
    return found;
}

void lay_out_thread(const LinearArgs& a, int64_t kp, uintptr_t& at, Local& l) {
    l.panel = take<Packed>(at, NR * kp);
    l.row = take<float>(at, kp);
    l.columns = take<float>(at, NR * a.c);
    l.flat = take<float>(at, NR * a.c);
    l.weight_scale = take<float>(at, NR);
    l.bias = take<float>(at, NR);
    l.tile = take<int32_t>(at, (FEW > MR ? FEW : MR) * NR);
}

// Shares out the memory from `base` on; returns how many bytes that takes.
int64_t lay_out(const LinearArgs& a, uintptr_t base, Work& w) {
    const bool quantized = a.inputs != Inputs::native;
    const int64_t as_they_are = !quantized ? a.m : a.sink_scale ? 0 : a.s;
    uintptr_t at = base;
    w.kp = round_up(a.k, KPAD);
    w.codes = take<Code>(at, quantized ? a.m * w.kp : 0);
    w.scale = take<float>(at, a.m);
    w.sum = take<int32_t>(at, a.m);
    w.gathered = take<float>(at, a.m * a.c);
    w.unquantized = take<float>(at, as_they_are * w.kp);
    w.is_sink = a.s ? take<uint8_t>(at, a.m) : nullptr;
    w.threads = at;
    Local unused;
    lay_out_thread(a, w.kp, at, unused);
    w.thread_bytes = at - w.threads;
    return w.threads - base + a.threads * w.thread_bytes;
}

void read_row(const LinearArgs& a, const Work& w, int64_t m, float* row) {
    load(a.type, a.x, m * a.x_stride, a.k, row);
    for (int64_t i = 0; i < a.c; ++i) {
        w.gathered[m * a.c + i] = row[a.column_index[i]];
        row[a.column_index[i]] = 0;
    }
    std::memset(row + a.k, 0, (w.kp - a.k) * 4);
}

void quantize_row(const LinearArgs& a, const Work& w, int64_t m, float* row) {
    read_row(a, w, m, row);
    const uint32_t largest = largest_bits(row, a.k);
    const bool own = a.inputs == Inputs::per_token;
    const float fixed = own ? 1 : w.is_sink && w.is_sink[m] && a.sink_scale ? *a.sink_scale : *a.input_scale;
    const float scale = own ? per_token_scale(largest) : fixed;
    if (finite(largest)) {
        w.scale[m] = scale;
        w.sum[m] = round_codes(row, w.kp, scale, w.codes + m * w.kp);
    } else {  // nothing of the row is right: NaN everywhere
        w.scale[m] = bits_float(0x7fc00000);
        w.sum[m] = 0;
        std::memset(w.codes + m * w.kp, 0, w.kp * sizeof(Code));
    }
}

inline float short_dot(const float* x, const float* y, int64_t count) {
    float even = 0, odd = 0;
    int64_t i = 0;
    for (; i + 2 <= count; i += 2) {
        even += x[i] * y[i];
        odd += x[i + 1] * y[i + 1];
    }
    return even + odd + (i < count ? x[i] * y[i] : 0.0f);
}

// Native columns, bias and the output type, for `count` channels of row m from channel n0 on.
void finish(const LinearArgs& a, const Work& w, const Local& l, int64_t m, int64_t n0, int64_t count, const Floats* sums) {
    const float* x = w.gathered + m * a.c;
    Floats y[NV];
    for (int v = 0; v < NV; ++v) y[v] = sums[v];
    if (a.m <= FEW) {
        alignas(64) float dots[NR] = {};
        for (int64_t j = 0; a.c && j < count; ++j) dots[j] = short_dot(x, l.flat + j * a.c, a.c);
        for (int v = 0; v < NV; ++v) y[v] += ((const Floats*)dots)[v];
    } else {
        for (int64_t c = 0; c < a.c; ++c) {
            const Floats* column = (const Floats*)(l.columns + c * NR);
            for (int v = 0; v < NV; ++v) y[v] += x[c] * column[v];
        }
    }
    if (a.bias) {
        for (int v = 0; v < NV; ++v) y[v] += ((const Floats*)l.bias)[v];
    }
    const int64_t at = m * a.n + n0;
    if (a.type == Type::bf16 && count == NR) {
        for (int v = 0; v < NV; ++v) {
            const Halves rounded = to_bf16(y[v]);
            std::memcpy((uint16_t*)a.out + at + v * LANES, &rounded, sizeof rounded);
        }
        return;
    }
    float flat[NR];
    std::memcpy(flat, y, sizeof flat);
    store(a.type, flat, count, a.out, at);
}

int64_t size_of(Type type) { return type == Type::f32 ? 4 : 2; }

// What the panel from channel n0 on will read beside its weights.
void prefetch_panel(const LinearArgs& a, int64_t n0) {
    if (n0 >= a.n) return;
    const int64_t count = smaller(a.n - n0, NR), size = size_of(a.native_type);
    prefetch(a.weight_scale + n0, count * 4);
    if (a.bias) prefetch((const char*)a.bias + n0 * size, count * size);
    prefetch((const char*)a.columns + n0 * a.c * size, count * a.c * size);
}

void read_panel(const LinearArgs& a, int64_t n0, int64_t count, Local& l) {
    std::memset(l.weight_scale, 0, NR * 4);
    std::memcpy(l.weight_scale, a.weight_scale + n0, count * 4);
    std::memset(l.bias, 0, NR * 4);
    if (a.bias) load(a.native_type, a.bias, n0, count, l.bias);
    if (a.c == 0) return;
    load(a.native_type, a.columns, n0 * a.c, count * a.c, l.flat);
    if (a.m <= FEW) return;
    if (count < NR) std::memset(l.columns, 0, NR * a.c * 4);
    for (int64_t j = 0; j < count; ++j) {
        for (int64_t c = 0; c < a.c; ++c) l.columns[c * NR + j] = l.flat[j * a.c + c];
    }
}

void quantized_rows(const LinearArgs& a, const Work& w, Local& l, int64_t n0, int64_t count, int64_t from, int64_t to) {
    const int8_t* weight = a.weight + n0 * a.k;
    const bool few = a.m <= FEW;
    const int64_t step = few ? FEW : MR;
    if (!few) pack(weight, count, a.k, l.panel);
    for (int64_t m0 = from; m0 < to; m0 += step) {
        const int64_t real = smaller(to - m0, step);
        const Code* rows[FEW > MR ? FEW : MR];
        for (int64_t i = 0; i < step; ++i) rows[i] = w.codes + (m0 + smaller(i, real - 1)) * w.kp;
        if (few) {
            few_rows(rows, real, weight, count, a.k, l.tile);
        } else {
            many_rows(rows, l.panel, w.kp, l.tile);
        }
        for (int64_t i = 0; i < real; ++i) {
            const uint32_t offset = (uint32_t)OFFSET * (uint32_t)w.sum[m0 + i];
            const Words* tile = (const Words*)(l.tile + i * NR);
            Floats y[NV];
            for (int v = 0; v < NV; ++v) {
                const Signed sums = (Signed)(tile[v] - offset);
                y[v] = __builtin_convertvector(sums, Floats) * w.scale[m0 + i] * ((const Floats*)l.weight_scale)[v];
            }
            finish(a, w, l, m0 + i, n0, count, y);
        }
    }
}

void unquantized_rows(const LinearArgs& a, const Work& w, const Local& l, int64_t n0, int64_t count) {
    const bool all = a.inputs == Inputs::native;
    const int64_t rows = all ? a.m : a.s;
    for (int64_t i = 0; i < rows; ++i) {
        Floats y[NV] = {};
        for (int64_t j = 0; j < count; ++j) {
            y[j / LANES][j % LANES] = float_dot(w.unquantized + i * w.kp, a.weight + (n0 + j) * a.k, a.k);
        }
        for (int v = 0; v < NV; ++v) y[v] *= ((const Floats*)l.weight_scale)[v];
        finish(a, w, l, all ? i : a.sinks[i], n0, count, y);
    }
}

int useful_threads(int64_t m, int64_t n, int64_t k, int threads) {
    const int64_t us = n * k / 20000 + m * n * k / 200000;
    return us < SERIAL_US ? 1 : threads;
}

bool linear(const LinearArgs& given) {
    LinearArgs a = given;
    a.threads = useful_threads(a.m, a.n, a.k, a.threads);
    Work w;
    void* memory = std::malloc(lay_out(a, 0, w) + 64);
    if (!memory) return false;
    lay_out(a, round_up((uintptr_t)memory, 64), w);
    if (w.is_sink) std::memset(w.is_sink, 0, a.m);
    for (int64_t i = 0; i < a.s; ++i) w.is_sink[a.sinks[i]] = 1;
    const bool quantized = a.inputs != Inputs::native;
    const int64_t panels = (a.n + NR - 1) / NR;
    // Few panels: their rows are divided too, so that every thread has work.
    const int64_t parts = panels >= 4 * a.threads || a.m < 16 * MR ? 1 : a.threads;
    const int64_t rows = round_up((a.m + parts - 1) / parts, MR);
#pragma omp parallel num_threads(a.threads) if (a.threads > 1)
    {
        Local l;
        uintptr_t at = w.threads + this_thread() * w.thread_bytes;
        lay_out_thread(a, w.kp, at, l);
        if (quantized) {
#pragma omp for schedule(static)
            for (int64_t m = 0; m < a.m; ++m) quantize_row(a, w, m, l.row);
        }
        const int64_t as_they_are = !quantized ? a.m : a.sink_scale ? 0 : a.s;
#pragma omp for schedule(static)
        for (int64_t i = 0; i < as_they_are; ++i) {
            read_row(a, w, quantized ? a.sinks[i] : i, w.unquantized + i * w.kp);
        }
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < panels * parts; ++task) {
            const int64_t n0 = task / parts * NR, count = smaller(a.n - n0, NR), from = task % parts * rows;
            prefetch_panel(a, n0 + NR);
            read_panel(a, n0, count, l);
            if (quantized) quantized_rows(a, w, l, n0, count, from, smaller(from + rows, a.m));
        }
        // After the sink rows' INT8 results, which these replace.
        if (as_they_are) {
#pragma omp for schedule(dynamic)
            for (int64_t panel = 0; panel < panels; ++panel) {
                const int64_t n0 = panel * NR, count = smaller(a.n - n0, NR);
                read_panel(a, n0, count, l);
                unquantized_rows(a, w, l, n0, count);
            }
        }
    }
    std::free(memory);
    return true;
}

bool quantize(const QuantizeArgs& a) {
    const int threads = a.m * a.k < 1000 * SERIAL_US ? 1 : a.threads;
    float* rows = (float*)std::malloc(threads * a.k * sizeof(float));
    if (!rows) return false;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t m = 0; m < a.m; ++m) {
        float* row = rows + this_thread() * a.k;
        load(a.type, a.x, m * a.x_stride, a.k, row);
        const uint32_t largest = largest_bits(row, a.k);
        a.scale[m] = per_token_scale(largest);
        if (finite(largest)) {
            round_codes(row, a.k, a.scale[m], a.codes + m * a.k);
        } else {
            std::memset(a.codes + m * a.k, 0, a.k);
        }
    }
    std::free(rows);
    return true;
}

}  // namespace
}  // namespace quantsink
