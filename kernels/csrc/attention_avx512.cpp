#include "simd_avx512.h"

#include "attention_kernel.h"
#include "coded_kernel.h"

namespace quantsink {

extern const AttentionKernels attention_avx512 = {attention, coded_attention};

}  // namespace quantsink
