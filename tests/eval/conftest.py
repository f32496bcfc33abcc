"""A tiny random Llama, text for it, and a calibration in which one head of each layer is a sink head."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from quantsink.calibration.calibrate import calibrate
from quantsink.calibration.calibration import Calibration
from quantsink.eval import EvalText, read

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
    """Makes a model of 2 layers x 4 heads; options are those of its config."""
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
    # Random weights have no sink heads; one made up a layer lets the routes differ.
    found = calibrate(model, tokenizer, str(path), seq_len=48, max_tokens=192)
    for statistics in found.statistics.values():
        for fields in statistics.heads.values():
            fields["bos_mass"][0] = fields["rows"][0] * 0.9
    return found
