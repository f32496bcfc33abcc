"""What quantization cost: perplexity, divergence from the reference, true bits, and the report that holds them."""

from quantsink.eval.caches import cache_methods, parse_widths
from quantsink.eval.divergence import PREFILL
from quantsink.eval.measurement import measure
from quantsink.eval.methods import METHODS, Method, from_recipe, parse_methods
from quantsink.eval.perplexity import EvalText, EvalWindow, cut, read
from quantsink.eval.report import Report
from quantsink.eval.rolling import RollingCurve, RollingPoint, Stream, check_rolling, read_stream
from quantsink.eval.rows import CalibrationFacts, Conditions, Footprint, Row, compare_conditions

__all__ = [
    "METHODS",
    "PREFILL",
    "CalibrationFacts",
    "Conditions",
    "EvalText",
    "EvalWindow",
    "Footprint",
    "Method",
    "Report",
    "RollingCurve",
    "RollingPoint",
    "Row",
    "Stream",
    "cache_methods",
    "check_rolling",
    "compare_conditions",
    "cut",
    "from_recipe",
    "measure",
    "parse_methods",
    "parse_widths",
    "read",
    "read_stream",
]
