"""`quantsink inspect`: what a calibration or a checkpoint holds, without loading the model."""

from pathlib import Path
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from safetensors import SafetensorError, safe_open

from quantsink.calibration.calibration import Calibration
from quantsink.calibration.stored import FACTS
from quantsink.calibration.summary import as_dict, render
from quantsink.checkpoint.save_load import payload_bytes, read_config
from quantsink.errors import CheckpointError, UsageError
from quantsink.hf.config import QuantSinkConfig
from quantsink.kernels import Route
from quantsink.layers.tables import TABLE
from quantsink.strict_json import one_line, printable


def describe(path: Path) -> tuple[dict[str, Any], RenderableType]:
    """A calibration folder or a checkpoint folder as a JSON object and as tables that rich prints.

    Raises:
        UsageError: the folder is neither.
        CalibrationError, CheckpointError: it is damaged.
    """
    if (path / FACTS).is_file():
        calibration = Calibration.load(path)
        return {"kind": "calibration", **as_dict(calibration, str(path))}, render(calibration)
    if (path / "config.json").is_file():
        facts = _checkpoint(path)
        return facts, _render_checkpoint(facts)
    raise UsageError(f"{path}: neither a calibration ({FACTS}) nor a checkpoint (config.json)")


def _checkpoint(path: Path) -> dict[str, Any]:
    raw = read_config(path)
    try:
        config = QuantSinkConfig(**raw)
    except TypeError as error:
        raise CheckpointError(
            f"{path / 'config.json'}: quantization_config is damaged: {one_line(error)}; export again"
        ) from error
    bytes_by_type: dict[str, int] = {}
    routes: dict[str, list[int]] = {}
    for file in sorted(path.glob("*.safetensors")):
        try:
            with safe_open(file, "pt") as shard:
                for name in shard.keys():  # noqa: SIM118
                    tensor = shard.get_tensor(name)
                    dtype = str(tensor.dtype).removeprefix("torch.")
                    bytes_by_type[dtype] = bytes_by_type.get(dtype, 0) + tensor.nbytes
                    if name.endswith(f".{TABLE}.routes"):
                        if tensor.dtype != torch.uint8 or tensor.dim() != 1 or bool((tensor > max(Route)).any()):
                            raise CheckpointError(f"{printable(name)} in {file} holds invalid values; export again")
                        routes[name.removesuffix(f".{TABLE}.routes")] = tensor.tolist()
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{file}: damaged: {one_line(error)}; fetch or export the checkpoint again"
            ) from error
    by_route = {route.name.lower(): sum(row.count(int(route)) for row in routes.values()) for route in Route}
    return {
        "kind": "checkpoint",
        "format_version": config.format_version,
        "recipe": config.parsed().to_dict(),
        "sink_size": config.sink_size,
        "linears": len(config.linears),
        "native_rows": sum(rows for rows, _ in config.linears.values()),
        "native_columns": sum(columns for _, columns in config.linears.values()),
        "heads": by_route,
        "bytes": bytes_by_type,
        "payload_bytes": payload_bytes(path),
        "layers": {name: [Route(r).name.lower() for r in row] for name, row in sorted(routes.items(), key=_by_number)},
    }


def _by_number(item: tuple[str, Any]) -> list[tuple[bool, int | str]]:
    return [(not part.isdigit(), int(part) if part.isdigit() else part) for part in item[0].split(".")]


def _render_checkpoint(facts: dict[str, Any]) -> RenderableType:
    size = Table(title="Bytes", title_justify="left")
    size.add_column("type")
    size.add_column("bytes", justify="right")
    for dtype, count in sorted(facts["bytes"].items(), key=lambda item: -item[1]):
        size.add_row(dtype, f"{count:,}")
    size.add_row("on disk", f"{facts['payload_bytes']:,}", style="bold")
    recipe = facts["recipe"]
    summary = (
        f"weights {recipe['weights']}, activations {recipe['activations']['kind']}, "
        f"attention {recipe['attention']['kind']}; {facts['linears']} INT8 linear layers, "
        f"{facts['native_rows']} native rows, {facts['native_columns']} native columns"
    )
    parts: list[RenderableType] = [Text(summary), size]
    if facts["layers"]:
        table = Table(title="Heads by route: S sink, i int8, N native", title_justify="left")
        table.add_column("attention")
        table.add_column("routes")
        letters = {"sink": "S", "int8": "i", "native": "N"}
        for name, row in facts["layers"].items():
            table.add_row(name, " ".join(letters[route] for route in row))
        parts.append(table)
    return Group(*parts)
