// Included once per instruction set, after its simd_*.h: everything here has internal linkage.
#pragma once

#include "linear.h"
