#include "kernels.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

namespace quantsink {
namespace {

bool always() { return true; }

#if defined(__x86_64__)
// Processors with AVX2 have F16C, which not every compiler can ask for.
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
}

bool has_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }
#endif

struct Choice {
    Kernels kernels;
    bool (*supported)();
};

// Best first.
const Choice choices[] = {
#if defined(__x86_64__)
    {{"avx512bf16", attention_avx512bf16, linear_avx512}, has_bf16},
    {{"avx512", attention_avx512, linear_avx512}, has_avx512},
    {{"avx2", attention_avx2, linear_avx2}, has_avx2},
#endif
    {{"portable", attention_portable, linear_portable}, always},
};

const Kernels* find(const char* name) {
    for (const Choice& choice : choices) {
        if ((!name || std::strcmp(name, choice.kernels.name) == 0) && choice.supported()) return &choice.kernels;
    }
    return nullptr;
}

const Kernels* first_choice() {
    const char* wanted = std::getenv("QUANTSINK_CPU_ISA");
    if (!wanted || !*wanted) return find(nullptr);
    const Kernels* found = find(wanted);
    if (!found) {
        std::string names;
        for (const Choice& choice : choices) {
            if (choice.supported()) names += std::string(names.empty() ? "" : ", ") + choice.kernels.name;
        }
        throw std::invalid_argument("QUANTSINK_CPU_ISA=" + std::string(wanted) + ": not an instruction set of this processor; " +
                                    "unset it or choose among " + names);
    }
    return found;
}

const Kernels*& chosen() {
    static const Kernels* in_use = first_choice();
    return in_use;
}

}  // namespace

const Kernels& kernels() { return *chosen(); }

bool select_kernels(const char* name) {
    const Kernels* found = find(name);
    if (found) chosen() = found;
    return found;
}

}  // namespace quantsink
