"""What a laboratory command writes: a folder with the figures as JSON, the tables as Markdown, and the pictures."""

import dataclasses
import importlib.metadata
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from quantsink.eval.lab.tables import Table, markdown
from quantsink.files import contents, write_bytes, write_json, write_text

FACTS, TABLES = "lab.json", "tables.md"


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one experiment. `data` is plain and goes to JSON as it is."""

    name: str
    title: str
    data: Mapping[str, Any]
    tables: tuple[Table, ...]
    pictures: Mapping[str, bytes]
    seconds: float
    """From the start of the experiment to its end, on the machine of `facts`."""

    def facts(self) -> dict[str, Any]:
        machine = {"processor": platform.machine(), "cores": os.cpu_count()}
        versions = {
            "python": platform.python_version(),
            "quantsink": importlib.metadata.version("quantsink"),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        return {
            "experiment": self.name,
            "seconds": round(self.seconds, 1),
            "machine": machine,
            "versions": versions,
            **self.data,
        }


def save(findings: Sequence[Finding], folder: Path) -> None:
    """Into an existing folder."""
    write_json(folder / FACTS, {"experiments": [finding.facts() for finding in findings]})
    parts = []
    for finding in findings:
        pictures = "".join(f"\n![{finding.title}]({name})\n" for name in finding.pictures)
        parts.append(f"## {finding.title}\n\n{markdown(finding.tables)}{pictures}")
        for name, data in finding.pictures.items():
            write_bytes(folder / name, data)
    write_text(folder / TABLES, "\n".join(parts))


def is_laboratory(folder: Path) -> bool:
    """Whether a folder holds what `save` wrote and nothing else."""
    names = contents(folder)
    return FACTS in names and all(name in (FACTS, TABLES) or name.endswith(".png") for name in names)
