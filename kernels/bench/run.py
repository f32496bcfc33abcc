"""The CPU kernels against PyTorch, side by side, on this processor.

    OMP_WAIT_POLICY=passive python kernels/bench/run.py [--json FILE] [--only NAME]

In each case all formulations alternate in one process, and medians are compared. "best torch" is the fastest of several
formulations of the same attention in PyTorch, "as transformers" what a bfloat16 model executes. Ours pays for its
quantization inside the time. Before anything is timed the kernel has to keep the error budget of tests/numerics.py on
smaller inputs of the same kind; one that does not is not timed, and the exit status is 1. A row says whether its ratio
reaches the aim of docs/benchmarks.md on this processor; one that does not is no failure.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).parent))

import model
import numerics

from quantsink.kernels import Route, sink_attention
from quantsink.kernels.coded_attention import CodedKV, coded_attention
from quantsink.kernels.coded_attention import reference as coded_reference
from quantsink.kernels.coded_attention.call import Call as CodedCall
from quantsink.kernels.cpu import library
from quantsink.kernels.sink_attention.call import Call
from quantsink.kernels.sink_attention.reference import reference

Row = dict[str, Any]
Calls = dict[str, Callable[[], Any]]
INT8, SINK, NATIVE = Route.INT8, Route.SINK, Route.NATIVE
MIXED = (INT8, SINK, NATIVE, INT8, SINK, INT8, INT8, SINK, NATIVE)
"""One head in three `sink`, two of nine `native`."""
GATE_SEEDS = 6
COPIES = 6
"""A decoding step reads one of so many caches in turn, so that none is still in the processor's cache."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--only", choices=CASES, action="append", help="only this one; may be repeated")
    parser.add_argument("--repeats", type=int, default=11)
    args = parser.parse_args()
    kernels = library()
    if kernels is None:
        raise SystemExit("kernels/bench/run.py: the C++ kernels were not built; `make kernels` builds them")

    processor, threads = processor_name(), torch.get_num_threads()
    print(f"{processor['model']} ({processor['features']}), kernels for {kernels.isa()}, {threads} threads")
    rows = []
    for name in args.only or CASES:
        row = {"name": name, **measured(name, args.repeats)}
        row["aim"], row["reached"] = AIMS[name], reached(name, row["ratio"])
        rows.append(row)
        print(line(row), flush=True)
    if args.json:
        machine = {
            "processor": processor, "isa": kernels.isa(), "threads": threads, "torch": torch.__version__
        }  # fmt: skip
        args.json.write_text(json.dumps({**machine, "rows": rows}, indent=2) + "\n")
    if any(row["gate"] != "passed" for row in rows):
        raise SystemExit(1)


def processor_name() -> dict[str, str]:
    """Model name and the instructions that decide the kernels' speed, as Linux lists them."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = fields.get("flags", "").split()
    features = [label for flag, label in FEATURES.items() if flag in flags]
    return {"model": fields.get("model name", "unknown processor"), "features": ", ".join(features) or "no AVX2"}


def reached(name: str, ratio: float | None) -> bool | None:
    """Whether a ratio reaches its aim; None for a case that was not timed."""
    if ratio is None:
        return None
    return ratio <= AIMS[name] if name == "mixed_overhead" else ratio >= AIMS[name]


@torch.inference_mode()
def measured(name: str, repeats: int) -> Row:
    torch.manual_seed(0)
    return CASES[name](repeats)


def line(row: Row) -> str:
    if row["gate"] != "passed":
        return f"{row['name']:20} not timed, {row['gate']}"
    times = "  ".join(
        f"{key.removesuffix('_ms').replace('_', ' ')} {value:.3f} ms"
        for key, value in row.items()
        if key.endswith("_ms") and value is not None
    )
    verdict = "reached" if row["reached"] else "not reached"
    return f"{row['name']:20} ratio {row['ratio']:.2f} (aim {row['aim']}: {verdict})   {times}"


def alternate(calls: Calls, repeats: int, turn: int = 1) -> dict[str, float]:
    """Median milliseconds of each, `turn` calls in a row: short ones find what the call before left behind."""
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            for _ in range(turn):
                start = time.perf_counter()
                call()
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(durations) for name, durations in times.items()}


def compared(times: dict[str, float], gate: str, **more: Any) -> Row:
    """The row of a case in which `ours` stands beside formulations in PyTorch, `as transformers` among them."""
    torch_times = {name: ms for name, ms in times.items() if name != "ours"}
    best = min(torch_times, key=lambda name: torch_times[name])
    return {
        "ours_ms": times["ours"],
        "best_torch_ms": torch_times[best],
        "as_transformers_ms": times["as transformers"],
        "ratio": torch_times[best] / times["ours"],
        "gate": gate,
        "best_torch": best,
        **more,
    }


def failed(gate: str) -> Row:
    return {"ours_ms": None, "best_torch_ms": None, "as_transformers_ms": None, "ratio": None, "gate": gate}


def within_budget(cases: list[tuple[Tensor, Tensor, Any]]) -> str:
    """`passed`, or why not, for kernel, yardstick and truth of several cases."""
    try:
        numerics.assert_pool_within_budget(cases)
    except AssertionError as error:
        return f"failed: {error}"
    return "passed"


# ---- prefill


def inputs(heads: int, kv_heads: int, head_dim: int, queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """bfloat16, with a mean key and one key that stands out, as a sink's does."""
    query = torch.randn(1, heads, queries, head_dim)
    key = torch.randn(1, kv_heads, keys, head_dim) + torch.randn(1, kv_heads, 1, head_dim)
    key[:, :, 0] *= 3
    value = torch.randn(1, kv_heads, keys, head_dim)
    return query.bfloat16(), key.bfloat16(), value.bfloat16()


def module(heads: int, kv_heads: int) -> Any:
    """What transformers' attention functions want to know of a model's attention."""
    attention: Any = torch.nn.Module()
    attention.num_key_value_groups = heads // kv_heads
    attention.is_causal = True
    return attention


def prefill_gate(heads: int, kv_heads: int, head_dim: int, routes: Tensor) -> str:
    for dtype in (torch.float32, torch.bfloat16):
        cases = []
        for seed in range(GATE_SEEDS):
            torch.manual_seed(seed)
            query, key, value = (x.to(dtype) for x in inputs(heads, kv_heads, head_dim, 200, 330))
            arguments = {
                "query": query, "key": key, "value": value, "routes": routes, "key_mean": key.float().mean((0, 2)),
                "scaling": head_dim**-0.5,
            }  # fmt: skip
            truth = numerics.sink_attention_truth(arguments)
            cases.append((sink_attention(**arguments), reference(Call.of(**arguments)), truth))
        gate = within_budget(cases)
        if gate != "passed":
            return f"{gate} in {dtype}"
    return "passed"


def prefill(heads: int, kv_heads: int, head_dim: int, length: int, routes: tuple[Route, ...], repeats: int) -> Row:
    routes_of = torch.tensor(routes, dtype=torch.uint8)
    gate = prefill_gate(heads, kv_heads, head_dim, routes_of)
    if gate != "passed":
        return failed(gate)
    query, key, value = inputs(heads, kv_heads, head_dim, length, length)
    mean, scaling = key.float().mean((0, 2)), head_dim**-0.5
    attention = module(heads, kv_heads)
    # Repeating the keys costs PyTorch nothing here.
    group = heads // kv_heads
    repeated = {
        dtype: [query.to(dtype), *(x.to(dtype).repeat_interleave(group, 1) for x in (key, value))]
        for dtype in (torch.float32, torch.bfloat16)
    }
    calls: Calls = {
        "ours": lambda: sink_attention(query, key, value, routes=routes_of, key_mean=mean, scaling=scaling),
        "as transformers": lambda: sdpa_attention_forward(attention, query, key, value, None, scaling=scaling),
        "SDPA float32": lambda: scaled_dot_product_attention(*repeated[torch.float32], is_causal=True),
        "SDPA bfloat16": lambda: scaled_dot_product_attention(*repeated[torch.bfloat16], is_causal=True),
    }
    return compared(alternate(calls, repeats), gate)


def mixed_overhead(repeats: int) -> Row:
    """A mixed launch against the head-weighted sum of launches with one route each."""
    heads, kv_heads, head_dim, length = 9, 3, 64, 4096
    gate = prefill_gate(heads, kv_heads, head_dim, torch.tensor(MIXED, dtype=torch.uint8))
    if gate != "passed":
        return failed(gate)
    query, key, value = inputs(heads, kv_heads, head_dim, length, length)
    mean = key.float().mean((0, 2))

    def run(routes: tuple[Route, ...]) -> Callable[[], Tensor]:
        tensor = torch.tensor(routes, dtype=torch.uint8)
        return lambda: sink_attention(query, key, value, routes=tensor, key_mean=mean, scaling=head_dim**-0.5)

    times = alternate({"mixed": run(MIXED), **{route.name: run((route,) * heads) for route in Route}}, repeats)
    parts = sum(times[route.name] * MIXED.count(route) / heads for route in Route)
    return {
        "ours_ms": times["mixed"],
        "best_torch_ms": None,
        "as_transformers_ms": None,
        "ratio": times["mixed"] / parts,
        "gate": gate,
        "parts_ms": parts,
        **{f"all_{route.name.lower()}_ms": times[route.name] for route in Route},
    }


# ---- decode


def decode_gate(bits: int, heads: int, kv_heads: int, head_dim: int) -> str:
    routes = torch.zeros(heads, dtype=torch.uint8)
    scaling = head_dim**-0.5
    for dtype in (torch.float32, torch.bfloat16):
        cases = []
        for seed in range(GATE_SEEDS):
            torch.manual_seed(seed)
            query, key, value = (x.to(dtype) for x in inputs(heads, kv_heads, head_dim, 2, 700))
            codes = CodedKV.encode(key, value, bits=bits)
            truth = numerics.coded_attention_truth(query, codes, routes)
            yardstick = coded_reference(CodedCall.of(query, codes, routes, scaling))
            cases.append((coded_attention(query, codes, routes=routes, scaling=scaling), yardstick, truth))
        gate = within_budget(cases)
        if gate != "passed":
            return f"{gate} in {dtype}"
    return "passed"


class InTurn:
    """The next of several things at each call."""

    def __init__(self, things: list[Any]) -> None:
        self.things, self.at = things, 0

    def __call__(self) -> Any:
        self.at = (self.at + 1) % len(self.things)
        return self.things[self.at]


def clone(codes: CodedKV) -> CodedKV:
    fields = {f.name: getattr(codes, f.name) for f in dataclasses.fields(codes)}
    copied = {name: x.clone() if isinstance(x, Tensor) else x for name, x in fields.items()}
    return CodedKV(**{**copied, "banks": tuple(bank.clone() for bank in codes.banks)})


def decode(bits: int, repeats: int, keys: int = 32768) -> Row:
    heads, kv_heads, head_dim = 9, 3, 64
    gate = decode_gate(bits, heads, kv_heads, head_dim)
    if gate != "passed":
        return failed(gate)
    query, key, value = inputs(heads, kv_heads, head_dim, 1, keys)
    scaling, routes = head_dim**-0.5, torch.zeros(heads, dtype=torch.uint8)
    codes = CodedKV.encode(key, value, bits=bits)
    caches = InTurn([clone(codes) for _ in range(COPIES * 8 // bits)])
    plain = InTurn([(key.clone(), value.clone()) for _ in range(COPIES)])
    floats = InTurn([(key.float(), value.float()) for _ in range(COPIES)])
    attention = module(heads, kv_heads)
    rows = query.view(1, kv_heads, heads // kv_heads, head_dim)

    def grouped(query: Tensor, pair: tuple[Tensor, Tensor]) -> Tensor:
        scores = (query @ pair[0].transpose(-1, -2)).float() * scaling
        return scores.softmax(-1).to(query.dtype) @ pair[1]

    def sdpa() -> Tensor:
        return scaled_dot_product_attention(query, *plain(), enable_gqa=True)

    calls: Calls = {
        "ours": lambda: coded_attention(query, caches(), routes=routes, scaling=scaling),
        "as transformers": lambda: sdpa_attention_forward(attention, query, *plain(), None, scaling=scaling),
        "SDPA bfloat16": sdpa,
        "grouped matmul bfloat16": lambda: grouped(rows, plain()),
        "grouped matmul float32": lambda: grouped(rows.float(), floats()),
    }
    times = alternate(calls, repeats, turn=5)
    exact = (codes.sink_key, codes.sink_value, codes.key, codes.value)
    size = sum(x.numel() * x.element_size() for x in (*codes.banks, *exact))
    read, speed = size / times["ours"] / 1e6, read_bandwidth()
    return compared(
        times,
        gate,
        over_transformers=times["as transformers"] / times["ours"],
        gb_per_s=read,
        machine_gb_per_s=speed,
        bandwidth_share=read / speed,
    )


def read_bandwidth() -> float:
    """GB/s at which all threads read memory that no cache holds: the best of PyTorch's reductions and our own loop."""
    memory = torch.zeros(2**26, dtype=torch.int64)
    kernels = library()
    assert kernels is not None
    calls: Calls = {
        "sum": memory.sum,
        "max": memory.max,
        "loop": lambda: kernels.read(memory.data_ptr(), memory.nbytes, torch.get_num_threads()),
    }
    return float(memory.nbytes / min(alternate(calls, 9).values()) / 1e6)


# ---- the whole model


def whole_model(name: str, repeats: int) -> Row:
    with torch.inference_mode(False):
        (row,) = model.measure([name], repeats=repeats)
    return {key: value for key, value in row.items() if key != "name"}


CASES: dict[str, Callable[[int], Row]] = {
    "prefill_int8_4096": lambda repeats: prefill(9, 3, 64, 4096, (INT8,) * 9, repeats),
    "prefill_mixed_4096": lambda repeats: prefill(9, 3, 64, 4096, MIXED, repeats),
    "decode_8bit_32k": lambda repeats: decode(8, repeats),
    "decode_4bit_32k": lambda repeats: decode(4, repeats),
    "prefill_d128_2048": lambda repeats: prefill(32, 8, 128, 2048, (INT8,) * 32, repeats),
    "model_prefill": lambda repeats: whole_model("model_prefill", repeats),
    "model_decode": lambda repeats: whole_model("model_decode", repeats),
    "mixed_overhead": mixed_overhead,
}
AIMS = {
    "prefill_int8_4096": 4,
    "prefill_mixed_4096": 3,
    "decode_8bit_32k": 3.5,
    "decode_4bit_32k": 4.5,
    "prefill_d128_2048": 3,
    "model_prefill": 1.5,
    "model_decode": 1.4,
    "mixed_overhead": 1.10,
}
"""Least ratio to the best of PyTorch, on AVX-512; of `mixed_overhead` the largest ratio to its parts."""
FEATURES = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_vnni": "VNNI", "avx512_bf16": "bf16", "amx_int8": "AMX"}


if __name__ == "__main__":
    main()
