"""The reference of `quantsink::sink_attention` against transformers' eager attention, on SmolLM2-135M's shape.

    python kernels/bench/reference.py [--json FILE]

Both run in one process, alternating, and medians are compared. Routes are mixed as on the real model: a third of the
heads `int8`, two thirds `sink`. Eager gets the 4-D float mask that transformers builds for it.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import eager_attention_forward

from quantsink.kernels import Route
from quantsink.kernels.sink_attention.call import Call
from quantsink.kernels.sink_attention.reference import reference

HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
CASES = {
    "prefill 256": (256, 256),
    "prefill 1024": (1024, 1024),
    "prefill 4096": (4096, 4096),
    "decode 1024": (1, 1024),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--case", choices=CASES, action="append", help="only this one; may be repeated")
    parser.add_argument("--repeats", type=int, default=11)
    args = parser.parse_args()

    rows = []
    for name in args.case or CASES:
        ours_ms, eager_ms = measure(*CASES[name], repeats=args.repeats)
        ratio = ours_ms / eager_ms
        rows.append({"name": name, "ours_ms": ours_ms, "eager_ms": eager_ms, "ratio": ratio})
        print(f"{name:14}  ours {ours_ms:8.2f} ms   eager {eager_ms:8.2f} ms   ratio {ratio:5.2f}", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"threads": torch.get_num_threads(), "rows": rows}, indent=2) + "\n")


@torch.inference_mode()
def measure(queries: int, keys: int, repeats: int) -> tuple[float, float]:
    """Median milliseconds of ours and of eager."""
    torch.manual_seed(0)
    query = torch.randn(1, HEADS, queries, HEAD_DIM)
    key, value = torch.randn(2, 1, KV_HEADS, keys, HEAD_DIM)
    routes = torch.tensor([Route.INT8, Route.SINK, Route.SINK] * (HEADS // 3), dtype=torch.uint8)
    key_mean = key[:, :, 1:].mean((0, 2))
    visible = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    mask = torch.zeros(1, 1, queries, keys).masked_fill(~visible, torch.finfo(torch.float).min)
    module: Any = torch.nn.Module().eval()
    module.num_key_value_groups = HEADS // KV_HEADS
    scaling = HEAD_DIM**-0.5
    call = Call.of(query=query, key=key, value=value, routes=routes, key_mean=key_mean, scaling=scaling)

    def ours() -> Tensor:
        return reference(call)

    def eager() -> Tensor:
        output: Tensor = eager_attention_forward(module, query, key, value, mask, scaling=scaling)[0]
        return output

    ours(), eager()
    times: dict[Callable[[], Tensor], list[float]] = {ours: [], eager: []}
    for _ in range(repeats):
        for run, durations in times.items():
            start = time.perf_counter()
            run()
            durations.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[ours]), statistics.median(times[eager])


if __name__ == "__main__":
    main()
