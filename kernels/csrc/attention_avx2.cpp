#include "simd_avx2.h"

#include "attention_kernel.h"
#include "coded_kernel.h"

namespace quantsink {

extern const AttentionKernels attention_avx2 = {attention, coded_attention};

}  // namespace quantsink
