#include "linear_kernel.h"

namespace quantsink {

extern const LinearKernels linear_portable = {linear, quantize};

}  // namespace quantsink
