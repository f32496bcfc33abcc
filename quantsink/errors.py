"""Every error that a user can cause. The command line prints its one line and turns it into an exit code."""


class QuantSinkError(Exception):
    """Base of all quantsink errors: one line that names the thing, the place and the remedy."""

    exit_code = 1


class UsageError(QuantSinkError):
    """quantsink was asked for something it cannot mean: a bad option, an unknown recipe key, a taken output folder."""

    exit_code = 2


class RecipeError(UsageError):
    """A recipe that cannot be read or contradicts itself."""


class DataError(QuantSinkError):
    """Text that cannot be read, is empty or gives no tokens."""


class ModelError(QuantSinkError):
    """A model that cannot be found or loaded."""


class ArchitectureError(QuantSinkError):
    """A model whose attention heads or linear layers quantsink cannot establish beyond doubt."""


class CalibrationError(QuantSinkError):
    """A calibration that is damaged, unfinished, or belongs to another model or another setting."""


class CheckpointError(QuantSinkError):
    """A quantized checkpoint with missing, surplus or damaged tensors."""


class CacheError(QuantSinkError):
    """A `SinkCache` that was given something it cannot keep, or was left half-filled by an interrupted pass."""


class OutputError(QuantSinkError):
    """An output that cannot be written."""
