// Mixed-route attention on plain memory: what the kernels of every instruction set take. No Python, no torch.
#pragma once

#include <cstdint>

namespace quantsink {

struct AttentionArgs {
    int threads;
};

struct AttentionKernels {
    void (*attention)(const AttentionArgs&);
};

}  // namespace quantsink
