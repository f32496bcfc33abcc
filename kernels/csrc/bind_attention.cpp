// Addresses and strides come as numbers: kernels/python/sink_attention/cpu.py has checked what they describe, and a
// decoding step calls this once a layer.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"

namespace nb = nanobind;
using namespace quantsink;

namespace {

void check_routes(const Common& a) {
    for (int64_t h = 0; h < a.heads; ++h) {
        if (a.routes[h] > kNative) {
            throw std::invalid_argument("routes must be 0 (int8), 1 (sink) or 2 (native), not " + std::to_string(a.routes[h]));
        }
    }
}

std::string listed(const int64_t* numbers, int64_t count) {
    std::string text = "[";
    for (int64_t i = 0; i < count; ++i) text += (i ? ", " : "") + std::to_string(numbers[i]);
    return text + "]";
}

// As check_tables() in kernels/python/coded_attention/cache.py. Banks: their heads and capacity stand last.
void check_tables(const CodedArgs& a, const std::vector<std::array<int64_t, 7>>& banks, int64_t place_bytes,
                  int64_t count_bytes) {
    const int64_t width = static_cast<int64_t>(banks.size()) + 2, entry = sizeof(int64_t);
    if (place_bytes != a.kv_heads * 2 * entry || count_bytes != a.batch * width * entry) {
        throw std::invalid_argument("coded_attention: heads and rows must be int64 " +
                                    listed(std::array<int64_t, 2>{a.kv_heads, 2}.data(), 2) + " and " +
                                    listed(std::array<int64_t, 2>{a.batch, width}.data(), 2));
    }
    for (int64_t h = 0; h < a.kv_heads; ++h) {
        const int64_t *at = a.places + 2 * h, count = static_cast<int64_t>(banks.size());
        if (at[0] < 0 || at[0] >= count || at[1] < 0 || at[1] >= banks[at[0]][5]) {
            throw std::invalid_argument("coded_attention: heads[" + std::to_string(h) + "] is " + listed(at, 2) +
                                        ", where no bank has a head");
        }
    }
    std::vector<int64_t> limits{a.sinks, a.newest};
    for (const auto& bank : banks) limits.push_back(bank[6]);
    for (int64_t b = 0; b < a.batch; ++b) {
        const int64_t* row = a.counts + b * width;
        for (int64_t i = 0; i < width; ++i) {
            if (row[i] >= 0 && row[i] <= limits[i]) continue;
            throw std::invalid_argument("coded_attention: rows[" + std::to_string(b) + "] is " + listed(row, width) +
                                        "; sinks, newest tokens and blocks by bank are at most " +
                                        listed(limits.data(), width));
        }
    }
}

template <class T> const T* pointer(uintptr_t address) { return reinterpret_cast<const T*>(address); }

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

// Views: query, sink keys and values, the newest keys and values, out. Banks: address, strides in bytes, bits, heads,
// capacity.
void coded_attention(const std::array<uintptr_t, 6>& views, const std::array<Strides, 6>& strides,
                     const std::array<int64_t, 8>& sizes, bool bfloat16, const std::vector<std::array<int64_t, 7>>& banks,
                     uintptr_t places, int64_t place_bytes, uintptr_t counts, int64_t count_bytes, uintptr_t routes,
                     uintptr_t clip_row, uintptr_t clip_absolute, uintptr_t s_aux, float scaling, float softcap, int threads, bool poison) {
    CodedArgs a{};
    a.batch = sizes[0], a.heads = sizes[1], a.kv_heads = sizes[2], a.queries = sizes[3];
    a.head_dim = sizes[4], a.value_dim = sizes[5], a.sinks = sizes[6], a.newest = sizes[7];
    a.type = bfloat16 ? Type::bf16 : Type::f32;
    a.query = view(views[0], strides[0]);
    a.sink_key = view(views[1], strides[1]);
    a.sink_value = view(views[2], strides[2]);
    a.key = view(views[3], strides[3]);
    a.value = view(views[4], strides[4]);
    a.out = reinterpret_cast<void*>(views[5]);
    a.out_view = view(views[5], strides[5]);
    std::vector<Bank> all;
    all.reserve(banks.size());
    for (const auto& bank : banks) {
        all.push_back({pointer<uint8_t>(static_cast<uintptr_t>(bank[0])), bank[1], bank[2], bank[3], static_cast<int>(bank[4])});
    }
    a.banks = all.data();
    a.bank_count = static_cast<int64_t>(all.size());
    a.places = pointer<int64_t>(places);
    a.counts = pointer<int64_t>(counts);
    a.routes = pointer<uint8_t>(routes);
    a.clip_row = pointer<float>(clip_row);
    a.clip_absolute = pointer<float>(clip_absolute);
    a.s_aux = pointer<float>(s_aux);
    a.scaling = scaling, a.softcap = softcap;
    a.threads = threads, a.poison = poison;
    check_routes(a);
    check_tables(a, banks, place_bytes, count_bytes);
    nb::gil_scoped_release release;
    kernels().attention.coded(a);
}

}  // namespace

void bind_attention(nb::module_& m) {
    m.def("sink_attention", &sink_attention);
    m.def("coded_attention", &coded_attention);
}
