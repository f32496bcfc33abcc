// Vectors of 8 floats: AVX2 with FMA (Haswell, Zen and later).
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace quantsink {
namespace {

constexpr int W = 8;    // lanes
constexpr int R = 2;    // rows of a register tile
constexpr int NV = 4;   // vectors of a register tile

using F = __m256;
using I = __m256i;
using M = __m256;

inline F set(float x) { return _mm256_set1_ps(x); }
inline F load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, F x) { _mm256_storeu_ps(p, x); }
inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
inline F div(F a, F b) { return _mm256_div_ps(a, b); }
inline F max(F a, F b) { return _mm256_max_ps(a, b); }
inline F min(F a, F b) { return _mm256_min_ps(a, b); }
inline F abs(F a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
inline F where(M m, F a, F b) { return _mm256_blendv_ps(b, a, m); }
inline M less(F a, F b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
inline float hmax(F a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
inline float hsum(F a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}

// max(y, bound) for y that is at most 0 and a bound below: as unsigned numbers, negative floats order by size.
inline F at_least(F y, F bound) {
    return _mm256_castsi256_ps(_mm256_min_epu32(_mm256_castps_si256(y), _mm256_castps_si256(bound)));
}
// max(y, -126) for y that is at most about 0: as unsigned numbers, negative floats order by size.
inline F at_least_m126(F y) {
    return _mm256_castsi256_ps(_mm256_min_epu32(_mm256_castps_si256(y), _mm256_set1_epi32(static_cast<int>(0xc2fc0000u))));
}

inline I set_i(int32_t x) { return _mm256_set1_epi32(x); }
inline I load_i(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void store_i(void* p, I x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
inline I add_i(I a, I b) { return _mm256_add_epi32(a, b); }
inline I sub_i(I a, I b) { return _mm256_sub_epi32(a, b); }
inline I and_i(I a, I b) { return _mm256_and_si256(a, b); }
inline I or_i(I a, I b) { return _mm256_or_si256(a, b); }
template <int N> inline I shl(I a) { return _mm256_slli_epi32(a, N); }
template <int N> inline I shr(I a) { return _mm256_srli_epi32(a, N); }
inline I max_i(I a, I b) { return _mm256_max_epi32(a, b); }
inline int32_t hmax_i(I a) {
    __m128i x = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    x = _mm_max_epi32(x, _mm_shuffle_epi32(x, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(x, _mm_shuffle_epi32(x, 0xb1)));
}
inline I bits(F a) { return _mm256_castps_si256(a); }
inline F from_bits(I a) { return _mm256_castsi256_ps(a); }
inline F to_float(I a) { return _mm256_cvtepi32_ps(a); }
inline I to_int(F a) { return _mm256_cvtps_epi32(a); }  // nearest, ties to even

// Lane t * W + l takes bit t * W + l.
inline M mask(uint64_t word, int t) {
    const I lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const I some = and_i(set_i(static_cast<int32_t>((word >> (t * W)) & 0xff)), lane);
    return from_bits(_mm256_cmpeq_epi32(some, lane));
}

// Bit i is set where byte i of 64 is not zero.
inline uint64_t bits_of_bytes(const uint8_t* p) {
    const I zero = _mm256_setzero_si256();
    const auto low = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(load_i(p), zero)));
    const auto high = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(load_i(p + 32), zero)));
    return ~(static_cast<uint64_t>(high) << 32 | low);
}

inline F load_bf16(const uint16_t* p) {
    return from_bits(shl<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))));
}
inline F load_half(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
// The low byte of each lane, in order.
inline void store_bytes(void* p, I a) {
    const I pick = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,  //
                                    0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    const I lanes = _mm256_shuffle_epi8(a, pick);
    const __m128i both = _mm_unpacklo_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
    _mm_storel_epi64(static_cast<__m128i*>(p), both);
}
// The low 16 bits of each lane, in order.
inline void store_words(void* p, I a) {
    const I low = and_i(a, set_i(0xffff));
    const I packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0x08);
    _mm_storeu_si128(static_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}

// The low bytes of 64 lanes whose values lie in 0..127, in order.
inline void store_weights(uint8_t* p, const I a[64 / W]) {
    const I order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (int half = 0; half < 2; ++half) {
        const I* b = a + 4 * half;
        const I packed = _mm256_packus_epi16(_mm256_packus_epi32(b[0], b[1]), _mm256_packus_epi32(b[2], b[3]));
        store_i(p + 32 * half, _mm256_permutevar8x32_epi32(packed, order));
    }
}

inline I broadcast4(const void* p) { return set_i(*static_cast<const int32_t*>(p)); }

// maddubs adds two products in 16 bits: exact as long as one factor keeps to 7 bits and the other to 8.
inline I dot_7_bit(I sum, I small, I any) {
    return add_i(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(small, any), _mm256_set1_epi16(1)));
}
// Keys are stored as they are; start sums at kKeyStart * sum(q).
constexpr uint8_t kKeyFlip = 0;
constexpr int32_t kKeyStart = 0;
inline I dot_keys(I sum, I q, I keys) { return dot_7_bit(sum, _mm256_abs_epi8(q), _mm256_sign_epi8(keys, q)); }
// Weights 0..127 times signed values.
inline I dot_values(I sum, I weights, I values) { return dot_7_bit(sum, weights, values); }
// Codes 0..255 times signed numbers (-127..127). Start sums at kCodeStart * sum(numbers).
constexpr int32_t kCodeStart = 128;
inline I dot_codes(I sum, I numbers, I codes) {
    const I centred = _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
    // |numbers| is the 7-bit factor; sign() would leave -128 as it is where it must become 128, so split that off by
    // taking the sign from the other side: numbers = sign * |numbers|, and -128 * -n is computed as 128 * n below.
    const I negative = _mm256_cmpgt_epi8(_mm256_setzero_si256(), numbers);
    const I plus = dot_7_bit(sum, _mm256_andnot_si256(negative, numbers), centred);
    const I minus = dot_7_bit(_mm256_setzero_si256(), and_i(negative, _mm256_abs_epi8(numbers)), centred);
    return sub_i(plus, minus);
}

}  // namespace
}  // namespace quantsink
