"""What computing q, k, v and gate, up together brings: the same layers one by one and in one call.

    OMP_WAIT_POLICY=passive python kernels/bench/merged.py [--repeats N]

The layers of several blocks one after the other, so that weights come from memory as they do in a model. bfloat16 in
and out, INT8 activations by token. Both alternate in one process; medians.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from quantsink.kernels import Layer, quantize_per_channel, quantized_linear, quantized_linears
from quantsink.kernels.cpu import library

MODELS = {
    "SmolLM2-135M": (576, {"q, k, v": (576, 192, 192), "gate, up": (1536, 1536)}, {1: 30, 8: 30, 1024: 4}),
    "Llama 3.2 1B": (2048, {"q, k, v": (2048, 512, 512), "gate, up": (8192, 8192)}, {1: 4, 8: 4, 512: 1}),
}
"""Inputs, the outputs of each group, and how many blocks for how many rows."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=31)
    repeats: int = parser.parse_args().repeats
    if library() is None:
        raise SystemExit("kernels/bench/merged.py: the C++ kernels were not built; `make kernels` builds them")
    for model, (inputs, groups, rows) in MODELS.items():
        for m, blocks in rows.items():
            for name, sizes in groups.items():
                separate, merged = measure(m, blocks, inputs, sizes, repeats)
                print(
                    f"{model}  {m:5} rows  {name:9} one by one {separate:7.0f} us a block  together {merged:7.0f} us"
                    f"  ratio {separate / merged:.2f}",
                    flush=True,
                )


@torch.inference_mode()
def measure(rows: int, blocks: int, inputs: int, sizes: tuple[int, ...], repeats: int) -> tuple[float, float]:
    """Median microseconds a block."""
    torch.manual_seed(0)
    x = torch.randn(rows, inputs).bfloat16()
    layers = [[layer(size, inputs) for size in sizes] for _ in range(blocks)]

    def apart() -> list[Tensor]:
        return [quantized_linear(x, None, one) for block in layers for one in block]

    def together() -> list[Tensor]:
        return [part for block in layers for part in quantized_linears(x, None, block) or ()]

    if not all(torch.equal(a, b) for a, b in zip(apart(), together(), strict=True)):
        raise SystemExit("kernels/bench/merged.py: layers computed together differ from the same one by one")
    times: dict[Callable[[], list[Tensor]], list[float]] = {apart: [], together: []}
    for _ in range(repeats):
        for call, durations in times.items():
            start = time.perf_counter()
            call()
            durations.append((time.perf_counter() - start) * 1e6 / blocks)
    return statistics.median(times[apart]), statistics.median(times[together])


def layer(outputs: int, inputs: int) -> Layer:
    return Layer(*quantize_per_channel(torch.randn(outputs, inputs)))


if __name__ == "__main__":
    main()
