// Vectors of 16 floats: AVX-512 with VNNI (Cascade Lake, Zen 4 and later).
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace quantsink {
namespace {

constexpr int W = 16;   // lanes
constexpr int R = 4;    // rows of a register tile
constexpr int NV = 4;   // vectors of a register tile

using F = __m512;
using I = __m512i;
using M = __mmask16;

inline F set(float x) { return _mm512_set1_ps(x); }
inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, F x) { _mm512_storeu_ps(p, x); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F div(F a, F b) { return _mm512_div_ps(a, b); }
inline F max(F a, F b) { return _mm512_max_ps(a, b); }
inline F min(F a, F b) { return _mm512_min_ps(a, b); }
inline F abs(F a) { return _mm512_abs_ps(a); }
inline F where(M m, F a, F b) { return _mm512_mask_blend_ps(m, b, a); }
inline M less(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
inline float hmax(F a) { return _mm512_reduce_max_ps(a); }
inline float hsum(F a) { return _mm512_reduce_add_ps(a); }

// max(y, bound) for y that is at most 0 and a bound below: as unsigned numbers, negative floats order by size.
inline F at_least(F y, F bound) {
    return _mm512_castsi512_ps(_mm512_min_epu32(_mm512_castps_si512(y), _mm512_castps_si512(bound)));
}
// max(y, -126) for y that is at most about 0: as unsigned numbers, negative floats order by size.
inline F at_least_m126(F y) {
    return _mm512_castsi512_ps(_mm512_min_epu32(_mm512_castps_si512(y), _mm512_set1_epi32(static_cast<int>(0xc2fc0000u))));
}
// One number of each of four vectors: four together cost less than half of four times one.
template <class Join> inline __m128 join_rows(const F (&a)[4], Join join) {
    const F ab = join(_mm512_unpacklo_ps(a[0], a[1]), _mm512_unpackhi_ps(a[0], a[1]));
    const F cd = join(_mm512_unpacklo_ps(a[2], a[3]), _mm512_unpackhi_ps(a[2], a[3]));
    // Of each 128-bit lane: a b a b and c d c d -> a b c d.
    const F four = join(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    const F two = join(four, _mm512_shuffle_f32x4(four, four, 0x4e));
    return _mm512_castps512_ps128(join(two, _mm512_shuffle_f32x4(two, two, 0xb1)));
}
inline __m128 max_of_rows(const F (&a)[4]) {
    return join_rows(a, [](F x, F y) { return _mm512_max_ps(x, y); });
}
inline void hmax_rows(const F (&a)[4], float (&out)[4]) { _mm_storeu_ps(out, max_of_rows(a)); }
inline void hsum_rows(const F (&a)[4], float (&out)[4]) {
    _mm_storeu_ps(out, join_rows(a, [](F x, F y) { return _mm512_add_ps(x, y); }));
}

inline I set_i(int32_t x) { return _mm512_set1_epi32(x); }
inline I load_i(const void* p) { return _mm512_loadu_si512(p); }
inline void store_i(void* p, I x) { _mm512_storeu_si512(p, x); }
inline I add_i(I a, I b) { return _mm512_add_epi32(a, b); }
inline I sub_i(I a, I b) { return _mm512_sub_epi32(a, b); }
inline I and_i(I a, I b) { return _mm512_and_si512(a, b); }
inline I or_i(I a, I b) { return _mm512_or_si512(a, b); }
template <int N> inline I shl(I a) { return _mm512_slli_epi32(a, N); }
template <int N> inline I shr(I a) { return _mm512_srli_epi32(a, N); }
inline I max_i(I a, I b) { return _mm512_max_epi32(a, b); }
inline int32_t hmax_i(I a) { return _mm512_reduce_max_epi32(a); }
inline I bits(F a) { return _mm512_castps_si512(a); }
inline F from_bits(I a) { return _mm512_castsi512_ps(a); }
inline F to_float(I a) { return _mm512_cvtepi32_ps(a); }
inline I to_int(F a) { return _mm512_cvtps_epi32(a); }  // nearest, ties to even

// Lane t * W + l takes bit t * W + l.
inline M mask(uint64_t word, int t) { return static_cast<M>(word >> (t * W)); }

// Bit i is set where byte i of 64 is not zero.
inline uint64_t bits_of_bytes(const uint8_t* p) {
    const I x = _mm512_loadu_si512(p);
    return _mm512_test_epi8_mask(x, x);
}

inline F load_bf16(const uint16_t* p) {
    return from_bits(shl<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))));
}
inline F load_half(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
// The low byte of each lane, in order.
inline void store_bytes(void* p, I a) { _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a)); }
// The low 16 bits of each lane, in order.
inline void store_words(void* p, I a) { _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtepi32_epi16(a)); }

// The low bytes of 64 lanes whose values lie in 0..127, in order.
inline void store_weights(uint8_t* p, const I a[64 / W]) {
    const I low = _mm512_packus_epi32(a[0], a[1]), high = _mm512_packus_epi32(a[2], a[3]);
    const I order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    store_i(p, _mm512_permutexvar_epi32(order, _mm512_packus_epi16(low, high)));
}

inline I broadcast4(const void* p) { return set_i(*static_cast<const int32_t*>(p)); }

// Keys are stored with their sign bit flipped: dpbusd wants one unsigned factor. Start sums at kKeyStart * sum(q).
constexpr uint8_t kKeyFlip = 0x80;
constexpr int32_t kKeyStart = -128;
inline I dot_keys(I sum, I q, I keys) { return _mm512_dpbusd_epi32(sum, keys, q); }
// Weights 0..127 times signed values.
inline I dot_values(I sum, I weights, I values) { return _mm512_dpbusd_epi32(sum, weights, values); }
// Codes 0..255 times signed numbers (-127..127). Start sums at kCodeStart * sum(numbers).
constexpr int32_t kCodeStart = 0;
inline I dot_codes(I sum, I numbers, I codes) { return _mm512_dpbusd_epi32(sum, codes, numbers); }

}  // namespace
}  // namespace quantsink
