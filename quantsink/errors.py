"""Every error that a user can cause. The command line prints it as one line and exits with its code."""


class QuantSinkError(Exception):
    """Base of all quantsink errors: one line that names the thing, the place and the remedy."""

    exit_code = 1


class UsageError(QuantSinkError):
    """Wrong usage: an invalid option, an unknown recipe key, an output folder that is not empty."""

    exit_code = 2


class RecipeError(UsageError):
    """A recipe that cannot be read or contradicts itself."""


class DataError(QuantSinkError):
    """Text that is unreadable, empty or gives no tokens."""


class ModelError(QuantSinkError):
    """A model that is missing, damaged or already quantized."""


class ArchitectureError(QuantSinkError):
    """A model whose attention heads or linear layers quantsink cannot identify with certainty."""


class CalibrationError(QuantSinkError):
    """A calibration that is damaged, unfinished, or belongs to another model or another setting."""


class CheckpointError(QuantSinkError):
    """A quantized checkpoint with missing, surplus or damaged tensors."""


class CacheError(QuantSinkError):
    """A `SinkCache` that does not fit its model or its input, or that an interrupted pass left half-filled."""


class OutputError(QuantSinkError):
    """An output that cannot be written."""
