// quantsink.kernels._cpu: the kernels as Python functions. Shapes and types are checked on the Python side.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <string>

#include "kernels.h"

namespace nb = nanobind;
using namespace quantsink;

// Each file of bindings adds its own.
void bind_attention(nb::module_& m);
void bind_coded(nb::module_& m);
void bind_linear(nb::module_& m);

static uint64_t read_memory(uintptr_t address, int64_t bytes, int threads) {
    const auto* words = reinterpret_cast<const uint64_t*>(address);
    const int64_t count = bytes / 8;
    uint64_t all = 0;
#pragma omp parallel for num_threads(threads) reduction(^ : all) schedule(static)
    for (int64_t i = 0; i < count; ++i) all ^= words[i];
    return all;
}

NB_MODULE(_cpu, m) {
    m.def("isa", [] { return kernels().name; }, "The instruction set in use: avx512bf16, avx512, avx2 or portable.");
    m.def("select_isa", [](const std::string& name) { return select_kernels(name.c_str()); }, nb::arg("name"),
          "Use this instruction set from now on; false where the processor lacks it.");
    m.def("read", &read_memory, nb::arg("address"), nb::arg("bytes"), nb::arg("threads"),
          "Read memory once with so many threads and return the exclusive or of its words: what reading alone costs.");
    bind_attention(m);
    bind_coded(m);
    bind_linear(m);
}
