// Vectors of 4 floats in the compiler's own vector types: any processor.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace quantsink {
namespace {

constexpr int W = 4;    // lanes
constexpr int R = 2;    // rows of a register tile
constexpr int NV = 2;   // vectors of a register tile

typedef float F __attribute__((vector_size(16)));
typedef int32_t I __attribute__((vector_size(16)));
typedef int32_t M __attribute__((vector_size(16)));

inline F set(float x) { return F{x, x, x, x}; }
inline F load(const float* p) {
    F x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
inline void store(float* p, F x) { std::memcpy(p, &x, sizeof x); }
inline F fma(F a, F b, F c) { return a * b + c; }
inline F div(F a, F b) { return a / b; }
inline F max(F a, F b) { return a > b ? a : b; }
inline F min(F a, F b) { return a < b ? a : b; }
inline I bits(F a) { return reinterpret_cast<I>(a); }
inline F from_bits(I a) { return reinterpret_cast<F>(a); }
inline F abs(F a) { return from_bits(bits(a) & 0x7fffffff); }
inline F where(M m, F a, F b) { return m ? a : b; }
inline M less(F a, F b) { return a < b; }
inline float hmax(F a) {
    const float x = a[0] > a[1] ? a[0] : a[1], y = a[2] > a[3] ? a[2] : a[3];
    return x > y ? x : y;
}
inline float hsum(F a) { return (a[0] + a[1]) + (a[2] + a[3]); }

inline F at_least(F y, F bound) { return max(y, bound); }
inline F at_least_m126(F y) { return max(y, set(-126.0f)); }

inline I set_i(int32_t x) { return I{x, x, x, x}; }
inline I load_i(const void* p) {
    I x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
inline void store_i(void* p, I x) { std::memcpy(p, &x, sizeof x); }
inline I add_i(I a, I b) { return a + b; }
inline I sub_i(I a, I b) { return a - b; }
inline I and_i(I a, I b) { return a & b; }
inline I or_i(I a, I b) { return a | b; }
template <int N> inline I shl(I a) { return reinterpret_cast<I>(reinterpret_cast<__attribute__((vector_size(16))) uint32_t&>(a) << N); }
template <int N> inline I shr(I a) { return reinterpret_cast<I>(reinterpret_cast<__attribute__((vector_size(16))) uint32_t&>(a) >> N); }
inline I max_i(I a, I b) { return a > b ? a : b; }
inline int32_t hmax_i(I a) {
    const int32_t x = a[0] > a[1] ? a[0] : a[1], y = a[2] > a[3] ? a[2] : a[3];
    return x > y ? x : y;
}
inline F to_float(I a) { return __builtin_convertvector(a, F); }
// Nearest, ties to even: adding 1.5 * 2^23 leaves the integer in the low bits. Good for |a| < 2^22.
inline I to_int(F a) { return bits(a + set(12582912.0f)) - set_i(0x4b400000); }

// Lane t * W + l takes bit t * W + l.
inline M mask(uint64_t word, int t) {
    const I lane = I{1, 2, 4, 8};
    return (set_i(static_cast<int32_t>((word >> (t * W)) & 0xf)) & lane) == lane;
}

// Bit i is set where byte i of 64 is not zero.
inline uint64_t bits_of_bytes(const uint8_t* p) {
    uint64_t bits = 0;
    for (int i = 0; i < 64; ++i) bits |= static_cast<uint64_t>(p[i] != 0) << i;
    return bits;
}

inline F load_bf16(const uint16_t* p) {
    return from_bits(I{p[0], p[1], p[2], p[3]} << 16);
}
inline float half(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, rest = h & 0x7fff;
    uint32_t word = (rest << 13) + 0x38000000;
    float x;
    if (rest >= 0x7c00) {
        word = (rest << 13) | 0x7f800000;  // inf and NaN
    } else if (rest < 0x0400) {
        x = static_cast<float>(rest) * 0x1p-24f;  // subnormal
        std::memcpy(&word, &x, sizeof x);
    }
    word |= sign;
    std::memcpy(&x, &word, sizeof x);
    return x;
}
inline F load_half(const uint16_t* p) { return F{half(p[0]), half(p[1]), half(p[2]), half(p[3])}; }
// The low byte of each lane, in order.
inline void store_bytes(void* p, I a) {
    auto* out = static_cast<uint8_t*>(p);
    for (int l = 0; l < W; ++l) out[l] = static_cast<uint8_t>(a[l]);
}
// The low 16 bits of each lane, in order.
inline void store_words(void* p, I a) {
    auto* out = static_cast<uint16_t*>(p);
    for (int l = 0; l < W; ++l) out[l] = static_cast<uint16_t>(a[l]);
}

// The low bytes of 64 lanes whose values lie in 0..127, in order.
inline void store_weights(uint8_t* p, const I a[64 / W]) {
    for (int t = 0; t < 64 / W; ++t) store_bytes(p + t * W, a[t]);
}

inline I broadcast4(const void* p) {
    int32_t x;
    std::memcpy(&x, p, sizeof x);
    return set_i(x);
}

template <class A, class B> inline I dot_bytes(I sum, I a, I b) {
    A x[16];
    B y[16];
    std::memcpy(x, &a, sizeof x);
    std::memcpy(y, &b, sizeof y);
    I out = sum;
    for (int l = 0; l < W; ++l) {
        int32_t s = 0;
        for (int i = 4 * l; i < 4 * l + 4; ++i) s += static_cast<int32_t>(x[i]) * static_cast<int32_t>(y[i]);
        out[l] += s;
    }
    return out;
}
// Keys are stored as they are; start sums at kKeyStart * sum(q).
constexpr uint8_t kKeyFlip = 0;
constexpr int32_t kKeyStart = 0;
inline I dot_keys(I sum, I q, I keys) { return dot_bytes<int8_t, int8_t>(sum, q, keys); }
// Weights 0..127 times signed values.
inline I dot_values(I sum, I weights, I values) { return dot_bytes<uint8_t, int8_t>(sum, weights, values); }
// Codes 0..255 times signed numbers (-127..127). Start sums at kCodeStart * sum(numbers).
constexpr int32_t kCodeStart = 0;
inline I dot_codes(I sum, I numbers, I codes) { return dot_bytes<int8_t, uint8_t>(sum, numbers, codes); }

}  // namespace
}  // namespace quantsink
