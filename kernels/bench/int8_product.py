"""What an INT8 product costs: PyTorch's, bitsandbytes', and the floating-point products they replace. Beside them the
whole quantized layer in one call (`layer`): bfloat16 in and out, quantization, scales and 1 % native columns included.

    python kernels/bench/int8_product.py [--json FILE]

SmolLM2-135M's layer shapes, N outputs times K inputs, for M rows. All run in one process, alternating; medians.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import bitsandbytes  # noqa: F401  (registers its operators)
import torch
from torch import Tensor

from quantsink.kernels import Layer, quantize_per_channel, quantized_linear

ROWS = (1, 8, 32, 512, 1024)
SHAPES = {"q_proj, o_proj": (576, 576), "k_proj, v_proj": (192, 576), "gate, up": (1536, 576), "down": (576, 1536)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--repeats", type=int, default=41)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()

    rows: list[dict[str, str | int | float]] = []
    for m in ROWS:
        for layer, (n, k) in SHAPES.items():
            times = measure(m, n, k, args.repeats, torch.device(args.device))
            rows.append({"layer": layer, "m": m, "n": n, "k": k, **{f"{name}_us": us for name, us in times.items()}})
            print(
                f"M {m:4}  {n:4} x {k:4}  " + "  ".join(f"{name} {us:8.1f} us" for name, us in times.items()),
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps({"threads": torch.get_num_threads(), "rows": rows}, indent=2) + "\n")


@torch.inference_mode()
def measure(m: int, n: int, k: int, repeats: int, device: torch.device) -> dict[str, float]:
    """Median microseconds of each product; one that refuses the shape is left out."""
    torch.manual_seed(0)
    x, w = torch.randn(m, k, device=device), torch.randn(n, k, device=device)
    x16, w16 = x.bfloat16(), w.bfloat16()
    x8, w8 = (torch.randint(-127, 128, shape, dtype=torch.int8, device=device) for shape in ((m, k), (n, k)))
    codes, scale = quantize_per_channel(w)
    index = torch.arange(0, k, 100, dtype=torch.int32, device=device)
    layer = Layer(codes, scale, native_columns=w16[:, index.long()].contiguous(), native_column_index=index)
    products: dict[str, Callable[[], Tensor]] = {
        "layer": lambda: quantized_linear(x16, None, layer),
        "int_mm": lambda: torch._int_mm(x8, w8.t()),
        "bitsandbytes": lambda: torch.ops.bitsandbytes.int8_linear_matmul(x8, w8),
        "fp32": lambda: x @ w.t(),
        "bf16": lambda: x16 @ w16.t(),
    }
    for name, run in list(products.items()):
        try:
            run()
        except RuntimeError as error:
            print(f"{name} refuses M {m}: {error}")
            del products[name]
    times: dict[str, list[float]] = {name: [] for name in products}
    for _ in range(repeats):
        for name, run in products.items():
            wait(device)
            start = time.perf_counter()
            run()
            wait(device)
            times[name].append((time.perf_counter() - start) * 1e6)
    return {name: statistics.median(durations) for name, durations in times.items()}


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
