"""Decoding never makes a full-precision copy of a cache: the peak memory of a process that decodes over a large one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs /proc to read peak memory")

TOKENS, CHUNK = 16384, 512


def child(bits: int) -> None:
    """Fill one layer of 8 KV heads of 128, then decode; print peak memory before and after."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from quantsink.hf.sink_cache import SinkCache
    from quantsink.models.inputs import cache_argument
    from quantsink.plan import CachePlan
    from quantsink.recipe import KVCache

    def peak() -> int:
        line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) * 1024

    torch.set_num_threads(2)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=8,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=2 * TOKENS,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    options = KVCache(sink_size=4, rounding="nearest")
    plan = CachePlan(options, {"model.layers.0.self_attn": (bits,) * 8})
    argument = cache_argument(model)

    def run(cache: SinkCache, tokens: int) -> None:
        with torch.inference_mode():
            for piece in (32, 1, 1, 1):
                model(torch.zeros(1, piece, dtype=torch.long), **{argument: cache})
                tokens += piece

    run(SinkCache(model, plan), 0)
    cache = SinkCache(model, plan)
    layer = cache.layers[0]
    for _ in range(TOKENS // CHUNK):
        layer.update(torch.randn(1, 8, CHUNK, 128), torch.randn(1, 8, CHUNK, 128))
        layer.begin(layer.module(), None)
        layer.commit()
    before = peak()
    for _ in range(3):
        run(cache, TOKENS)
    print(json.dumps({"before": before, "after": peak(), "held": cache.nbytes(), "full": TOKENS * 8 * 128 * 2 * 4}))


@pytest.mark.parametrize("bits", [pytest.param(8, marks=pytest.mark.slow), 2])
def test_decoding_needs_little_memory_beside_the_codes(bits: int) -> None:
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, __file__, str(bits)], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    memory = json.loads(done.stdout.splitlines()[-1])
    token = memory["full"] // TOKENS
    assert memory["held"] < memory["full"] * (bits + 0.5) / 32 * 1.04 + 140 * token
    assert memory["after"] - memory["before"] < memory["full"] / 16


if __name__ == "__main__":
    child(int(sys.argv[1]))
