#include "simd_avx2.h"

#include "attention_kernel.h"
#include "kernels.h"
#include "linear_kernel.h"

namespace quantsink {

extern const Kernels kernels_avx2 = {"avx2", {attention}, {}};

}  // namespace quantsink
