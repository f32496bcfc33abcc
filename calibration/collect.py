"""Run a model over windows and collect its statistics through transformers' attention interface.

The model's native attention still computes its output: PyTorch's SDPA, or the reference kernel where SDPA has no
soft-cap or learned sinks. Statistics take one block of query rows at a time, so memory grows with L, never with L x L.
Every hook is removed afterwards, also after an exception.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn

from quantsink.calibration.statistics import (
    CodedPart,
    Fields,
    add,
    code_window,
    empty_experts,
    empty_heads,
    empty_linear,
    measure_keys,
    measure_kv,
    measure_queries,
    measure_rows,
    measure_window,
)
from quantsink.errors import ArchitectureError, ModelError
from quantsink.kernels import Route, sink_attention
from quantsink.models.architecture import Architecture, matrix, sizes
from quantsink.models.finite import all_finite
from quantsink.models.head_layout import AttentionLayer
from quantsink.models.native_attention import native_attention
from quantsink.models.observe import Attend, intercepting

FIRST_ROW = 16
"""Queries closer than this to the first token do not count (docs/design.md)."""
ROW_BLOCK = 64


class Collector:
    """Statistics of one model over one domain's text; feed it windows inside `collecting(...)`.

    Args:
        query_rows: query rows measured per window, evenly spaced; None measures every row.
        error_windows: windows, the first ones of the text, in which the error of each route is measured too.
        first, step: this collector is fed the text's window number `first` and then every `step`-th.
    """

    def __init__(
        self,
        model: Any,
        architecture: Architecture,
        *,
        sink_size: int,
        query_rows: int | None = 64,
        error_windows: int = 8,
        first: int = 0,
        step: int = 1,
    ) -> None:
        self.model, self.architecture = model, architecture
        self.sink_size, self.query_rows, self.error_windows = sink_size, query_rows, error_windows
        self.first, self.step = first, step
        modules = dict(model.named_modules())
        self.heads: dict[str, Fields] = {layer.name: empty_heads(layer) for layer in architecture.attentions}
        self.linears: dict[str, Fields] = {n: empty_linear(sizes(modules[n])[1]) for n in architecture.linears}
        self.experts: dict[str, Fields] = {e.name: empty_experts(e.count) for e in architecture.experts}
        self.windows = 0
        self._modules = modules
        self._gram: dict[str, Tensor] = {}
        self._seen: set[str] = set()
        self._real: list[tuple[int, int]] = []
        self._length = 0
        self._last: tuple[Tensor | None, Fields] = (None, {})

    @torch.no_grad()
    def run(self, ids: Tensor, attention_mask: Tensor | None = None) -> None:
        """Measure one batch `[B, L]`; `attention_mask` `[B, L]` is 1 on real tokens, which lie together in each row.

        A batch of floating-point numbers is the model's main input; the model decides how many tokens it makes.
        """
        self._seen.clear()
        decoder = self._modules[self.architecture.decoder]
        if ids.is_floating_point():
            self._real, self._length = [], 0
            decoder(**{self.model.main_input_name: ids})
        else:
            self._real, self._length = _real_ranges(ids, attention_mask), ids.shape[1]
            options = {"use_cache": False} if self.architecture.causal else {}
            decoder(input_ids=ids, attention_mask=attention_mask, **options)
        self._last = (None, {})
        silent = [layer.name for layer in self.architecture.attentions if layer.name not in self._seen]
        if silent:
            raise ArchitectureError(f"{silent[0]}: its attention did not go through transformers' attention interface")
        self.windows += len(ids)
        if self.first + self.step * self.windows >= self.error_windows:
            self._gram.clear()

    def attention(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float,
        softcap: float | None,
        s_aux: Tensor | None,
    ) -> None:
        """Called for each layer with query `[B, H, L, D]` and unrepeated key, value `[B, KVH, L, D]`."""
        self._seen.add(layer.name)
        into = self.heads[layer.name]
        if not (all_finite(query) and all_finite(key) and all_finite(value)):
            raise ModelError(f"{layer.name}: its queries, keys or values are not finite; load with another --dtype")
        for row, (first, end) in enumerate(self._real):
            real = torch.arange(first, end, device=query.device)
            sink = torch.zeros(key.shape[2], dtype=torch.bool, device=query.device)
            border = min(first + self.sink_size, end)
            sink[first:border] = True
            add(into, measure_keys(key[row][:, real], value[row][:, real], sink[real]))
            rows = self._choose_rows(first + (FIRST_ROW if layer.causal else 0), end, query.device)
            if not len(rows):
                continue
            with_errors = self.first + self.step * (self.windows + row) < self.error_windows
            parts = code_window(key[row], value[row], (first, border), end) if with_errors else []
            total: Fields = {}
            for block in rows.split(ROW_BLOCK):
                visible = _visible(mask, row, block, key.shape[2], layer.causal)
                s = _scores(query[row][:, block], key[row], scaling, softcap)
                measured = measure_rows(s, visible, block, (first, border), s_aux, None if layer.causal else end - 1)
                add(into, measured)
                add(into, measure_queries(query[row][:, block], layer.kv_heads))
                if with_errors:
                    inputs = (query[row : row + 1, :, block], key[row : row + 1], value[row : row + 1])
                    rule = (scaling, softcap, s_aux)
                    add(into, self._errors(layer, *inputs, visible, (first, end), *rule, block, parts))
                total = {n: total[n] + v if n in total else v for n, v in measured.items() if not n.endswith("max")}
            add(into, measure_window(total))

    def _choose_rows(self, start: int, end: int, device: torch.device) -> Tensor:
        if self.query_rows is None or end - start <= self.query_rows:
            return torch.arange(start, max(end, start), device=device)
        return torch.linspace(start, end - 1, self.query_rows, device=device).round().long()

    def _errors(
        self,
        layer: AttentionLayer,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        visible: Tensor,
        real: tuple[int, int],
        scaling: float,
        softcap: float | None,
        s_aux: Tensor | None,
        rows: Tensor,
        parts: list[CodedPart],
    ) -> dict[str, Tensor]:
        """Squared errors of the layer's output after the output projection: with one head on the `int8` or the `sink`
        route, and with one KV head's keys and values as codes."""
        with align_module_device(self._modules[layer.o.module]):
            weight = matrix(self._modules[layer.o.module]).detach().float()
        weight = weight.reshape(-1, layer.heads, layer.value_dim)
        if layer.name not in self._gram:
            joint = weight.unflatten(1, (layer.kv_heads, -1)).flatten(2)
            self._gram[layer.name] = torch.einsum("okd,oke->kde", joint, joint)
        gram = self._gram[layer.name]
        group = layer.heads // layer.kv_heads
        per_head = gram.view(-1, group, layer.value_dim, group, layer.value_dim).diagonal(dim1=1, dim2=3)
        first, end = real
        mean = k[0, :, min(first + self.sink_size, end - 1) : end].float().mean(1)
        start = torch.tensor([first], device=k.device)

        def run(route: Route) -> Tensor:
            routes = torch.full((layer.heads,), int(route), device=k.device)
            return sink_attention(
                q.float(),
                k.float(),
                v.float(),
                routes=routes,
                key_mean=mean,
                scaling=scaling,
                mask=visible[None, None],
                causal=layer.causal,
                sink_size=self.sink_size,
                sink_start=start,
                softcap=softcap,
                s_aux=s_aux,
            )[0]

        exact = run(Route.NATIVE)
        energy = torch.einsum("hqd,ohd->qo", exact, weight).square().sum(-1)
        errors = {"error_rows": torch.full((layer.heads,), float(len(visible)))}
        errors["output_energy"] = energy.double().sum().expand(layer.heads)
        for name, route in (("error_int8", Route.INT8), ("error_sink", Route.SINK)):
            delta = run(route) - exact
            delta = delta.unflatten(0, (layer.kv_heads, group))
            error = torch.einsum("kgqd,kdeg,kgqe->kg", delta, per_head, delta)
            errors[name] = error.flatten().double().clamp(min=0)
        if parts:
            logits = functools.partial(_scores, scaling=scaling, softcap=softcap)
            exact_kv = (q[0].float(), k[0].float(), v[0].float())
            errors |= measure_kv(*exact_kv, visible, rows, parts, logits, gram, energy, s_aux)
        return errors

    def linear(self, name: str, x: Tensor) -> None:
        """Called with the input `[B, L, K]` or `[B * L, K]` of each linear layer; layers of one input share it."""
        last, fields = self._last
        if not self._real:  # the first layer that sees the tokens
            self._real, self._length = [(0, x.shape[1])] * len(x), x.shape[1]
        if last is not x:
            batch = len(self._real)
            if x.shape[:-1].numel() != batch * self._length:
                raise ArchitectureError(f"{name}: its input {list(x.shape)} does not hold one row per token")
            tokens = x.view(batch, self._length, x.shape[-1])
            fields = {}
            for row, (first, end) in enumerate(self._real):
                border = min(first + self.sink_size, end)
                for field, part in (
                    ("input_sink_amax", tokens[row, first:border]),
                    ("input_amax", tokens[row, border:end]),
                ):
                    if len(part):
                        peak = torch.maximum(part.amax(0), -part.amin(0))  # several times faster than aminmax
                        fields[field] = torch.maximum(fields[field], peak) if field in fields else peak
                        if field == "input_amax":
                            fields["input_peak"] = fields.get("input_peak", 0) + peak.double()
                            fields["input_windows"] = fields.get("input_windows", 0) + torch.ones(1)
            self._last = (x, fields)
        add(self.linears[name], fields)

    def routed(self, name: str, count: int, experts: Tensor) -> None:
        """Called with the experts `[..., K]` that each token is sent to; numbers from `count` on mean none."""
        numbers = experts.flatten()
        add(self.experts[name], {"tokens": torch.bincount(numbers[numbers < count], minlength=count)})


@contextlib.contextmanager
def collecting(collector: Collector) -> Iterator[None]:
    """Route the model's attention and linear inputs through `collector` while the block runs."""
    architecture, modules = collector.architecture, collector._modules
    handles = []
    try:
        for name in architecture.linears:
            handles.append(modules[name].register_forward_pre_hook(_for_linear(collector, name)))
        for experts in architecture.experts:
            hook = _for_experts(collector, experts.name, experts.count)
            handles.append(modules[experts.name].register_forward_pre_hook(hook, with_kwargs=True))
        attend = {modules[layer.name]: _for_layer(collector, layer) for layer in architecture.attentions}
        with intercepting(collector.model, attend):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _for_linear(collector: Collector, name: str) -> Callable[..., None]:
    return lambda _, arguments: collector.linear(name, arguments[0])


def _for_experts(collector: Collector, name: str, count: int) -> Callable[..., None]:
    """The second argument of an experts module, whatever its name, holds each token's experts."""
    return lambda _, args, kwargs: collector.routed(name, count, [*args, *kwargs.values()][1])


def _for_layer(collector: Collector, layer: AttentionLayer) -> Attend:
    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        collector.attention(layer, query, key, value, attention_mask, scaling, softcap, s_aux)
        out = native_attention(
            module, query, key, value, attention_mask, scaling=scaling, softcap=softcap, s_aux=s_aux, dropout=dropout,
            **kwargs,
        )  # fmt: skip
        return out.contiguous(), None

    return attend


def _scores(q: Tensor, k: Tensor, scaling: float, softcap: float | None) -> Tensor:
    """`[H, Q, L]` logits of query rows `[H, Q, D]` against keys `[KVH, L, D]`."""
    kv_heads, length, _ = k.shape
    grouped = q.float().reshape(kv_heads, -1, q.shape[-1])
    s = (grouped @ k.float().transpose(-1, -2)).view(q.shape[0], q.shape[1], length) * scaling
    return torch.tanh(s / softcap) * softcap if softcap else s


def _visible(mask: Tensor | None, row: int, rows: Tensor, keys: int, causal: bool) -> Tensor:
    if mask is not None:
        return mask[min(row, len(mask) - 1), 0][rows]
    if not causal:
        return torch.ones(len(rows), keys, dtype=torch.bool, device=rows.device)
    return torch.arange(keys, device=rows.device) <= rows[:, None]


def _real_ranges(ids: Tensor, mask: Tensor | None) -> list[tuple[int, int]]:
    if mask is None:
        return [(0, ids.shape[1])] * len(ids)
    ranges = []
    for row in mask.bool():
        where = row.nonzero()[:, 0]
        first, end = (int(where[0]), int(where[-1]) + 1) if len(where) else (0, 0)
        if end - first != len(where):
            raise ValueError("attention_mask: the real tokens of a row must be one unbroken run")
        ranges.append((first, end))
    return ranges
