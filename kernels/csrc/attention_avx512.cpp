#include "simd_avx512.h"

#include "attention_kernel.h"

namespace quantsink {

extern const AttentionKernels attention_avx512 = {attention};

}  // namespace quantsink
