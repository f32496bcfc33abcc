// One allocation per call: sizes are added up in a first pass and handed out in a second.
#pragma once

#include <omp.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace quantsink {
namespace {

class Arena {
public:
    Arena() = default;
    Arena(int64_t bytes, bool poison) : memory(static_cast<uint8_t*>(std::aligned_alloc(64, bytes + 64))) {
        if (!memory) throw std::bad_alloc();
        if (poison) std::memset(memory, 0xff, bytes);  // NaN as float32 and bfloat16
    }
    ~Arena() { std::free(memory); }
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    template <class T> T* take(int64_t count) {
        uint8_t* at = memory ? memory + used : nullptr;
        const int64_t bytes = count * static_cast<int64_t>(sizeof(T)), next = (bytes + 63) / 64 * 64 + kGuard;
        used += next;
#if defined(__SANITIZE_ADDRESS__)
        if (at) ASAN_POISON_MEMORY_REGION(at + bytes, next - bytes);
#endif
        return reinterpret_cast<T*>(at);
    }
    int64_t size() const { return used; }
    bool real() const { return memory; }

private:
#if defined(__SANITIZE_ADDRESS__)
    static constexpr int64_t kGuard = 64;  // what lies between two pieces belongs to neither
#else
    static constexpr int64_t kGuard = 0;
#endif
    uint8_t* memory = nullptr;
    int64_t used = 0;
};

inline int thread_index() { return omp_get_thread_num(); }

}  // namespace
}  // namespace quantsink
