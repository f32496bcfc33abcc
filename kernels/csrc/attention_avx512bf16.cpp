// As attention_avx512.cpp; native heads of bfloat16 tensors multiply in bfloat16.
#include "simd_avx512.h"

#include "attention_kernel.h"
#include "coded_kernel.h"

namespace quantsink {

extern const AttentionKernels attention_avx512bf16 = {attention, coded_attention};

}  // namespace quantsink
