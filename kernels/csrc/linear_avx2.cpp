#include "linear_kernel.h"

namespace quantsink {

extern const LinearKernels linear_avx2 = {linear, quantize};

}  // namespace quantsink
