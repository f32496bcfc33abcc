// Addresses, shapes and strides come as numbers and are checked here: in a decoding step this is called once a layer,
// when little of Python is left in the processor's caches.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <vector>

#include "bind.h"
#include "records.h"

namespace nb = nanobind;
using namespace quantsink;

namespace {

// Address, shape and strides of a tensor.
using Tensor = std::vector<int64_t>;
using Tensors = std::vector<Tensor>;
constexpr size_t kNumbers = 9;  // of a tensor of four dimensions

const int64_t* shape(const Tensor& x) { return x.data() + 1; }
const int64_t* strides(const Tensor& x) { return x.data() + 5; }

bool shaped(const Tensor& x, int64_t batch, int64_t heads, int64_t tokens, int64_t channels) {
    const int64_t* found = shape(x);
    return found[0] == batch && found[1] == heads && found[2] == tokens && found[3] == channels;
}

// Rows of channels or of a record's bytes without gaps.
bool dense(const Tensor& x) { return strides(x)[3] == 1 || shape(x)[3] == 1 || shape(x)[0] * shape(x)[1] * shape(x)[2] == 0; }

View view(const Tensor& x) { return {pointer<void>(static_cast<uintptr_t>(x[0])), strides(x)[0], strides(x)[1], strides(x)[2]}; }

// Each bank holds records of its width.
bool fits(const CodedArgs& a, const Tensors& banks, const std::vector<int64_t>& bits) {
    if (banks.empty() || banks.size() != bits.size()) return false;
    for (size_t i = 0; i < banks.size(); ++i) {
        const Tensor& bank = banks[i];
        const int64_t bytes = record_bytes(bits[i], a.head_dim, a.value_dim);
        if (bank.size() != kNumbers || bytes == 0 || !dense(bank)) return false;
        if (!shaped(bank, a.batch, shape(bank)[1], shape(bank)[2], bytes)) return false;
    }
    return true;
}

// Every KV head has its place in a bank, and no more is in use than there is.
bool fits(const CodedArgs& a, const Tensors& banks) {
    const int64_t count = static_cast<int64_t>(banks.size()), width = count + 2;
    for (int64_t h = 0; h < a.kv_heads; ++h) {
        const int64_t bank = a.places[2 * h], place = a.places[2 * h + 1];
        if (bank < 0 || bank >= count || place < 0 || place >= shape(banks[bank])[1]) return false;
    }
    for (int64_t b = 0; b < a.batch; ++b) {
        for (int64_t i = 0; i < width; ++i) {
            const int64_t limit = i == 0 ? a.sinks : i == 1 ? a.newest : shape(banks[i - 2])[2];
            if (a.counts[b * width + i] < 0 || a.counts[b * width + i] > limit) return false;
        }
    }
    return true;
}

// A table comes as its address and shape.
bool shaped(const Tensor& table, std::initializer_list<int64_t> wanted) {
    return table.size() == wanted.size() + 1 && std::equal(wanted.begin(), wanted.end(), table.begin() + 1);
}

template <class T> const T* data(const Tensor& table) { return pointer<T>(static_cast<uintptr_t>(table[0])); }

// `views`: query, sink keys and values, the newest keys and values, out; `tables`: places, counts, routes; `bounds`:
// clip_row, clip_absolute and s_aux, each empty or [heads]. False where anything does not fit together, as check() in
// coded_attention/cache.py has it.
bool coded_attention(const std::array<Tensor, 6>& views, bool bfloat16, const Tensors& banks, const std::vector<int64_t>& bits,
                     const std::array<Tensor, 3>& tables, const std::array<Tensor, 3>& bounds, float scaling,
                     float softcap, int threads, bool poison) {
    for (const Tensor& x : views) {
        if (x.size() != kNumbers || !dense(x)) return false;
    }
    const Tensor &query = views[0], &sink_key = views[1], &key = views[3], &value = views[4];
    CodedArgs a{};
    a.batch = shape(query)[0], a.heads = shape(query)[1], a.queries = shape(query)[2], a.head_dim = shape(query)[3];
    a.kv_heads = shape(key)[1], a.newest = shape(key)[2], a.value_dim = shape(value)[3], a.sinks = shape(sink_key)[2];
    if (a.kv_heads == 0 || a.heads % a.kv_heads || softcap < 0) return false;
    if (!shaped(sink_key, a.batch, a.kv_heads, a.sinks, a.head_dim)) return false;
    if (!shaped(views[2], a.batch, a.kv_heads, a.sinks, a.value_dim)) return false;
    if (!shaped(key, a.batch, a.kv_heads, a.newest, a.head_dim)) return false;
    if (!shaped(value, a.batch, a.kv_heads, a.newest, a.value_dim)) return false;
    if (!shaped(views[5], a.batch, a.heads, a.queries, a.value_dim) || !fits(a, banks, bits)) return false;

    if (!shaped(tables[0], {a.kv_heads, 2})) return false;
    if (!shaped(tables[1], {a.batch, static_cast<int64_t>(banks.size()) + 2}) || !shaped(tables[2], {a.heads})) return false;
    a.places = data<int64_t>(tables[0]);
    a.counts = data<int64_t>(tables[1]);
    a.routes = data<uint8_t>(tables[2]);
    const float** limits[] = {&a.clip_row, &a.clip_absolute, &a.s_aux};
    for (int i = 0; i < 3; ++i) {
        if (bounds[i].empty()) continue;
        if (!shaped(bounds[i], {a.heads})) return false;
        *limits[i] = data<float>(bounds[i]);
    }
    if (!fits(a, banks)) return false;
    check_routes(a);

    a.type = bfloat16 ? Type::bf16 : Type::f32;
    a.query = view(query);
    a.sink_key = view(sink_key);
    a.sink_value = view(views[2]);
    a.key = view(key);
    a.value = view(value);
    a.out_view = view(views[5]);
    a.out = const_cast<void*>(a.out_view.data);
    std::vector<Bank> all;
    all.reserve(banks.size());
    for (size_t i = 0; i < banks.size(); ++i) {
        const View bank = view(banks[i]);
        all.push_back({static_cast<const uint8_t*>(bank.data), bank.batch, bank.head, bank.token, static_cast<int>(bits[i])});
    }
    a.banks = all.data();
    a.bank_count = static_cast<int64_t>(all.size());
    a.scaling = scaling, a.softcap = softcap;
    a.threads = threads, a.poison = poison;
    nb::gil_scoped_release release;
    kernels().attention.coded(a);
    return true;
}

}  // namespace

void bind_coded(nb::module_& m) { m.def("coded_attention", &coded_attention); }
