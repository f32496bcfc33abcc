"""Builds `quantsink.kernels._cpu` from kernels/csrc; everything else about the package is in pyproject.toml.

One shared library holds the kernels for each instruction set, compiled from the same headers with that set's flags; the
right ones are chosen when it is loaded. Without a C++ compiler the package installs without it and runs the reference.
"""

import os
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nanobind
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

CSRC = Path("kernels/csrc")
X86 = platform.machine().lower() in ("x86_64", "amd64")
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni"]
# GCC takes its own AVX-512 header to read what is not set.
AVX512 += ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]
# Without this it copies the sums of a register tile twice at each turn of a loop: 5 % of a prefill.
AVX512 += ["-fno-tree-coalesce-vars"]
FLAGS = {"avx2": AVX2, "avx512": AVX512, "avx512bf16": [*AVX512, "-mavx512bf16"]}
"""By the end of a source file's name; a file without one is compiled for any machine."""


def isa(source: Path) -> str:
    return source.stem.rpartition("_")[2]


class BuildKernels(build_ext):
    def build_extensions(self) -> None:
        compile_one = self.compiler._compile

        def compile_for_isa(obj, src, ext, cc_args, extra_postargs, pp_opts):  # type: ignore[no-untyped-def]
            compile_one(obj, src, ext, cc_args, [*extra_postargs, *FLAGS.get(isa(Path(src)), [])], pp_opts)

        compile_all = self.compiler.compile

        def compile_in_parallel(sources, **options):  # type: ignore[no-untyped-def]
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = pool.map(lambda source: compile_all([source], **options), sources)
                return [path for paths in objects for path in paths]

        self.compiler._compile = compile_for_isa
        self.compiler.compile = compile_in_parallel
        super().build_extensions()


sources = [path for path in sorted(CSRC.glob("*.cpp")) if X86 or isa(path) not in FLAGS]
setup(
    cmdclass={"build_ext": BuildKernels},
    ext_modules=[
        Extension(
            "quantsink.kernels._cpu",
            sources=[path.as_posix() for path in sources],
            depends=[path.as_posix() for path in sorted(CSRC.glob("*.h"))],
            include_dirs=[
                nanobind.include_dir(),
                nanobind.source_dir(),
                str(Path(nanobind.include_dir()).parent / "ext" / "robin_map" / "include"),
            ],
            extra_compile_args=[
                "-std=c++17",
                "-O3",
                "-fopenmp",
                "-fvisibility=hidden",
                "-fno-strict-aliasing",
                "-fno-math-errno",
                "-Wall",
                "-Wextra",
            ],
            extra_link_args=["-fopenmp", "-Wl,-s"],
            language="c++",
            optional=True,
        )
    ],
)
