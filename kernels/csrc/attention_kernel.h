// Included once per instruction set, after its simd_*.h: everything here has internal linkage.
#pragma once

#include "attention.h"

namespace quantsink {
namespace {

void attention(const AttentionArgs&) {}

}  // namespace
}  // namespace quantsink
