// quantsink.kernels._cpu: the kernels as Python functions. Shapes and types are checked on the Python side.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "kernels.h"

namespace nb = nanobind;
using namespace quantsink;

// Each file of bindings adds its own.
void bind_attention(nb::module_& m);
void bind_linear(nb::module_& m);

NB_MODULE(_cpu, m) {
    m.def("isa", [] { return kernels().name; }, "The instruction set in use: avx512, avx2 or portable.");
    m.def("select_isa", [](const std::string& name) { return select_kernels(name.c_str()); }, nb::arg("name"),
          "Use this instruction set from now on; false where the processor lacks it.");
    bind_attention(m);
    bind_linear(m);
}
