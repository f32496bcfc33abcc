#include "linear_kernel.h"

namespace quantsink {

extern const LinearKernels linear_avx512 = {linear, quantize};

}  // namespace quantsink
