#include "simd_portable.h"

#include "attention_kernel.h"
#include "kernels.h"
#include "linear_kernel.h"

namespace quantsink {

extern const Kernels kernels_portable = {"portable", {attention}, {}};

}  // namespace quantsink
