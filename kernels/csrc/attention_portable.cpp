#include "simd_portable.h"

#include "attention_kernel.h"
#include "coded_kernel.h"

namespace quantsink {

extern const AttentionKernels attention_portable = {attention, coded_attention};

}  // namespace quantsink
