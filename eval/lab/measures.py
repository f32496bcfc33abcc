"""What the experiments measure alike: attention in 8 bits by five methods, and calibration by quantsink itself."""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from quantsink.calibration.calibrate import calibrate
from quantsink.calibration.routing import plan
from quantsink.eval.lab.model import LabModel
from quantsink.eval.lab.quantize import BLOCK, FIXED, PARTS, ROW, Bits, in_8_bits
from quantsink.hf.convert import apply

SINK_HEAD, STRONG = 0.3, 0.8
"""Mean weight on the sink from which a head is called a sink head, and a strong one."""
FRESH = 10**6
"""Added to a seed: data that no training saw."""
SINK, RANDOM = "sink", "random"
METHODS = (FIXED, ROW, BLOCK, SINK, RANDOM)

HeadKey = tuple[int, int]
"""(layer, head)."""


def methods(sinks: int, keys: int, seed: int) -> dict[str, Bits]:
    """The ways to spend 8 bits; `random` keeps as many keys exact as `sink` does, none of them a sink."""
    generator = torch.Generator().manual_seed(seed)
    others = torch.randperm(keys - sinks, generator=generator)[:sinks] + sinks
    return {
        FIXED: Bits(FIXED),
        ROW: Bits(ROW),
        BLOCK: Bits(BLOCK),
        SINK: Bits(BLOCK, exact=tuple(range(sinks))),
        RANDOM: Bits(BLOCK, exact=tuple(int(key) for key in others)),
    }


def single_parts(sinks: int) -> dict[str, Bits]:
    """Some things in 8 bits, the others exact."""
    both = ("scores", "weights")
    return {
        **{part: Bits(BLOCK, parts=(part,)) for part in PARTS},
        "scores and weights": Bits(BLOCK, parts=both),
        "scores and weights, sinks exact": Bits(BLOCK, exact=tuple(range(sinks)), parts=both),
    }


def outputs_in_8_bits(model: LabModel, x: Tensor, ways: dict[str, Bits]) -> tuple[Tensor, dict[str, Tensor]]:
    """Outputs `[B, L, outputs]` in float64: exact, and by the name of each way to spend 8 bits. A copy of the model
    is made double."""
    model, x = copy.deepcopy(model).double(), x.double()

    def run(bits: Bits | None) -> Tensor:
        with in_8_bits(model, bits):
            return model.run(x)

    return run(None), {name: run(bits) for name, bits in ways.items()}


def relative_error(output: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm of what is exact."""
    return float((output.double() - exact.double()).norm() / exact.double().norm())


def weight_by_head(record: Iterable[Tensor], key: int, first_row: int = 0) -> dict[HeadKey, float]:
    """Mean weight on one key of all queries from `first_row` on; `record`: each layer's weights `[B, H, L, K]`."""
    means = [weights[:, :, first_row:, key].double().mean((0, 2)).tolist() for weights in record]
    return {(layer, head): mean for layer, heads in enumerate(means) for head, mean in enumerate(heads)}


def sink_heads(mass: dict[HeadKey, float]) -> tuple[HeadKey, ...]:
    return tuple(key for key, mean in mass.items() if mean >= SINK_HEAD)


def calibrated(
    model: LabModel, inputs: Tensor, length: int, mass: dict[HeadKey, float]
) -> tuple[Any, tuple[HeadKey, ...], float]:
    """By quantsink's own calibration on `inputs`, sequences of `length` tokens: a copy quantized with `w8a8`, the heads
    that calibration calls sink heads, and the largest difference of its BOS mass from `mass`, the recorded weights'."""
    calibration = calibrate(model, None, inputs, seq_len=length, query_rows=None)
    heads = {(head.layer, head.head): head for head in calibration.heads()}
    quantized = copy.deepcopy(model)
    apply(quantized, plan(calibration, "w8a8"))
    difference = max(abs(heads[key].bos_mass - mean) for key, mean in mass.items())
    return quantized, tuple(key for key, head in heads.items() if head.sink), difference
