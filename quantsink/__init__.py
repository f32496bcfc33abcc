"""quantsink: 8-bit (and smaller) transformers that keep their attention sinks.

Importing it makes `AutoModelForCausalLM.from_pretrained` load quantsink checkpoints (`quantsink.hf.register`). It
imports neither torch nor transformers, starts no device and reads no model.

    model = AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M")
    calibration = quantsink.calibrate(model, tokenizer)
    quantsink.quantize(model, calibration, "w8a8")
    model.save_pretrained("smollm2-w8a8")
"""

import importlib
from typing import TYPE_CHECKING, Any

from quantsink.errors import QuantSinkError
from quantsink.hf.register import register

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
    "load",
    "quantize",
    "save",
]

_MODULES = {name: f"quantsink.{name}" for name in ("calibration", "errors", "eval", "kernels", "recipe")}
"""Modules that are imported when they are first used as attributes."""
_MODULES["integration"] = "quantsink.hf.quantizer"  # an older name, which users may import

register()


def __getattr__(name: str) -> Any:
    """A name of the API, imported when it is first used."""
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in __all__:
        value = getattr(importlib.import_module("quantsink.api"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'quantsink' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
