"""The Python face: calibrate, quantize, load. Keywords are the command line's options."""

from pathlib import Path
from typing import Any

from quantsink.apply import apply, check_unquantized
from quantsink.architecture import Architecture
from quantsink.cache import SinkCache
from quantsink.calibration.calibrate import calibrate
from quantsink.calibration.calibration import Calibration
from quantsink.calibration.routing import plan
from quantsink.checkpoint import load, save
from quantsink.integration import QuantSinkConfig, finish
from quantsink.recipe import Recipe
from quantsink.source import check_not_offloaded, model_fingerprint

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
