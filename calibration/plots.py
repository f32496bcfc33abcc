"""Heat maps of a calibration's heads: one row per layer, one column per head."""

import io
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from quantsink.calibration.calibration import Calibration, head_means
from quantsink.calibration.stored import PICTURES
from quantsink.files import write_bytes


def heat_map(calibration: Calibration, field: str, title: str) -> bytes:
    """PNG of one per-head mean (`bos_mass`, `entropy`, ...), all domains together, on a scale from 0 to 1."""
    total = calibration.total.heads
    width = max(layer.heads for layer in calibration.layers)
    grid = np.full((len(calibration.layers), width), np.nan)
    for row, layer in enumerate(calibration.layers):
        grid[row, : layer.heads] = head_means(total[layer.name])[field].numpy()
    layers = len(grid)
    figure = Figure(figsize=(max(4.2, 0.34 * width + 2.2), max(3.0, 0.2 * layers + 1.4)), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image = axes.imshow(grid, aspect="auto", vmin=0, vmax=1, cmap="viridis", interpolation="nearest")
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("head")
    axes.set_ylabel("layer")
    axes.set_xticks(range(0, width, max(1, width // 16)))
    axes.set_yticks(range(0, layers, max(1, layers // 15)))
    figure.colorbar(image, ax=axes, fraction=0.08, pad=0.03)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": "quantsink"})
    return buffer.getvalue()


def heat_maps(calibration: Calibration) -> dict[str, bytes]:
    """The files that `quantsink calibrate` writes beside its tables."""
    name = calibration.model.rstrip("/").rpartition("/")[2]
    return {
        PICTURES[0]: heat_map(calibration, "bos_mass", f"Weight on the first token\n{name}"),
        PICTURES[1]: heat_map(calibration, "entropy", f"Attention entropy (1 = uniform)\n{name}"),
    }


def save_with_pictures(calibration: Calibration, folder: Path) -> None:
    """Write what `quantsink calibrate` leaves: first the pictures, then the tables, whose JSON file comes last."""
    for name, png in heat_maps(calibration).items():
        write_bytes(folder / name, png)
    calibration.save(folder)
