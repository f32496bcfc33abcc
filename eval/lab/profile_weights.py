"""Attention weights of a real model, a block of query rows at a time: memory grows with L, never with L x L."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from quantsink.calibration.collect import FIRST_ROW
from quantsink.calibration.text import parse_spec
from quantsink.calibration.text import windows as tokenized
from quantsink.errors import ArchitectureError, DataError, ModelError, UsageError
from quantsink.models.architecture import Architecture
from quantsink.models.head_layout import AttentionLayer
from quantsink.models.inputs import input_device
from quantsink.models.native_attention import native_attention
from quantsink.models.observe import Attend, intercepting
from quantsink.models.source import check_vocabulary

ROW_BLOCK = 64
QUERY_BLOCK = 128
"""Rows of which weights are shown at once; rows of which an output is computed at once."""

See = Callable[[AttentionLayer, Tensor, int, Tensor], None]
"""Called for each layer and block with rows `[Q]`, the first key column, weights `[B, H, Q, K]` (float32) on the keys
from that column to the last row's own; they sum to 1 less what a learned sink takes."""


Passes = dict[bytes, Any]
"""What one model's decoder gave for whole sequences, by their ids: a pass that is needed twice runs once."""


def pass_key(ids: Tensor) -> bytes:
    """Of one sequence `[L]`."""
    return ids.cpu().numpy().astype("<i8").tobytes()


@dataclass(frozen=True, eq=False)
class Text:
    """A text's beginning, its documents one behind the other. `ids` `[T]` without BOS; `name` as `Source` has it."""

    name: str
    ids: Tensor
    bos: int | None

    @property
    def fingerprint(self) -> str:
        """sha256 over the ids."""
        return hashlib.sha256(self.ids.numpy().astype("<i8").tobytes()).hexdigest()

    def cut(self, length: int, count: int, bos: bool = True) -> Tensor:
        """`[count, length]`: windows behind each other, each with the BOS in front where there is one and it is wanted.

        Window i begins at text token `i * length` in either case; with a BOS it leaves out its last one.

        Raises:
            DataError: a text that is too short.
        """
        if len(self.ids) < length * count:
            raise DataError(
                f"data {self.name!r} has {len(self.ids):,} tokens, {length * count:,} are needed; name a longer text, "
                "or take shorter lengths or fewer windows"
            )
        windows = self.ids[: length * count].view(count, length)
        if not bos or self.bos is None:
            return windows
        return torch.cat([torch.full((count, 1), self.bos), windows[:, :-1]], 1)


def read_text(tokenizer: Any, spec: str, tokens: int) -> Text:
    """The first `tokens` tokens of a text spec, fewer where it has no more. Its own BOS ids are taken out.

    Raises:
        UsageError, DataError: a spec that means nothing, `self`, or a text that cannot be read or is empty.
    """
    source = parse_spec(spec)
    limit = max(tokens, 2) + 2  # reading stops where fewer than two tokens are left
    cut = tokenized(tokenizer, source, seq_len=limit, max_tokens=limit, bos=False)
    return Text(source.name, torch.cat(cut.ids)[:tokens], tokenizer.bos_token_id)


def read_decoder(model: Any) -> Architecture:
    """Where the heads of a causal model are.

    Raises:
        ArchitectureError: an encoder, or a model whose heads cannot be established.
    """
    architecture = Architecture.of(model)
    if not architecture.causal:
        raise ArchitectureError(
            f"{architecture.model_type}: an encoder; these profiles are of models that read from left to right, "
            "calibrate it instead"
        )
    return architecture


def spread_rows(length: int, count: int | None = None) -> Tensor:
    """Query rows from `FIRST_ROW` on, at most `count` of them, evenly spread; None: all."""
    if length <= FIRST_ROW:
        raise UsageError(f"length {length}: rows count from {FIRST_ROW} on; take {FIRST_ROW + 1} tokens or more")
    if count is None or length - FIRST_ROW <= count:
        return torch.arange(FIRST_ROW, length)
    return torch.linspace(FIRST_ROW, length - 1, count).round().long()


@torch.no_grad()
def observe(model: Any, architecture: Architecture, ids: Tensor, rows: Tensor, see: See) -> Any:
    """Run the decoder over `ids` `[B, L]` and show the weights of query `rows` `[Q]` (ascending) of every layer; the
    decoder's output comes back.

    The model computes its output as ever (PyTorch's SDPA; quantsink's own kernel where there is a soft-cap or a
    learned sink). No sequence is padded on the left; what is on a row's right it does not see.

    Raises:
        ArchitectureError: attention that bypasses transformers' interface. ModelError: numbers that are not finite, or
            ids that the model does not have.
    """
    check_vocabulary(model, int(ids.max()))
    seen: set[str] = set()

    def watch(layer: AttentionLayer) -> Attend:
        def attend(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
        ) -> tuple[Tensor, Tensor | None]:
            seen.add(layer.name)
            for block in rows.to(query.device).split(ROW_BLOCK):
                start, weights = block_weights(layer, query, key, mask, block, options)
                if not bool(weights.sum().isfinite()):
                    raise ModelError(f"{layer.name}: its weights are not finite; load the model with another --dtype")
                see(layer, block, start, weights)
            return attend_all(module, layer, query, key, value, mask, **options)

        return attend

    modules = dict(model.named_modules())
    with intercepting(model, {modules[layer.name]: watch(layer) for layer in architecture.attentions}):
        output = model.get_decoder()(input_ids=ids.to(input_device(model)), use_cache=False)
    check_seen(architecture, seen)
    return output


def check_seen(architecture: Architecture, seen: set[str]) -> None:
    """Refuse a model of which some layer's attention was not intercepted."""
    silent = [layer.name for layer in architecture.attentions if layer.name not in seen]
    if silent:
        raise ArchitectureError(f"{silent[0]}: its attention did not go through transformers' attention interface")


def block_weights(
    layer: AttentionLayer, query: Tensor, key: Tensor, mask: Tensor | None, rows: Tensor, options: dict[str, Any]
) -> tuple[int, Tensor]:
    """First key column that any of the rows may see, and weights `[B, H, Q, K]` from it to the last row's own."""
    end = int(rows[-1]) + 1
    start = 0 if layer.window is None else max(0, int(rows[0]) + 1 - layer.window)
    columns = torch.arange(start, end, device=query.device)
    if mask is None:
        visible = columns <= rows[:, None]
    elif mask.dtype == torch.bool:
        visible = mask[:, :, rows, start:end]
    else:
        raise ArchitectureError(f"{layer.name}: its mask is {mask.dtype}, not one that says what is visible")
    scaling, softcap, s_aux = (options.get(name) for name in ("scaling", "softcap", "s_aux"))
    batch, heads, _, size = query.shape
    grouped = query[:, :, rows].float().reshape(batch, key.shape[1], -1, size)
    scores = (grouped @ key[:, :, start:end].float().mT).view(batch, heads, len(rows), -1)
    scores *= size**-0.5 if scaling is None else scaling
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill_(~visible, -torch.inf)
    if s_aux is None:
        return start, scores.softmax(-1)
    learned = s_aux.to(scores)[None, :, None, None].expand(batch, -1, len(rows), 1)
    return start, torch.cat([scores, learned], -1).softmax(-1)[..., :-1]


def attend_all(
    module: nn.Module,
    layer: AttentionLayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """The layer's own attention. A sliding one runs in blocks: SDPA would compute all that its mask hides."""
    if softcap is None and s_aux is None and layer.window is not None and mask is not None:
        parts = []
        for start in range(0, query.shape[2], QUERY_BLOCK):
            low, end = max(0, start + 1 - layer.window), min(start + QUERY_BLOCK, query.shape[2])
            parts.append(
                scaled_dot_product_attention(
                    query[:, :, start:end],
                    key[:, :, low:end],
                    value[:, :, low:end],
                    attn_mask=mask[:, :, start:end, low:end],
                    scale=scaling,
                    enable_gqa=query.shape[1] != key.shape[1],
                )
            )
        return torch.cat(parts, 2).transpose(1, 2).contiguous(), None
    out = native_attention(
        module, query, key, value, mask, scaling=scaling, softcap=softcap, s_aux=s_aux, dropout=dropout, **options
    )
    return out.contiguous(), None
