"""The attention laboratory: normalizers and sink mechanisms that compose, models trained in seconds, profiles of real
models, and what 8 bits does to each. Command line: `quantsink lab`; findings: docs/laboratory.md.
"""

from quantsink.eval.lab.attention import AttentionSpec, Inputs, LabAttention
from quantsink.eval.lab.chunks import Chunked
from quantsink.eval.lab.mechanisms import (
    AlternatingSinks,
    ContentSink,
    LearnableSinks,
    OutputGate,
    SinkBias,
    SinksByLength,
    clip_gradients,
    sink_count,
)
from quantsink.eval.lab.mixes import HybridHeads, layer_mix
from quantsink.eval.lab.normalizers import (
    ClippedSoftmax,
    Entmax,
    Normalizer,
    ReLU,
    Softmax,
    Softmax1,
    Sparsemax,
    normalizer,
)
from quantsink.eval.lab.quantize import Bits, in_8_bits
from quantsink.eval.lab.trigger import Task, Training, head_weights, solved, trained
from quantsink.eval.lab.windows import DistanceBias, RelativeBias, SegmentWindow, WindowDecay

__all__ = [
    "AlternatingSinks",
    "AttentionSpec",
    "Bits",
    "Chunked",
    "ClippedSoftmax",
    "ContentSink",
    "DistanceBias",
    "Entmax",
    "HybridHeads",
    "Inputs",
    "LabAttention",
    "LearnableSinks",
    "Normalizer",
    "OutputGate",
    "ReLU",
    "RelativeBias",
    "SegmentWindow",
    "SinkBias",
    "SinksByLength",
    "Softmax",
    "Softmax1",
    "Sparsemax",
    "Task",
    "Training",
    "WindowDecay",
    "clip_gradients",
    "head_weights",
    "in_8_bits",
    "layer_mix",
    "normalizer",
    "sink_count",
    "solved",
    "trained",
]
