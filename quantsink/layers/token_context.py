"""Which rows of a forward pass are sink tokens. Linear layers see rows without positions, so the decoder tells them."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from quantsink.errors import QuantSinkError
from quantsink.layers.shared_input import SharedInputs
from quantsink.models.inputs import CACHE_ARGUMENTS


class TokenContext:
    """Set by a hook on the decoder before each forward pass; read by every quantized layer of that model.

    `first` is `[B]`, the column of each row's first real token in the whole sequence (None: 0 everywhere), `past` the
    number of tokens before this pass, `shape` its `(B, L)`. `running` from the beginning of a pass to its end.
    """

    def __init__(self, sink_size: int) -> None:
        self.sink_size = sink_size
        self.first: Tensor | None = None
        self.past = 0
        self.shape: tuple[int, int] | None = None
        self.device = torch.device("cpu")
        self.rows: Tensor | None = None
        self.pictures = False
        self.running = False
        self.shared = SharedInputs()

    def attach(self, decoder: nn.Module) -> list[RemovableHandle]:
        """Hook the decoder; removing the handles takes the hooks back."""
        return [
            decoder.register_forward_pre_hook(self._before, with_kwargs=True),
            decoder.register_forward_hook(self._after, always_call=True),
        ]

    def _before(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.shared.clear()  # of a pass that was broken off
        arguments = {**dict(zip(inspect.signature(decoder.forward).parameters, args, strict=False)), **kwargs}
        tokens = arguments.get("input_ids")
        if tokens is None:
            tokens = arguments.get("inputs_embeds")
        if not isinstance(tokens, Tensor):
            pixels = arguments.get("pixel_values")
            if not isinstance(pixels, Tensor):
                raise QuantSinkError("quantsink: the decoder was called without input_ids or inputs_embeds")
            self._after()
            self.running = True
            self.pictures, self.device = True, pixels.device  # how many tokens they make, the first layer sees
            return
        cache = next((arguments[name] for name in CACHE_ARGUMENTS if arguments.get(name) is not None), None)
        past = int(cache.get_seq_length()) if cache is not None else 0
        mask = arguments.get("attention_mask")
        if isinstance(mask, dict):  # prepared masks by kind of layer; only the full one shows the first token always
            mask = mask.get("full_attention", next(iter(mask.values()), None))
        if mask is not None and not isinstance(mask, Tensor):
            raise QuantSinkError(f"quantsink: an attention_mask of type {type(mask).__name__} does not show padding")
        self.set((tokens.shape[0], tokens.shape[1]), past, mask, tokens.device)

    def _after(self, *_: object) -> None:
        self.shape = self.rows = self.first = None
        self.pictures = self.running = False
        self.shared.clear()

    def set(self, shape: tuple[int, int], past: int, mask: Tensor | None, device: torch.device) -> None:
        """Work out the sink rows of one pass. `mask` is `[B, past + L]` (1 = real token) or `[B, 1, L, past + L]`."""
        batch, length = shape
        self.shape, self.past, self.first, self.device = shape, past, None, device
        self.running = True
        if mask is not None and mask.dim() == 4:
            mask = (mask if mask.dtype == torch.bool else mask == 0)[:, 0].any(1)
        if mask is not None and not bool(mask[:, 0].all()):
            self.first = mask.to(torch.long).argmax(1).expand(batch)
        self.rows = self._sink_rows(past, length)

    def _sink_rows(self, past: int, length: int) -> Tensor | None:
        """Indices of sink tokens among the `length` tokens of each row that come after `past`; None: no such token."""
        assert self.shape is not None
        first = torch.zeros(self.shape[0], dtype=torch.long, device=self.device) if self.first is None else self.first
        column = past + torch.arange(length, device=self.device)
        sink = (column >= first[:, None]) & (column < first[:, None] + self.sink_size)
        rows = sink.flatten().nonzero()[:, 0]
        return rows if len(rows) else None

    def sink_rows(self, shape: torch.Size, layer: str) -> Tensor | None:
        """Indices of sink rows in an input `[B, L, K]` or `[B * L, K]`, flattened to `[B * L, K]`; None: there is none.

        A latent attention's input `[B, 1, past + L, K]` holds every cached token.
        """
        if self.shape is None and self.pictures and len(shape) == 3:
            self.set((shape[0], shape[1]), 0, None, self.device)
        if self.shape is not None:
            batch, length = self.shape
            count = shape[:-1].numel()
            if count == batch * length and shape[0] in (batch, count):
                return self.rows
            if tuple(shape[:-1]) == (batch, 1, self.past + length):
                return self._sink_rows(0, self.past + length)
        raise QuantSinkError(
            f"{layer}: its input {list(shape)} does not hold one row per token of the model's forward pass "
            f"{self.shape}; call the model, not its layers"
        )

    def keys_in_use(self, keys: int) -> int:
        """How many of a cache's `keys` slots hold tokens already."""
        return keys if self.shape is None else min(keys, self.past + self.shape[1])

    def sink_start(self, keys: int) -> Tensor | None:
        """`[B]` column of each row's first real token among `keys` cached keys; negative once it left the cache."""
        if self.shape is None:
            raise QuantSinkError("quantsink attention was called outside its model's forward pass; call the model")
        dropped = max(self.past + self.shape[1] - keys, 0)
        if self.first is None:
            return torch.full((self.shape[0],), -dropped, device=self.device) if dropped else None
        return self.first - dropped
