"""From a model, text and a recipe to a plan: streaming statistics, sink heads, tables, routes."""

from quantsink.calibration.calibrate import calibrate
from quantsink.calibration.calibration import Calibration
from quantsink.calibration.records import Head, Settings
from quantsink.calibration.routing import plan
from quantsink.calibration.text import Windows, documents, parse_spec, windows

__all__ = [
    "Calibration",
    "Head",
    "Settings",
    "Windows",
    "calibrate",
    "documents",
    "parse_spec",
    "plan",
    "windows",
]
