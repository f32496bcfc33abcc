// Addresses and strides come as numbers: kernels/python/sink_attention/cpu.py has checked what they describe, and a
// decoding step calls this once a layer.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>

#include <array>

#include "bind.h"

namespace nb = nanobind;
using namespace quantsink;

namespace {

// All four, as torch gives them; the last is 1.
using Strides = std::array<int64_t, 4>;

View view(uintptr_t address, const Strides& strides) {
    return {pointer<void>(address), strides[0], strides[1], strides[2]};
}

void sink_attention(uintptr_t query, uintptr_t key, uintptr_t value, uintptr_t out,
                    const std::array<int64_t, 7>& sizes, const Strides& query_strides, const Strides& key_strides,
                    const Strides& value_strides, const Strides& out_strides, bool bfloat16, uintptr_t mask,
                    const std::array<int64_t, 2>& mask_strides, uintptr_t routes, uintptr_t key_mean,
                    uintptr_t sink_start, uintptr_t clip_row, uintptr_t clip_absolute, uintptr_t s_aux, float scaling,
                    float softcap, int64_t sink_size, bool causal, int threads, bool poison) {
    AttentionArgs a{};
    a.batch = sizes[0], a.heads = sizes[1], a.kv_heads = sizes[2], a.queries = sizes[3], a.keys = sizes[4];
    a.head_dim = sizes[5], a.value_dim = sizes[6];
    a.type = bfloat16 ? Type::bf16 : Type::f32;
    a.query = view(query, query_strides);
    a.key = view(key, key_strides);
    a.value = view(value, value_strides);
    a.out = reinterpret_cast<void*>(out);
    a.out_view = view(out, out_strides);
    a.mask = {pointer<uint8_t>(mask), mask_strides[0], mask_strides[1]};
    a.routes = pointer<uint8_t>(routes);
    a.key_mean = pointer<float>(key_mean);
    a.sink_start = pointer<int64_t>(sink_start);
    a.clip_row = pointer<float>(clip_row);
    a.clip_absolute = pointer<float>(clip_absolute);
    a.s_aux = pointer<float>(s_aux);
    a.scaling = scaling, a.softcap = softcap, a.sink_size = sink_size, a.causal = causal;
    a.threads = threads, a.poison = poison;
    check_routes(a);
    nb::gil_scoped_release release;
    kernels().attention.attention(a);
}

}  // namespace

void bind_attention(nb::module_& m) {
    m.def("sink_attention", &sink_attention);
}
