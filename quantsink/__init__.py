"""quantsink: 8-bit (and smaller) transformers that keep their attention sinks.

Importing it registers the attention, the quantizer and the operators with transformers and torch, so that
`AutoModelForCausalLM.from_pretrained` loads quantsink checkpoints. It starts no device and reads no model.
"""

import importlib
from typing import TYPE_CHECKING, Any

from quantsink.errors import QuantSinkError
from quantsink.hf import attention
from quantsink.hf import quantizer as integration

if TYPE_CHECKING:
    from quantsink.api import Calibration, Recipe, SinkCache, calibrate, load, quantize, save

__version__ = "0.1.0"

__all__ = [
    "Calibration",
    "QuantSinkError",
    "Recipe",
    "SinkCache",
    "__version__",
    "calibrate",
    "integration",
    "load",
    "quantize",
    "save",
]

attention.register()

_FACE = ("Calibration", "Recipe", "SinkCache", "calibrate", "load", "quantize", "save")


def __getattr__(name: str) -> Any:
    if name in _FACE:
        return getattr(importlib.import_module("quantsink.api"), name)
    raise AttributeError(f"module 'quantsink' has no attribute {name!r}")
