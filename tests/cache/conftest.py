"""Shared by the tests of a cache's layers, as fixtures: `--import-mode=importlib` knows no neighbouring modules."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from quantsink.cache.layer import SinkLayer
from quantsink.cache.layout import LayerPolicy
from quantsink.kernels.coded_attention.codes import decode
from quantsink.recipe import KVCache


@pytest.fixture(scope="session")
def policy() -> Callable[..., LayerPolicy]:
    """What a layer keeps, without a model."""

    def make(
        bits: tuple[int, ...] = (4, 4),
        windows: tuple[int, ...] | None = None,
        sinks: int = 4,
        residual: int = 64,
        max_length: int | None = None,
        head_dim: int = 32,
    ) -> LayerPolicy:
        options = KVCache(sink_size=sinks, residual=residual, max_length=max_length)
        return LayerPolicy("layer", 0, len(bits), head_dim, bits, windows or (0,) * len(bits), options)

    return make


@pytest.fixture(scope="session")
def tokens() -> Callable[..., tuple[Tensor, Tensor]]:
    """Random keys and values `[B, KVH, L, D]`."""

    def make(batch: int = 2, heads: int = 2, length: int = 200, dim: int = 32, seed: int = 0) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        key, value = (torch.randn(batch, heads, length, dim, generator=generator) for _ in "kv")
        return key, value

    return make


@pytest.fixture(scope="session")
def feed() -> Callable[..., SinkLayer]:
    """Pass keys and values through a layer in passes of `sizes` tokens; returns the layer."""

    def run(
        layer: SinkLayer, key: Tensor, value: Tensor, sizes: Sequence[int], starts: list[int] | None = None
    ) -> SinkLayer:
        at = 0
        for size in sizes:
            layer.update(key[:, :, at : at + size], value[:, :, at : at + size])
            layer.begin(None, starts)
            layer.commit()
            at += size
        assert at == key.shape[2]
        return layer

    return run


@pytest.fixture(scope="session")
def held() -> Callable[..., tuple[Tensor, Tensor]]:
    """Every key and value `[KVH, n, D]` that a row holds, in order; codes as what they stand for."""

    def read(layer: SinkLayer, row: int = 0) -> tuple[Tensor, Tensor]:
        view = layer.view()
        sinks, newest, *counts = view.rows[row].tolist()
        keys, values = [], []
        for head, (number, place) in enumerate(view.heads.tolist()):
            bank = layer.banks[number]
            key, value = decode(bank.data[row, place, : counts[number]], bank.record)
            for parts, sink, coded, exact in (
                (keys, view.sink_key, key, view.key),
                (values, view.sink_value, value, view.value),
            ):
                exact = exact[row, head, exact.shape[2] - newest :]
                parts.append(torch.cat([sink[row, head, :sinks], coded.flatten(0, 1), exact]))
        return torch.stack(keys), torch.stack(values)

    return read
