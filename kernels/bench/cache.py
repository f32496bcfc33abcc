"""The KV cache at 32,768 tokens: a decoding step and bytes, `SinkCache` against transformers' `DynamicCache`.

    OMP_WAIT_POLICY=passive python kernels/bench/cache.py [--json FILE] [--only NAME]

The model is SmolLM2-135M in bfloat16. Both caches are filled with the same random keys and values, without running the
model over them; then the model takes one token at a time on top, the two in turn. Before anything is timed, the logits
after 1,024 tokens of real text through the cache must lie within LIMITS of those through `DynamicCache`.
`cache_bytes_4bit_32k` fills each cache in a process of its own and reads how much memory that process came to hold.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from model import TEXT, load, text
from torch import Tensor
from transformers import DynamicCache

from quantsink.cache.layer import SinkLayer
from quantsink.hf.sink_cache import SinkCache
from quantsink.models.architecture import Architecture
from quantsink.models.inputs import cache_argument
from quantsink.plan import CachePlan
from quantsink.recipe import KVCache

TOKENS = 32768
CHUNK = 1024
LIMITS = {8: 0.002, 4: 0.05}
"""Largest mean KL divergence, in nats a token, from `DynamicCache`'s logits that is still timed, by bits."""
NAMES = ("cache_decode_8bit_32k", "cache_decode_4bit_32k", "cache_bytes_4bit_32k")

Row = dict[str, str | float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--only", choices=NAMES, action="append", help="only this one; may be repeated")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--fill", choices=("ours", "transformers"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.fill:
        print(json.dumps(filled(args.fill)))
        return
    rows = []
    for name in args.only or NAMES:
        row = {
            "name": name,
            **(memory() if name == "cache_bytes_4bit_32k" else decode(8 if "8bit" in name else 4, args)),
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"threads": torch.get_num_threads(), "rows": rows}, indent=2) + "\n")


def uniform(model: Any, bits: int) -> CachePlan:
    """Every head at one width, four sinks, no calibration: time and bytes do not depend on one."""
    layers = Architecture.of(model).attentions
    options = KVCache(sink_size=4, rounding="nearest")
    return CachePlan(options, {layer.name: (bits,) * layer.kv_heads for layer in layers})


def states(model: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Random keys and values `[1, KVH, CHUNK, D]`, TOKENS in all."""
    layer = Architecture.of(model).attentions[0]
    generator = torch.Generator().manual_seed(0)
    shape = (1, layer.kv_heads, CHUNK, layer.head_dim)
    for _ in range(TOKENS // CHUNK):
        yield (
            torch.randn(shape, generator=generator).to(model.dtype),
            torch.randn(shape, generator=generator).to(model.dtype),
        )


def fill(model: Any, cache: Any) -> None:
    for key, value in states(model):
        for layer in cache.layers:
            layer.update(key, value)
            if isinstance(layer, SinkLayer):
                layer.begin(layer.module(), None)
                layer.commit()


@torch.inference_mode()
def decode(bits: int, args: argparse.Namespace) -> Row:
    model, tokenizer = load("bfloat16")
    name = cache_argument(model)
    kl = divergence(model, text(tokenizer, TEXT)[0], bits)
    if kl > LIMITS[bits]:
        return {"gate": f"failed: KL {kl:.5f} above {LIMITS[bits]}"}
    caches = {"as_transformers": DynamicCache(config=model.config), "ours": SinkCache(model, uniform(model, bits))}
    for cache in caches.values():
        fill(model, cache)
    token = torch.tensor([[5]])
    times: dict[str, list[float]] = {key: [] for key in caches}
    for turn in range(args.repeats + 2):
        for key, cache in caches.items():
            start = time.perf_counter()
            model(token, **{name: cache})
            if turn >= 2:
                times[key].append((time.perf_counter() - start) * 1e3)
    ours, torch_ms = statistics.median(times["ours"]), statistics.median(times["as_transformers"])
    return {
        "ours_ms": ours,
        "best_torch_ms": torch_ms,
        "as_transformers_ms": torch_ms,
        "ratio": torch_ms / ours,
        "gate": "passed",
        "kl": kl,
        "bytes": caches["ours"].nbytes(),
        "bytes_bf16": sum(layer.keys.nbytes + layer.values.nbytes for layer in caches["as_transformers"].layers),
    }


def divergence(model: Any, ids: Tensor, bits: int) -> float:
    """Mean KL of the logits through a `SinkCache` from those through a `DynamicCache`: a prompt of 128, then 32 at a
    time."""
    log_probs = []
    for cache in (DynamicCache(config=model.config), SinkCache(model, uniform(model, bits))):
        pieces = (ids[:, :128], *ids[:, 128:].split(32, 1))
        rows = [model(piece, **{cache_argument(model): cache}).logits[0] for piece in pieces]
        log_probs.append(torch.cat(rows)[128:].float().log_softmax(-1))
    return float((log_probs[0].exp() * (log_probs[0] - log_probs[1])).sum(-1).mean())


# Memory.


def memory() -> Row:
    """Bytes by which a process grew while it filled each cache."""
    measured: dict[str, dict[str, int]] = {}
    for which in ("ours", "transformers"):
        command = [sys.executable, __file__, "--fill", which]
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            return {"gate": f"failed: {done.stderr.strip().splitlines()[-1][:200]}"}
        measured[which] = json.loads(done.stdout.strip().splitlines()[-1])
    ours, theirs = measured["ours"], measured["transformers"]
    return {
        "gate": "passed",
        "ours_bytes": ours["grown"],
        "as_transformers_bytes": theirs["grown"],
        "ratio": ours["grown"] / theirs["grown"],
        "ours_peak_bytes": ours["peak"],
        "as_transformers_peak_bytes": theirs["peak"],
        "nbytes": ours["nbytes"],
    }


@torch.inference_mode()
def filled(which: str) -> dict[str, int]:
    model, _ = load("bfloat16")
    cache: Any = SinkCache(model, uniform(model, 4)) if which == "ours" else DynamicCache(config=model.config)
    key, value = next(states(model))
    warm: Any = SinkCache(model, uniform(model, 4)) if which == "ours" else DynamicCache(config=model.config)
    for layer in warm.layers:
        layer.update(key, value)
        if isinstance(layer, SinkLayer):
            layer.begin(layer.module(), None)
            layer.commit()
    before = resident()
    fill(model, cache)
    after, peak = resident(), resident("VmHWM")
    held = cache.nbytes() if which == "ours" else sum(x.keys.nbytes + x.values.nbytes for x in cache.layers)
    return {"grown": after - before, "peak": peak - before, "nbytes": held}


def resident(field: str = "VmRSS") -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
