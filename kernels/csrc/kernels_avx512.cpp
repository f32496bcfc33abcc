#include "simd_avx512.h"

#include "attention_kernel.h"
#include "kernels.h"
#include "linear_kernel.h"

namespace quantsink {

extern const Kernels kernels_avx512 = {"avx512", {attention}, {}};

}  // namespace quantsink
