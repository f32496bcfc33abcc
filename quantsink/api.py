"""The Python face: calibrate, quantize, load. Keywords are the command line's options."""

from pathlib import Path
from typing import Any

from quantsink.calibration.calibrate import calibrate
from quantsink.calibration.calibration import Calibration
from quantsink.calibration.routing import plan
from quantsink.checkpoint.save_load import load, save
from quantsink.hf.config import QuantSinkConfig
from quantsink.hf.convert import apply, check_unquantized
from quantsink.hf.quantizer import finish
from quantsink.hf.sink_cache import SinkCache
from quantsink.models.architecture import Architecture
from quantsink.models.fingerprint import model_fingerprint
from quantsink.models.source import check_not_offloaded
from quantsink.recipe import Recipe

__all__ = ["Calibration", "Recipe", "SinkCache", "calibrate", "load", "quantize", "save"]


def quantize(model: Any, calibration: Calibration | str | Path, recipe: str | Path | Recipe = "w8a8") -> Any:
    """Quantize `model` in place and return it; `model.save_pretrained(folder)` then writes a checkpoint like any other.

    Args:
        model: a transformers causal language model with the calibrated weights.
        calibration: what `calibrate` returned, or its folder.
        recipe: a preset (`w8a16`, `w8a8`, `w8a8-static`), a JSON file, or a `Recipe`.

    Raises:
        ModelError: quantized already, or offloaded. CalibrationError: calibrated on other weights.
        RecipeError: a bad recipe.
        The model has not been changed then.
    """
    check_unquantized(model)
    check_not_offloaded(model)
    found = calibration if isinstance(calibration, Calibration) else Calibration.load(calibration)
    decided = plan(found, Recipe.load(recipe))
    found.check_model(model_fingerprint(model), Architecture.of(model), type(model).__name__)
    config = QuantSinkConfig.of(decided)
    apply(model, decided)
    finish(model, config)
    return model
