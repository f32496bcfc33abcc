"""Attention weights of a real model, a block of query rows at a time, and the text it reads."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from torch import Tensor

from quantsink.errors import ArchitectureError, ModelError
from quantsink.eval.lab import profile_weights
from quantsink.eval.lab.profile import (
    position_shares,
)
from quantsink.eval.lab.profile_weights import Text, read_decoder, read_text
from quantsink.models.architecture import Architecture

Build = Callable[..., Any]
HARD_CAP = {"gemma2": {"attn_logit_softcapping": 0.3}}
"""Random weights make small scores: a cap that they feel."""


def build(name: str, tiny_llama: Build, tiny_gemma: Build) -> Any:
    if name == "gemma":
        return tiny_gemma(initializer_range=0.3)
    return (
        tiny_llama(initializer_range=0.3)
        if name == "llama"
        else families.FAMILIES[name].build(**HARD_CAP.get(name, {}))
    )


@pytest.fixture(params=["llama", "gemma", "gpt_oss", "gemma2"])
def model(request: pytest.FixtureRequest, tiny_llama: Build, tiny_gemma: Build) -> Any:
    return build(request.param, tiny_llama, tiny_gemma)


def test_no_block_of_weights_is_large(tiny_llama: Build, text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []
    plain = profile_weights.block_weights

    def watched(*arguments: Any) -> tuple[int, Tensor]:
        start, weights = plain(*arguments)
        shapes.append(weights.shape)
        return start, weights

    monkeypatch.setattr(profile_weights, "block_weights", watched)
    model = tiny_llama()
    position_shares(model, read_decoder(model), text, 512, rows=None)
    assert {shape[2] for shape in shapes} == {64, 48}  # 496 rows
    assert max(shape[3] for shape in shapes) == 512


def test_windows_with_and_without_bos_begin_with_the_same_text(text: Text) -> None:
    with_bos, without = text.cut(100, 3), text.cut(100, 3, bos=False)
    assert with_bos[:, 0].tolist() == [text.bos] * 3
    assert torch.equal(with_bos[:, 1:], without[:, :-1])
    assert without[1].tolist() == text.ids[100:200].tolist()


def test_documents_follow_each_other(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "two.jsonl").write_text("\n".join(json.dumps({"text": letter * 30}) for letter in "ab"))
    found = read_text(tokenizer, str(tmp_path / "two.jsonl"), 40)
    assert found.ids.tolist() == tokenizer("a" * 30 + "b" * 10)["input_ids"]


def test_the_model_is_as_before(tiny_llama: Build, text: Text) -> None:
    model = tiny_llama().train()
    before = copy.deepcopy(model.state_dict())
    attention = model.config._attn_implementation
    architecture = read_decoder(model)
    position_shares(model, architecture, text, 64)
    model.get_decoder().layers[1].self_attn.k_proj.weight.data.fill_(torch.nan)
    with pytest.raises(ModelError, match=r"layers\.1\.self_attn: its weights are not finite"):
        position_shares(model, architecture, text, 64)
    assert model.config._attn_implementation == attention
    assert all(module.training for module in model.modules())
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items() if "layers.1.self_attn.k" not in n)


def test_encoders_are_refused() -> None:
    with pytest.raises(ArchitectureError, match="an encoder"):
        read_decoder(families.FAMILIES["bert"].build())


def test_attention_past_the_interface_is_refused(tiny_llama: Build, text: Text) -> None:
    model = tiny_llama()
    architecture = Architecture.of(model)
    model.get_decoder().layers[0].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(ArchitectureError, match=r"layers\.0\.self_attn: its attention did not go through"):
        position_shares(model, architecture, text, 64)
