"""From options to findings: what fits into a model's context, and what is told before any work."""

from collections.abc import Callable
from typing import Any

import pytest

from quantsink.errors import UsageError
from quantsink.eval.lab import experiments


@pytest.mark.parametrize(
    ("context", "lengths", "contrast", "sizes"),
    [
        (8192, (256, 1024, 4096), 512, {}),
        (1024, (256, 1024), 512, {}),
        (519, (256,), 512, {"tokens": 512, "window": 64}),
        (200, (200,), 200, {"tokens": 200, "window": 64}),
    ],
)
def test_a_profile_is_cut_to_the_models_context(
    tiny_llama: Callable[..., Any], context: int, lengths: tuple[int, ...], contrast: int, sizes: dict[str, int]
) -> None:
    settings, found = experiments.profile_sizes("m", tiny_llama(max_position_embeddings=context), quick=False)
    assert (settings.lengths, settings.contrast_length, found) == (lengths, contrast, sizes)


def test_a_context_of_200_tokens_has_a_profile(tiny_llama: Callable[..., Any], tokenizer: Any) -> None:
    model = tiny_llama(max_position_embeddings=200)
    told: list[str] = []
    found = experiments.profile(
        model, tokenizer, "short.gguf", "builtin:prose", True, progress=lambda name, *_: told.append(name)
    )
    assert found.data["streaming"]["tokens"] == 200
    assert [share["length"] for share in found.data["profile"]["shares"]] == [200, 200]
    assert all(name.startswith("short-") for name in found.pictures)
    assert all(name.startswith("short.gguf: ") for name in told)


def test_a_context_that_is_too_short_is_refused_before_any_work(tiny_llama: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match=r"^m: its context of 128 tokens is too short for a profile, which needs 136$"):
        experiments.profile(tiny_llama(max_position_embeddings=128), None, "m", "builtin:prose", True)
