// What the tests share: heap memory without a byte to spare, numbers, and a comparison by RMS.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "../type.h"

namespace quantsink {

// Exactly `count` elements, filled with 0xff (NaN): AddressSanitizer sees the first byte read or written beyond them.
template <class T> class Buffer {
public:
    explicit Buffer(int64_t count) : size(count), memory(new T[count]) {
        if (count) std::memset(memory.get(), 0xff, count * sizeof(T));
    }
    T* data() const { return memory.get(); }
    T& operator[](int64_t i) const { return memory[i]; }
    const int64_t size;

private:
    std::unique_ptr<T[]> memory;
};

class Random {
public:
    explicit Random(uint32_t seed) : state(seed * 2654435761u + 12345) {}
    uint32_t bits() {
        state = state * 1664525u + 1013904223u;
        return state >> 8;
    }
    int below(int n) { return static_cast<int>(bits() % static_cast<uint32_t>(n)); }
    // Roughly normal.
    double normal() {
        double sum = 0;
        for (int i = 0; i < 6; ++i) sum += static_cast<double>(bits()) / (1 << 24) - 0.5;
        return sum * std::sqrt(2.0);
    }

private:
    uint32_t state;
};

inline int64_t size_of(Type type) { return type == Type::f32 ? 4 : 2; }

// Element i of memory of the given type.
inline double get(const void* from, Type type, int64_t i) {
    if (type == Type::f32) return static_cast<const float*>(from)[i];
    const uint16_t word = static_cast<const uint16_t*>(from)[i];
    if (type == Type::bf16) {
        const uint32_t wide = static_cast<uint32_t>(word) << 16;
        float out;
        std::memcpy(&out, &wide, sizeof out);
        return out;
    }
    const int exponent = word >> 10 & 31, mantissa = word & 1023;
    const double size = exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24);
    return word & 0x8000 ? -size : size;
}

// For normal numbers: cut off, not rounded.
inline void put(void* to, Type type, int64_t i, double x) {
    const float narrow = static_cast<float>(x);
    if (type == Type::f32) {
        static_cast<float*>(to)[i] = narrow;
        return;
    }
    uint32_t word;
    std::memcpy(&word, &narrow, sizeof word);
    uint32_t half = word >> 16;
    if (type == Type::f16) {
        const int exponent = static_cast<int>(word >> 23 & 255) - 127 + 15;
        half = (word >> 16 & 0x8000) | (exponent <= 0 ? 0 : static_cast<uint32_t>(exponent) << 10 | (word >> 13 & 1023));
    }
    static_cast<uint16_t*>(to)[i] = static_cast<uint16_t>(half);
}

[[noreturn]] inline void fail(const std::string& what, const std::string& why) {
    std::fprintf(stderr, "FAILED %s: %s\n", what.c_str(), why.c_str());
    std::exit(1);
}

// RMS of the difference over the truth's; stops where it is above `limit` or anything is not finite.
inline void expect_close(const std::string& what, const Buffer<double>& actual, const Buffer<double>& truth, double limit) {
    double error = 0, size = 0;
    for (int64_t i = 0; i < truth.size; ++i) {
        if (!std::isfinite(actual[i])) fail(what, "element " + std::to_string(i) + " is not finite");
        error += (actual[i] - truth[i]) * (actual[i] - truth[i]);
        size += truth[i] * truth[i];
    }
    const double ratio = std::sqrt(error / (size > 0 ? size : 1));
    if (!(ratio <= limit)) fail(what, "RMS error " + std::to_string(ratio) + " exceeds " + std::to_string(limit));
}

}  // namespace quantsink
