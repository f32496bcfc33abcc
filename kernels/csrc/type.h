// Number formats of tensors, the same for every operator.
#pragma once

namespace quantsink {

enum class Type : int { f32 = 0, bf16 = 1, f16 = 2 };

}  // namespace quantsink
