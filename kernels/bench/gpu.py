"""The Triton kernels on a CUDA card: each checked against its error budget, then timed against what PyTorch offers.

    python kernels/bench/gpu.py [--check-only] [--only NAME] [--json FILE]

ours counts the quantization of q, k and v. "best" is the fastest of several formulations in PyTorch, in bfloat16 and
float16; "transformers" is what a bfloat16 model executes. Calls alternate, the cache is overwritten before each, and
medians are printed. A shape that fails its budget is not timed, and the exit code is 1, as it is without a CUDA device.
"""

import argparse
import datetime
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from quantsink.kernels import Route, sink_attention
from quantsink.kernels.sink_attention import triton_backend
from quantsink.kernels.sink_attention.call import Call
from quantsink.kernels.sink_attention.reference import reference

BUDGET, FLOOR = 2.0, 1e-7
"""As tests/numerics.py has them: error <= BUDGET x the reference's in the same type, which is at least FLOOR."""
FLUSH_BYTES = 2**28
"""More than any card's second-level cache."""
INT8, SINK, NATIVE = Route.INT8, Route.SINK, Route.NATIVE


@dataclass(frozen=True)
class Case:
    """One shape: `heads` query heads on `kv_heads`, all of `head_dim`; `routes` are repeated over the heads."""

    heads: int
    kv_heads: int
    head_dim: int
    queries: int
    keys: int
    routes: tuple[Route, ...] = (INT8,)
    batch: int = 1

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Keys off centre with one channel large, as models have them; memory as projections leave it."""
        generator = torch.Generator("cuda").manual_seed(0)

        def draw(heads: int, length: int) -> Tensor:
            shape = (self.batch, length, heads, self.head_dim)
            return torch.randn(shape, generator=generator, device="cuda").transpose(1, 2)

        key = draw(self.kv_heads, self.keys) + 2 * draw(self.kv_heads, 1)
        key[..., 0] *= 5
        routes = (self.routes * self.heads)[: self.heads]
        return {
            "query": draw(self.heads, self.queries).to(dtype),
            "key": key.to(dtype),
            "value": draw(self.kv_heads, self.keys).to(dtype),
            "routes": torch.tensor(routes, dtype=torch.uint8, device="cuda"),
            "key_mean": key.mean((0, 2)),
        }


MIXED = (INT8, SINK, NATIVE, INT8, SINK, INT8, SINK, NATIVE, INT8)
"""One head in three `sink`, two of nine `native`."""
TIMED = {
    "prefill_int8_4096": Case(9, 3, 64, 4096, 4096),
    "prefill_mixed_4096": Case(9, 3, 64, 4096, 4096, MIXED),
    "decode_32k": Case(9, 3, 64, 1, 32768),
    "prefill_d128_2048": Case(32, 8, 128, 2048, 2048),
}
CHECKED = {
    f"{name}_d{dim}": Case(9, 3, dim, queries, keys, (INT8, SINK, NATIVE), batch=2)
    for dim in (64, 80, 96, 128, 256)
    for name, queries, keys in (("prefill", 1000, 1000), ("chunk", 65, 333), ("decode", 1, 1000), ("decode8", 8, 333))
}
LIMITS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip": {"clip_row": 8.0, "sink_size": 4},
    "softcap": {"softcap": 30.0, "clip_absolute": 20.0, "s_aux": 1.0},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check-only", action="store_true", help="check every kernel, time nothing")
    parser.add_argument("--only", choices=TIMED, help="time this shape alone")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--repeats", type=int, default=101)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu.py: PyTorch finds no CUDA device; nothing was checked or timed", file=sys.stderr)
        return 1
    if triton_backend.library() is None:
        print("gpu.py: Triton cannot be imported; nothing was checked or timed", file=sys.stderr)
        return 1
    card = torch.cuda.get_device_name()
    print(f"{card}, {datetime.date.today()}, PyTorch {torch.__version__}")
    failed = check_all()
    rows = [] if args.check_only else [row(name, args.repeats) for name in ([args.only] if args.only else TIMED)]
    for r in rows:
        print(
            f"{r['name']:20} ours {ms(r['ours_ms'])}  best {ms(r['best_torch_ms'])} ({r['best']})  "
            f"transformers {ms(r['as_transformers_ms'])}  ratio {ms(r['ratio'])}  gate {r['gate']}"
        )
    if args.json:
        conditions = {"card": card, "date": str(datetime.date.today()), "torch": torch.__version__}
        args.json.write_text(json.dumps({**conditions, "failed": failed, "rows": rows}, indent=2) + "\n")
    return 1 if failed or any(r["gate"] != "passed" for r in rows) else 0


def ms(x: float | None) -> str:
    return "   -   " if x is None else f"{x:7.3f}"


# The gate.


def check_all() -> list[str]:
    """Names of the cases that exceed their budget, after printing one line each."""
    failed = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for name, case in CHECKED.items():
            for limits, options in LIMITS.items():
                error, allowed = errors(case, dtype, options)
                label = f"{name} {str(dtype).removeprefix('torch.')} {limits}"
                if not error <= allowed:
                    failed.append(label)
                    print(f"FAILED  {label}: RMS error {error:.3g}, allowed {allowed:.3g}")
    print(f"checked {3 * len(CHECKED) * len(LIMITS)} cases, {len(failed)} failed")
    return failed


@torch.inference_mode()
def errors(case: Case, dtype: torch.dtype, options: dict[str, Any]) -> tuple[float, float]:
    """(the kernels' RMS error, what is allowed), both relative to the reference in float64."""
    x = case.tensors(dtype)
    options = {
        name: torch.full((case.heads,), value, device="cuda")
        if name in ("clip_row", "clip_absolute", "s_aux")
        else value
        for name, value in options.items()
    }
    actual = sink_attention(**x, scaling=case.head_dim**-0.5, **options).double()
    truth, yardstick = (as_reference(case, x, options, work).double() for work in (torch.float64, dtype))
    size = truth.pow(2).mean().sqrt()
    error, unavoidable = (float((y - truth).pow(2).mean().sqrt() / size) for y in (actual, yardstick))
    return error, BUDGET * max(unavoidable, FLOOR)


def as_reference(case: Case, x: dict[str, Tensor], options: dict[str, Any], dtype: torch.dtype) -> Tensor:
    inputs = {name: x[name].to(dtype) for name in ("query", "key", "value")}
    return reference(Call.of(**{**x, **inputs}, scaling=case.head_dim**-0.5, **options))


# The timings.


def row(name: str, repeats: int) -> dict[str, Any]:
    """One row of the table; without timings where the gate is not passed."""
    case = TIMED[name]
    error, allowed = errors(case, torch.bfloat16, {})
    if not error <= allowed:
        gate = f"failed: RMS error {error:.3g}, allowed {allowed:.3g}"
        empty = dict.fromkeys(("ours_ms", "best_torch_ms", "as_transformers_ms", "ratio"))
        return {"name": name, **empty, "best": None, "gate": gate}
    medians = measure(formulations(case), repeats)
    ours, transformers = medians.pop("ours"), medians["transformers"]
    best = min(medians, key=medians.__getitem__)
    return {
        "name": name,
        "ours_ms": ours,
        "best_torch_ms": medians[best],
        "as_transformers_ms": transformers,
        "ratio": medians[best] / ours,
        "best": best,
        "gate": "passed",
    }


def formulations(case: Case) -> dict[str, Callable[[], object]]:
    """The same attention in several ways: ours, and PyTorch's in both 16-bit types."""
    x = case.tensors(torch.bfloat16)
    scaling, causal = case.head_dim**-0.5, case.queries > 1
    module: Any = torch.nn.Module().eval()
    module.num_key_value_groups, module.is_causal = case.heads // case.kv_heads, True
    ways: dict[str, Callable[[], object]] = {
        "ours": lambda: sink_attention(**x, scaling=scaling),
        "transformers": lambda: sdpa_attention_forward(
            module, x["query"], x["key"], x["value"], None, scaling=scaling, is_causal=causal
        ),
    }
    for dtype in (torch.bfloat16, torch.float16):
        q, k, v = (x[name].to(dtype) for name in ("query", "key", "value"))
        label = str(dtype).removeprefix("torch.")
        ways[f"sdpa {label}"] = lambda q=q, k=k, v=v: scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=scaling, enable_gqa=True
        )
        ways[f"sdpa, heads repeated, {label}"] = lambda q=q, k=k, v=v: scaled_dot_product_attention(
            q, *(t.repeat_interleave(case.heads // case.kv_heads, 1) for t in (k, v)), is_causal=causal, scale=scaling
        )
        ways[f"matmul {label}"] = lambda q=q, k=k, v=v: grouped_matmul(q, k, v, scaling, causal)
    return ways


def grouped_matmul(q: Tensor, k: Tensor, v: Tensor, scaling: float, causal: bool) -> Tensor:
    """Two products per KV head, all query heads of its group at once: q `[B, H, Lq, D]` -> `[B, KVH, G, Lq, D]`."""
    q = q.unflatten(1, (k.shape[1], -1))
    s = (q.flatten(2, 3) @ k.transpose(-1, -2)).unflatten(2, q.shape[2:4]) * scaling
    if causal:
        hidden = torch.ones(q.shape[3], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        s = s.masked_fill(hidden, -torch.inf)
    return s.softmax(-1).flatten(2, 3) @ v


@torch.inference_mode()
def measure(ways: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median milliseconds on the card, the ways in turn."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 3):
        for name, run in ways.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            begin.record()
            run()
            end.record()
            end.synchronize()
            if turn >= 3:
                times[name].append(begin.elapsed_time(end))
    return {name: statistics.median(seen) for name, seen in times.items()}


if __name__ == "__main__":
    sys.exit(main())
