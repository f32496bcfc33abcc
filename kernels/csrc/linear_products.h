// Integer products of a linear layer, by instruction set, and what turns activations into codes. Included once per
// instruction set: everything here has internal linkage.
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

}  // namespace
}  // namespace quantsink
