#include "kernels.h"

#include <cstdlib>
#include <cstring>

namespace quantsink {
namespace {

bool supported(const Kernels& set) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (&set == &kernels_avx2) return avx2;
    if (&set == &kernels_avx512) {
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512vnni");
    }
#endif
    return &set == &kernels_portable;
}

const Kernels* const sets[] = {
#if defined(__x86_64__)
    &kernels_avx512,
    &kernels_avx2,
#endif
    &kernels_portable,
};

const Kernels* best() {
    const char* wanted = std::getenv("QUANTSINK_CPU_ISA");
    for (const Kernels* set : sets) {
        if (supported(*set) && (!wanted || !*wanted || std::strcmp(wanted, set->name) == 0)) return set;
    }
    return &kernels_portable;
}

const Kernels* chosen = nullptr;

}  // namespace

const Kernels& kernels() {
    if (!chosen) chosen = best();
    return *chosen;
}

bool select_kernels(const char* name) {
    for (const Kernels* set : sets) {
        if (std::strcmp(name, set->name) == 0 && supported(*set)) {
            chosen = set;
            return true;
        }
    }
    return false;
}

}  // namespace quantsink
