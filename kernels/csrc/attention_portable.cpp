#include "simd_portable.h"

#include "attention_kernel.h"

namespace quantsink {

extern const AttentionKernels attention_portable = {attention};

}  // namespace quantsink
