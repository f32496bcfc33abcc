// One table of kernels per instruction set, and the choice between them when the library is loaded.
#pragma once

#include "attention.h"
#include "linear.h"

namespace quantsink {

// Compiled from the same headers, each with the flags of its instruction set (setup.py).
extern const AttentionKernels attention_portable;
extern const LinearKernels linear_portable;
#if defined(__x86_64__)
extern const AttentionKernels attention_avx2, attention_avx512, attention_avx512bf16;
extern const LinearKernels linear_avx2, linear_avx512;
#endif

struct Kernels {
    const char* name;
    const AttentionKernels& attention;
    const LinearKernels& linear;
};

// The set in use: the best that this processor has, or the lesser one that QUANTSINK_CPU_ISA names. Throws
// std::invalid_argument where that is none of this processor's.
const Kernels& kernels();

// Choose by name; false where the name is unknown or this processor lacks the instructions.
bool select_kernels(const char* name);

}  // namespace quantsink
