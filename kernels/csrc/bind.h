// What the bindings of both attentions share.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace quantsink {

template <class T> const T* pointer(uintptr_t address) { return reinterpret_cast<const T*>(address); }

inline void check_routes(const Common& a) {
    for (int64_t h = 0; h < a.heads; ++h) {
        if (a.routes[h] > kNative) {
            throw std::invalid_argument("routes must be 0 (int8), 1 (sink) or 2 (native), not " + std::to_string(a.routes[h]));
        }
    }
}

}  // namespace quantsink
