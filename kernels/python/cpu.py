"""The C++ kernels, where they were built: loaded once, and said once where they are missing."""

import functools
import logging
from importlib import import_module
from types import ModuleType


@functools.cache
def library() -> ModuleType | None:
    """`quantsink.kernels._cpu`, or None with one warning: the reference then computes the same, many times slower."""
    try:
        return import_module("quantsink.kernels._cpu")
    except ImportError as error:
        logging.getLogger(__name__).warning(
            "quantsink's C++ kernels were not built (%s): CPU attention runs the slower PyTorch reference. To build"
            " them, install a C++ compiler (Debian: apt-get install g++) and quantsink again",
            error,
        )
        return None
