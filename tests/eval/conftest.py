"""A tiny random Llama, text for it, and a calibration in which one head of each layer is a sink head."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from quantsink.calibration.calibrate import calibrate
from quantsink.calibration.calibration import Calibration
from quantsink.eval import EvalText, Method, Report, measure, parse_methods, read

Measure = Callable[..., Report]

TEXT = "the first token draws attention whatever follows.\nno other does so. " * 40


def _tiny(**options: Any) -> LlamaForCausalLM:
    settings = {
        "vocab_size": 258,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,
        "tie_word_embeddings": True,
        **options,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**settings)).eval()


@pytest.fixture(scope="session")
def tiny() -> Callable[..., LlamaForCausalLM]:
    """Builds a model of 2 layers x 4 heads; options are those of its config."""
    return _tiny


@pytest.fixture(scope="session")
def model() -> LlamaForCausalLM:
    return _tiny()


@pytest.fixture(scope="session")
def prose(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "prose.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="session")
def text(tokenizer: PreTrainedTokenizerFast, prose: Path) -> EvalText:
    return read(tokenizer, str(prose), length=48, max_windows=4)


@pytest.fixture(scope="session")
def calibration(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Calibration:
    path = tmp_path_factory.mktemp("calibration") / "other.txt"
    path.write_text("calibrated on something else, zebras and quails. " * 20)
    # Random weights have no sink heads; one invented per layer lets the routes differ.
    calibration = calibrate(model, tokenizer, str(path), seq_len=48, max_tokens=192)
    for statistics in calibration.statistics.values():
        for fields in statistics.heads.values():
            fields["bos_mass"][0] = fields["rows"][0] * 0.9
    return calibration


@pytest.fixture(scope="session")
def run(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, calibration: Calibration, text: EvalText
) -> Measure:
    """`measure` on the tiny model; keywords replace its defaults."""

    def call(methods: str | list[Method] = "reference", **options: Any) -> Report:
        settings = {
            "model": model,
            "tokenizer": tokenizer,
            "model_name": "tiny <llama>",
            "calibration": calibration,
            "text": text,
            "methods": parse_methods(methods) if isinstance(methods, str) else methods,
        }
        return measure(**{**settings, **options})

    return call


@pytest.fixture(scope="session")
def report(run: Measure) -> Report:
    return run("all", notes=("its weights lie on a 4-bit grid",))
