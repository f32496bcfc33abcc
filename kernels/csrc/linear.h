// What surrounds the INT8 product of a linear layer, on plain memory. No Python, no torch.
#pragma once

#include <cstdint>

namespace quantsink {

struct LinearKernels {};

}  // namespace quantsink
