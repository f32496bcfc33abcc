"""The partial state of a calibration on disk, so that a killed one can be resumed to the same bits."""

import dataclasses
import json
import time
from collections.abc import Mapping
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from quantsink.calibration.calibration import Calibration
from quantsink.calibration.collect import Collector
from quantsink.calibration.processes import Processes
from quantsink.calibration.records import Domain, Settings
from quantsink.calibration.statistics import Fields
from quantsink.calibration.stored import FACTS, PARTIAL, SCHEMA, partials
from quantsink.errors import CalibrationError
from quantsink.files import write_bytes

SAVE_EVERY = 10.0
"""Seconds between two saves of the partial statistics, at least."""
SAVE_SHARE = 0.05
"""Largest share of the time that saving may take."""


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a calibration is made from: fingerprints of model and tokenizer, the settings, the texts."""

    model: tuple[str, str]
    tokenizer: str
    settings: Settings
    domains: tuple[Domain, ...]


class PartialState:
    """One process's safetensors file of unfinished statistics, written whole; `identity` is its metadata."""

    def __init__(self, folder: Path | None, inputs: Inputs, processes: Processes) -> None:
        name = PARTIAL if processes.first else f"partial-{processes.rank}-of-{processes.world}.safetensors"
        self.folder, self.path = folder, folder / name if folder is not None else None
        self.inputs, self.next_save = inputs, time.monotonic() + SAVE_EVERY
        self.identity = {
            "schema": str(SCHEMA),
            "number of processes": str(processes.world),
            "model": inputs.model[0],
            "tokenizer": inputs.tokenizer,
            "versions of torch and transformers": f"{torch.__version__} {transformers.__version__}",
            "settings": json.dumps(dataclasses.asdict(inputs.settings)),
            "data": json.dumps([dataclasses.asdict(domain) for domain in inputs.domains]),
        }

    def save(self, collectors: Mapping[str, Collector]) -> None:
        """Write the statistics if the last save is long enough ago."""
        started = time.monotonic()
        if self.path is None or started < self.next_save:
            return
        tensors = {
            f"{domain}/{module}/{field}": tensor.contiguous()
            for domain, collector in collectors.items()
            for group in groups(collector)
            for module, fields in group.items()
            for field, tensor in fields.items()
        }
        windows = {domain: collector.windows for domain, collector in collectors.items()}
        write_bytes(self.path, save(tensors, {**self.identity, "windows": json.dumps(windows)}))
        ended = time.monotonic()
        self.next_save = ended + max(SAVE_EVERY, (ended - started) / SAVE_SHARE)

    def read(self, collectors: Mapping[str, Collector]) -> None:
        """Put the statistics of the file, where there is one, into the collectors.

        Raises:
            CalibrationError: damaged, or of another model, text, settings or number of processes.
        """
        if self.path is None or not self.path.is_file():
            return
        try:
            with safe_open(self.path, "pt") as file:
                metadata = file.metadata() or {}
                for key, value in self.identity.items():
                    if metadata.get(key) != value:
                        raise CalibrationError(
                            f"{self.path}: begun with another {key}; repeat the first command with --resume, "
                            "or start again with --force"
                        )
                windows = json.loads(metadata["windows"])
                for domain, collector in collectors.items():
                    collector.windows = windows[domain]
                    for group in groups(collector):
                        for module, fields in group.items():
                            for field in fields:
                                fields[field] = file.get_tensor(f"{domain}/{module}/{field}").clone()
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise CalibrationError(f"{self.path}: damaged: {error}; start again with --force") from error

    def finished(self) -> Calibration | None:
        """The complete calibration that the folder already holds.

        Raises:
            CalibrationError: it is of another model, text or settings.
        """
        if self.folder is None or partials(self.folder) or not (self.folder / FACTS).is_file():
            return None
        calibration = Calibration.load(self.folder)
        same = {
            "model": calibration.fingerprint == self.inputs.model,
            "tokenizer": calibration.tokenizer_fingerprint == self.inputs.tokenizer,
            "settings": calibration.settings == self.inputs.settings,
            "data": calibration.domains == self.inputs.domains,
        }
        for key, equal in same.items():
            if not equal:
                raise CalibrationError(f"{self.folder}: finished with another {key}; choose another -o or pass --force")
        return calibration


def groups(collector: Collector) -> tuple[dict[str, Fields], ...]:
    """Fields by attention module, by linear layer, by experts module."""
    return collector.heads, collector.linears, collector.experts
