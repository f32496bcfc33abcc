"""The Python API: calibrate, quantize, save, load. Its keywords are the command line's options."""

from pathlib import Path
from typing import Any

from quantsink.calibration.calibrate import calibrate
from quantsink.calibration.calibration import Calibration
from quantsink.calibration.routing import plan
from quantsink.checkpoint.save_load import load, save
from quantsink.hf.convert import check_unquantized
from quantsink.hf.quantizer import quantize as quantize_modules
from quantsink.hf.sink_cache import SinkCache
from quantsink.models.architecture import Architecture
from quantsink.models.fingerprint import model_fingerprint
from quantsink.models.source import check_not_offloaded
from quantsink.recipe import Recipe

__all__ = ["Calibration", "Recipe", "SinkCache", "calibrate", "load", "quantize", "save"]


def quantize(model: Any, calibration: Calibration | str | Path, recipe: str | Path | Recipe = "w8a8") -> Any:
    """Quantize `model` in place, as its calibration and a recipe say.

    Example:
        model = AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M")
        tokenizer = AutoTokenizer.from_pretrained("HuggingFaceTB/SmolLM2-135M")
        quantsink.quantize(model, quantsink.calibrate(model, tokenizer), "w8a8")
        model.save_pretrained("smollm2-w8a8")
        tokenizer.save_pretrained("smollm2-w8a8")

    Args:
        model: a transformers model in eval mode, the one that was calibrated. Its linear layers become INT8, and its
            attention is computed by quantsink where the recipe says so. It has no gradients afterwards.
        calibration: what `quantsink.calibrate` returned, or the folder that `quantsink calibrate` wrote.
        recipe: a preset, the path of a JSON file (`quantsink recipe w8a8` prints one), or a `quantsink.Recipe`.
            `w8a16` quantizes weights only and is the closest to the original; `w8a8` also quantizes the inputs of
            linear layers, per token, and attention; `w8a8-static` takes the inputs' scales from the calibration.

    Returns:
        `model` itself. `model.save_pretrained(folder)` writes a checkpoint that transformers loads after
        `import quantsink`.

    Raises:
        ModelError: the model is quantized already, or accelerate keeps some of its weights elsewhere.
        CalibrationError: the calibration is damaged or belongs to other weights.
        RecipeError: the recipe cannot be read or contradicts itself.
        In each case the model is unchanged.
    """
    check_unquantized(model)
    check_not_offloaded(model)
    if not isinstance(calibration, Calibration):
        calibration = Calibration.load(calibration)
    model_plan = plan(calibration, Recipe.load(recipe))
    calibration.check_model(model_fingerprint(model), Architecture.of(model), type(model).__name__)
    return quantize_modules(model, model_plan)
