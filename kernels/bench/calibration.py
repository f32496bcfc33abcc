"""Calibration of SmolLM2-135M against plain forward passes over the same windows, in turn; medians.

    OMP_WAIT_POLICY=passive python kernels/bench/calibration.py [--windows 10] [--rounds 3]

Prints the processor's name, seconds and their ratio as one JSON object. The time includes tokenizing, hashing the
weights, and the routes' errors on 4 windows.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from quantsink.calibration import calibrate
from quantsink.calibration.text import parse_spec, windows
from quantsink.cli.demo import model_name
from quantsink.models.source import find, quiet_loading

LENGTH, TEXT = 512, "builtin:prose"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=10, help="of 512 tokens")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()

    source = find(model_name())
    with quiet_loading():
        model, tokenizer = source.model("float32"), source.tokenizer()
    sizes = {"seq_len": LENGTH, "max_tokens": args.windows * LENGTH}
    text = windows(tokenizer, parse_spec(TEXT), **sizes)
    calibrations, forwards = [], []
    for _ in range(args.rounds):
        start = time.perf_counter()
        calibrate(model, tokenizer, TEXT, **sizes)
        middle = time.perf_counter()
        with torch.no_grad():
            for ids in text.ids:
                model(ids[None], use_cache=False)
        calibrations.append(middle - start)
        forwards.append(time.perf_counter() - middle)
    row = {
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "windows": len(text.ids),
        "calibrate_s": statistics.median(calibrations),
        "forward_s": statistics.median(forwards),
        "ratio": statistics.median(c / f for c, f in zip(calibrations, forwards, strict=True)),
    }
    print(json.dumps(row))


def processor() -> str:
    """As Linux names it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    main()
