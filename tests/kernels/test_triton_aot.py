"""Every configuration of the Triton kernels that can be chosen, compiled ahead of time for four GPU generations.

Nothing runs: what is asserted is the code that came out. Two child processes (this file as a program) compile, with a
driver that names a GPU where there is none, so that the dispatcher itself says what is launched with which arguments.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

ARCHITECTURES = (80, 89, 90, 100)
KIB = 1024
SHARED = {80: 163 * KIB, 89: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB}
"""Shared memory that one block may have: A100, L4 and RTX 40, H100, B200 (CUDA C++ Programming Guide)."""
INT8_PRODUCT = re.compile(r"mma\.sync\.\S*s8\.s8\.s32|wgmma\.mma_async\.\S*s32\.s8\.s8|tcgen05\.mma\S*kind::i8")
PROCESSES = 2


# The child process.


class NamedGPU:
    """As much of a driver as compiling needs."""

    def __init__(self, architecture: int) -> None:
        self.architecture = architecture

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.architecture, 32)

    def get_current_device(self) -> int:
        return self.architecture

    def get_current_stream(self, _: int) -> int:
        return 0


def calls() -> Iterator[Any]:
    """Calls of `attention` that between them choose every configuration, each with more than one set of sizes."""
    call = import_module("quantsink.kernels.sink_attention.call").Call.of
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for dim, value_dim in ((64, 48), (64, 64), (80, 96), (128, 128), (256, 16)):
            for heads, kv_heads, queries, keys, batch in ((8, 2, 100, 100, 1), (8, 1, 1, 1, 2), (4, 4, 3, 333, 1)):
                q, k, v = (
                    torch.zeros(batch, length, count, size, dtype=dtype).transpose(1, 2)
                    for count, length, size in (
                        (heads, queries, dim),
                        (kv_heads, keys, dim),
                        (kv_heads, keys, value_dim),
                    )
                )
                routes, mean = torch.zeros(heads, dtype=torch.uint8), torch.zeros(kv_heads, dim)
                mask = torch.ones(batch, 1, queries, keys + 3, dtype=torch.bool)[..., 3:]
                start, bound = torch.zeros(batch, dtype=torch.int64), torch.ones(heads)
                tensors = {"query": q, "key": k, "value": v, "routes": routes, "key_mean": mean}
                yield call(**tensors, scaling=1.0)
                limits = {"softcap": 5.0, "clip_row": bound, "clip_absolute": bound, "s_aux": bound}
                visible = {"mask": mask, "sink_start": start, "sink_size": 65, "causal": False}
                yield call(**tensors, scaling=0.3, **visible, **limits)


def compile_share(share: int) -> None:
    """Print a row of JSON for every `PROCESSES`-th configuration and architecture, beginning with `share`."""
    import triton

    launch = import_module("quantsink.kernels.sink_attention.triton_launch")
    launched: dict[Any, list[tuple[Any, ...]]] = {}
    launch.launch = lambda config, grid, *arguments: launched.setdefault(config, []).append(arguments)
    for call in calls():
        launch.attention(call)
    assert set(launched) == set(launch.CONFIGS)
    work = [(architecture, config) for config in launch.CONFIGS for architecture in ARCHITECTURES]
    for architecture, config in work[share::PROCESSES]:
        triton.runtime.driver.set_active(NamedGPU(architecture))
        kernel = getattr(launch.kernels, config.kernel)
        variants = {}
        for arguments in launched[config]:
            compiled = kernel.warmup(*arguments, **config.constants, **config.options, grid=(1,))
            variants[id(compiled)] = compiled
        print(json.dumps(row(architecture, config, compiled) | {"variants": len(variants)}), flush=True)


def row(architecture: int, config: Any, compiled: Any) -> dict[str, Any]:
    from triton import knobs

    ptx = compiled.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))  # type: ignore[index]
    return {
        "name": " ".join(str(x) for x in (config.kernel, config.dtype, config.dim, config.rows, config.flag)),
        "kernel": config.kernel,
        "dtype": config.dtype,
        "architecture": architecture,
        "registers": registers,
        "stack": stack,
        "local": ".local" in ptx,
        "shared": compiled.metadata.shared,
        "int8_products": len(INT8_PRODUCT.findall(ptx)),
        "int8_kinds": sorted({found.split(".")[0] for found in INT8_PRODUCT.findall(ptx)}),
        "float_products": len(re.findall(r"(?:mma\.sync|wgmma)\.\S*f32\.b?f16", ptx) + re.findall("kind::f16", ptx)),
        "magic": [ptx.count("0f4B400000"), ptx.count("0fCB400000")],
        "exact_division": "div.rn.f32" in ptx,
    }


# The tests.


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    pytest.importorskip("triton")
    children = [
        subprocess.Popen([sys.executable, __file__, str(share)], stdout=subprocess.PIPE, text=True)
        for share in range(PROCESSES)
    ]
    # Read one after the other: the table is far smaller than a pipe.
    lines = [line for child in children for line in child.communicate()[0].splitlines()]
    assert all(child.returncode == 0 for child in children)
    return [json.loads(line) for line in lines]


def names(rows: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(row["name"], row["architecture"]) for row in rows]


def test_every_configuration_was_compiled_once_whatever_the_sizes(rows: list[dict[str, Any]]) -> None:
    """Lengths, batch, grouping, masks and strides are run-time values: none of them makes another kernel."""
    assert len(set(names(rows))) == len(rows)
    assert len(rows) % len(ARCHITECTURES) == 0
    assert names([row for row in rows if row["variants"] != 1]) == []


def test_int8_products_run_on_matrix_units(rows: list[dict[str, Any]]) -> None:
    """Two at least in each kernel that attends, q.k and weights times values; where only maxima are wanted, one."""
    attend = [row for row in rows if row["kernel"] in ("prefill", "decode")]
    least = [(row, 1 if row["name"].endswith("True") and row["kernel"] == "decode" else 2) for row in attend]
    assert names([row for row, n in least if row["int8_products"] < n]) == []
    assert names([row for row in attend if row["dtype"] != "fp32" and not row["float_products"]]) == []


def test_nothing_spills_to_local_memory(rows: list[dict[str, Any]]) -> None:
    assert [(*names([row])[0], row["stack"]) for row in rows if row["stack"] or row["local"]] == []


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_shared_memory_fits_the_card(rows: list[dict[str, Any]], architecture: int) -> None:
    compiled_rows = [row for row in rows if row["architecture"] == architecture]
    assert compiled_rows
    assert names([row for row in compiled_rows if row["shared"] > SHARED[architecture]]) == []


def test_rounding_and_division_are_what_the_reference_does(rows: list[dict[str, Any]]) -> None:
    """Adding and taking off 1.5 * 2^23 was not folded away, and scales divide exactly: codes match to the bit."""
    quantize = [row for row in rows if row["kernel"] in ("pack", "prefill", "decode")]
    assert names([row for row in quantize if not all(row["magic"]) or not row["exact_division"]]) == []


if __name__ == "__main__":
    compile_share(int(sys.argv[1]))
