"""Where a model's heads are, seen by running the model.

The model runs on one token while the output of every q, k and v projection, and the result of every attention, is
replaced by random numbers. Each head of each kind has a number; a pass changes the channels of those heads whose
number has one bit (or has it not), and the heads that arrive changed at the attention function, or in the input of the
output projection, must be exactly those. Two passes a bit, over all layers at once, tell every head's channels apart.
"""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from quantsink.errors import ArchitectureError
from quantsink.models.architecture import Architecture, Candidates, is_linear, matrix
from quantsink.models.head_layout import AttentionLayer
from quantsink.models.inputs import example
from quantsink.models.observe import intercepting

SAME = 1e-3
"""1 - cosine up to which a head counts as unchanged: norms over all heads of a token scale each."""

Seen = dict[tuple[str, str], Tensor]
"""(attention module, part) -> `[heads, tokens, size]`; q, k, v as attention gets them, o as its projection does."""

_KNOWN: "weakref.WeakKeyDictionary[nn.Module, tuple[Candidates, tuple[AttentionLayer, ...]]]"
_KNOWN = weakref.WeakKeyDictionary()


def settle(model: nn.Module, architecture: Architecture, candidates: Candidates) -> tuple[AttentionLayer, ...]:
    """Each layer as the model shows it to be, one of its candidates.

    Raises:
        ArchitectureError: no candidate is right, or an attention module bypasses the attention interface.
    """
    known = _KNOWN.get(model)
    if known is None or known[0] != candidates:
        _check_linears(model, architecture)
        known = candidates, tuple(_settle(model, architecture, candidates))
        _KNOWN[model] = known
    return known[1]


@torch.no_grad()
def _settle(model: nn.Module, architecture: Architecture, candidates: Candidates) -> Iterator[AttentionLayer]:
    most = max(map(len, candidates))
    good: list[set[int]] = [set(range(len(layers))) for layers in candidates]
    for choice in range(most):
        layers = [options[min(choice, len(options) - 1)] for options in candidates]
        probe = _Probe(model, architecture, layers)
        wrong = probe.wrong()
        for index in range(len(layers)):
            if index in wrong:
                good[index].discard(min(choice, len(candidates[index]) - 1))
        if not wrong and most == 1:
            break
    for options, right in zip(candidates, good, strict=True):
        if len(right) != 1:
            raise ArchitectureError(
                f"{architecture.model_type}: {options[0].name}: its heads do not lie where the sizes of its "
                "projections say, or something mixes them before or after attention"
            )
        yield options[right.pop()]


class _Probe:
    """One way to cut every layer, tried."""

    def __init__(self, model: nn.Module, architecture: Architecture, layers: list[AttentionLayer]) -> None:
        self.model, self.architecture, self.layers = model, architecture, layers
        self.modules = dict(model.named_modules())
        self.generator = torch.Generator()
        self.seen: Seen = {}
        self.changed: frozenset[int] = frozenset()

    def wrong(self) -> set[int]:
        """Numbers of the layers that are not as they were thought to be."""
        base = self._run(frozenset())
        silent = [layer.name for layer in self.layers if (layer.name, "q") not in base]
        if silent:
            raise ArchitectureError(f"{silent[0]}: its attention did not go through transformers' attention interface")
        wrong: set[int] = set()
        units = max(len(self._units(layer)) for layer in self.layers)
        for bit in range(units.bit_length()):
            for value in (0, 1):
                chosen = frozenset(unit for unit in range(units) if (unit + 1) >> bit & 1 == value)
                outputs = self._run(chosen)
                for index, layer in enumerate(self.layers):
                    if not all(
                        _as_expected(
                            base.get((layer.name, part)), outputs.get((layer.name, part)), head, unit in chosen
                        )
                        for unit, (part, head) in enumerate(self._units(layer))
                    ):
                        wrong.add(index)
        return wrong

    @staticmethod
    def _units(layer: AttentionLayer) -> list[tuple[str, int]]:
        counts = (("q", layer.heads), ("k", layer.kv_heads), ("v", layer.kv_heads), ("o", layer.heads))
        return [(part, head) for part, count in counts for head in range(count)]

    def _run(self, chosen: frozenset[int]) -> Seen:
        self.seen, self.changed = {}, chosen
        handles = []
        by_module: dict[str, list[tuple[AttentionLayer, str]]] = {}
        for layer in self.layers:
            for part in ("q", "k", "v"):
                by_module.setdefault(getattr(layer, part).module, []).append((layer, part))
        try:
            for name, parts in by_module.items():
                handles.append(self.modules[name].register_forward_hook(self._projected(name, parts)))
            for layer in self.layers:
                handles.append(self.modules[layer.o.module].register_forward_hook(self._put_out(layer)))
            attend = {self.modules[layer.name]: self._attend(layer) for layer in self.layers}
            decoder = self.modules[self.architecture.decoder]
            with intercepting(self.model, attend):
                decoder(**example(self.model), **({"use_cache": False} if self.architecture.causal else {}))
        finally:
            for handle in handles:
                handle.remove()
        return self.seen

    def _numbers(self, shape: torch.Size, like: Tensor, seed: int) -> Tensor:
        """The same for the same seed."""
        self.generator.manual_seed(seed)
        return torch.randn(shape, generator=self.generator).to(like)

    def _heads(self, layer: AttentionLayer, part: str) -> list[int]:
        return [head for unit, (p, head) in enumerate(self._units(layer)) if p == part and unit in self.changed]

    def _projected(self, name: str, parts: list[tuple[AttentionLayer, str]]) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            base, other = (self._numbers(output.shape, output, seed) for seed in (1, 2))
            for layer, part in parts:
                channels = list(getattr(layer, part).channels(self._heads(layer, part)))
                base[..., channels] = other[..., channels]
            return base

        return hook

    def _attend(self, layer: AttentionLayer) -> Any:
        def attend(_: nn.Module, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, None]:
            for part, x in (("q", q), ("k", k), ("v", v)):
                self.seen[layer.name, part] = x[0].detach().clone()
            shape = torch.Size((q.shape[0], q.shape[2], q.shape[1], v.shape[3]))
            base, other = (self._numbers(shape, q, seed) for seed in (3, 4))
            for head in self._heads(layer, "o"):
                base[:, :, head] = other[:, :, head]
            return base, None

        return attend

    def _put_out(self, layer: AttentionLayer) -> Any:
        """See what reaches the output projection; nothing of it goes on, so that all passes are alike."""

        def hook(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            x = args[0].reshape(-1, args[0].shape[-1])
            slices = [x[:, list(layer.o.channels([head]))] for head in range(layer.heads)]
            self.seen[layer.name, "o"] = torch.stack(slices).detach()
            return torch.zeros_like(output)

        return hook


def _as_expected(before: Tensor | None, after: Tensor | None, head: int, changed: bool) -> bool:
    if before is None or after is None or before.shape != after.shape or head >= len(before):
        return False
    return _differs(before[head], after[head]) == changed


def _differs(before: Tensor, after: Tensor) -> bool:
    a, b = before.double().flatten(), after.double().flatten()
    if torch.equal(a, b):
        return False
    return bool(1 - torch.nn.functional.cosine_similarity(a, b, 0) > SAME)


def _check_linears(model: nn.Module, architecture: Architecture) -> None:
    """A linear layer of a model's own class must compute what torch's does."""
    for name in architecture.linears:
        module = model.get_submodule(name)
        if type(module).__module__.startswith("torch.") or type(module).__name__ == "Conv1D":
            continue
        weight: Any = module.weight
        if not is_linear(module) or weight.is_meta:
            continue
        x = torch.linspace(-1, 1, matrix(module).shape[1], device=weight.device).to(weight.dtype)[None]
        bias: Any = module.bias
        if not torch.allclose(module(x), torch.nn.functional.linear(x, weight, bias), rtol=1e-2, atol=1e-2):
            raise ArchitectureError(
                f"{architecture.model_type}: {name} is a {type(module).__name__}, not a linear layer"
            )
