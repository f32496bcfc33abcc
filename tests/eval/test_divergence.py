"""Divergence against hand-made logits, and what happens to logits that are not numbers."""

import errno
import io
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from quantsink.errors import OutputError, QuantSinkError
from quantsink.eval import EvalText, EvalWindow, divergence
from quantsink.eval.bootstrap import kl_mean, perplexity


class Fixed(nn.Module):
    """Gives the same logits `[V]` after every token."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
        return SimpleNamespace(logits=self.logits.expand(*input_ids.shape, -1))


WINDOWS = [EvalWindow(torch.tensor([0, 1, 1, 0]), 1), EvalWindow(torch.tensor([0, 0, 1]), 2)]
HALF = torch.tensor([0.5, 0.5]).log()
SKEWED = torch.tensor([0.8, 0.2]).log()


def test_known_divergence_and_loss() -> None:
    with divergence.log_probs() as store:
        first = divergence.score_reference(Fixed(HALF), WINDOWS, store)
        second = divergence.score(Fixed(SKEWED), WINDOWS, store, name="skewed")
    expected = 0.5 * math.log(0.5 / 0.8) + 0.5 * math.log(0.5 / 0.2)
    assert [window.count for window in second] == [3, 1]
    assert kl_mean(second) == pytest.approx(expected, rel=1e-6)
    assert perplexity(first) == pytest.approx(2.0, rel=1e-6)
    assert second[0].nll == pytest.approx(-math.log(0.2 * 0.2 * 0.8), rel=1e-6)


def test_a_shift_of_all_logits_changes_nothing() -> None:
    with divergence.log_probs() as store:
        divergence.score_reference(Fixed(SKEWED), WINDOWS, store)
        same = divergence.score(Fixed(SKEWED + 3), WINDOWS, store, name="shifted")
        other = divergence.score(Fixed(SKEWED.flip(0)), WINDOWS, store, name="flipped")
    assert kl_mean(same) == pytest.approx(0, abs=1e-6)
    assert [(window.top1, window.count) for window in same] == [(3, 3), (1, 1)]
    assert [window.top1 for window in other] == [0, 0]


@pytest.mark.parametrize("elements", [1 << 24, 64, 1000])
def test_a_model_does_not_diverge_from_itself(
    model: LlamaForCausalLM, text: EvalText, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(divergence, "CHUNK_ELEMENTS", elements)
    seen = []
    with divergence.log_probs() as store:
        first = divergence.score_reference(model, text.windows, store)
        again = divergence.score(model, text.windows, store, name="itself", progress=lambda *at: seen.append(at))
    assert [(w.kl, w.top1, w.count) for w in again] == [(0.0, w.count, w.count) for w in first]
    assert [w.nll for w in again] == [w.nll for w in first]
    assert seen == [("itself", number, 4) for number in (1, 2, 3, 4)]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_an_error_with_the_methods_name(bad: float) -> None:
    broken = Fixed(torch.tensor([0.0, bad]))
    with divergence.log_probs() as store:
        divergence.score_reference(Fixed(HALF), WINDOWS, store)
        with pytest.raises(QuantSinkError, match="broken-method: its logits contain NaN or inf"):
            divergence.score(broken, WINDOWS, store, name="broken-method")
        with pytest.raises(QuantSinkError, match="reference"):
            divergence.score_reference(broken, WINDOWS, store)


def test_another_vocabulary_is_refused() -> None:
    with divergence.log_probs() as store:
        divergence.score_reference(Fixed(HALF), WINDOWS, store)
        with pytest.raises(QuantSinkError, match="three: 3 logits"):
            divergence.score(Fixed(torch.zeros(3)), WINDOWS, store, name="three")


def test_the_mode_of_each_module_is_restored(text: EvalText, model: LlamaForCausalLM) -> None:
    model.model.layers[0].train()
    try:
        with divergence.log_probs() as store:
            divergence.score_reference(model, text.windows[:1], store)
        assert model.model.layers[0].mlp.training
        assert not model.model.layers[1].training
    finally:
        model.eval()


def test_a_full_disk_is_reported_with_a_remedy() -> None:
    class Full(io.BytesIO):
        def write(self, _: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OutputError, match=r"No space left on device.*set TMPDIR"):
        divergence.score_reference(Fixed(HALF), WINDOWS, divergence.LogProbs(Full()))


def test_the_temporary_file_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with divergence.log_probs() as store:
        divergence.score_reference(Fixed(HALF), WINDOWS, store)
        with pytest.raises(QuantSinkError):
            divergence.score(Fixed(torch.zeros(3)), WINDOWS, store, name="three")
    assert list(tmp_path.iterdir()) == []
