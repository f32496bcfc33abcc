"""Shared by the tests of a `SinkCache`, as fixtures because `--import-mode=importlib` knows no neighbouring modules."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import quantsink
from quantsink.hf.sink_cache import SinkCache
from quantsink.models.architecture import Architecture
from quantsink.models.inputs import cache_argument
from quantsink.plan import CachePlan
from quantsink.recipe import KVCache

SIZES = (100, 32, 32, 32, *[1] * 34)


@pytest.fixture(scope="session")
def plan_of() -> Callable[..., CachePlan]:
    """A plan without a calibration: every head has the same width and window."""

    def make(
        model: Any, bits: int = 8, sinks: int = 4, residual: int = 64, max_length: int | None = None, window: int = 0
    ) -> CachePlan:
        options = KVCache(sink_size=sinks, residual=residual, rounding="nearest", max_length=max_length)
        layers = [layer for layer in Architecture.of(model).attentions if layer.window is None]
        return CachePlan(
            options,
            {layer.name: (bits,) * layer.kv_heads for layer in layers},
            {layer.name: (window,) * layer.kv_heads for layer in layers},
        )

    return make


@pytest.fixture(scope="session")
def cache_of(plan_of: Callable[..., CachePlan]) -> Callable[..., SinkCache]:
    """An empty cache for a model; options as those of `plan_of`."""

    def make(model: Any, **options: Any) -> SinkCache:
        return SinkCache(model, plan_of(model, **options))

    return make


@pytest.fixture(scope="session")
def token_ids() -> Callable[..., Tensor]:
    """Random tokens `[batch, length]`, the same for the same seed."""

    def make(batch: int = 2, length: int = 230, seed: int = 0) -> Tensor:
        return torch.randint(2, 258, (batch, length), generator=torch.Generator().manual_seed(seed))

    return make


@pytest.fixture(scope="session")
def logits_of() -> Callable[..., Tensor]:
    """Logits `[B, L, V]` of tokens that are fed in pieces of `sizes`; positions count real tokens."""

    @torch.no_grad()
    def run(
        model: Any, tokens: Tensor, cache: Any = None, sizes: Sequence[int] = SIZES, mask: Tensor | None = None
    ) -> Tensor:
        pieces, at = [], 0
        for size in sizes:
            end = at + size
            inputs = {}
            if mask is not None:
                positions = (mask[:, :end].cumsum(-1) - 1).clamp(min=0)[:, at:end]
                inputs = {"attention_mask": mask[:, :end], "position_ids": positions}
            pieces.append(model(tokens[:, at:end], **{cache_argument(model): cache}, **inputs).logits)
            at = end
        assert at == tokens.shape[1]
        return torch.cat(pieces, 1)

    return run


@pytest.fixture(scope="session")
def generate() -> Callable[..., Tensor]:
    """70 tokens by greedy search or beams."""

    def run(model: Any, tokens: Tensor, cache: Any = None, **options: Any) -> Tensor:
        inputs = {} if cache is None else {cache_argument(model): cache}
        length = {"max_new_tokens": 70, "min_new_tokens": 70, "do_sample": False}
        generated: Tensor = model.generate(tokens, **length, **inputs, **options)
        return generated

    return run


@pytest.fixture(scope="session")
def calibrated(tokenizer: Any) -> tuple[Any, quantsink.Calibration]:
    """A tiny model and its calibration."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, initializer_range=0.1, bos_token_id=0, eos_token_id=1, pad_token_id=1,
        max_position_embeddings=512,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    return model, quantsink.calibrate(model, tokenizer, "builtin:prose", seq_len=300, max_tokens=2400)
