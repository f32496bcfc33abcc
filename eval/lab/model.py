"""The laboratory's models: transformers small enough to train in seconds, built on `LabAttention`.

They are transformers models in all that quantsink asks of one: projections by their usual names, attention through
transformers' interface wherever that can express it. So `quantsink.calibrate` and `quantsink.quantize` take those whose
attention is softmax or softmax1 with nothing added to the scores, and refuse the others.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, rms_norm
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import ImageClassifierOutput

from quantsink.eval.lab.attention import ALL_REAL, AttentionSpec, Inputs, LabAttention


class LabConfig(PreTrainedConfig):
    """Sizes of a laboratory model.

    residual: blocks add to their input; without it the one layer is attention and nothing else.
    norm: RMS norm before attention and MLP. mlp: hidden size of each block's MLP, 0 for none.
    """

    model_type = "quantsink_lab"

    def __init__(
        self,
        hidden_size: int = 32,
        num_hidden_layers: int = 1,
        num_attention_heads: int = 1,
        head_dim: int = 16,
        inputs: int = 11,
        outputs: int = 8,
        residual: bool = False,
        norm: bool = False,
        mlp: int = 0,
        image_size: int = 8,
        patch_size: int = 2,
        **kwargs: Any,
    ) -> None:
        self.hidden_size, self.num_hidden_layers = hidden_size, num_hidden_layers
        self.num_attention_heads = self.num_key_value_heads = num_attention_heads
        self.head_dim, self.inputs, self.outputs = head_dim, inputs, outputs
        self.residual, self.norm, self.mlp = residual, norm, mlp
        self.image_size, self.patch_size, self.num_channels = image_size, patch_size, 1
        super().__init__(**kwargs)


class Block(nn.Module):
    def __init__(self, config: LabConfig, spec: AttentionSpec, index: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.residual, self.norm = config.residual, config.norm
        self.attention = LabAttention(size, config.num_attention_heads, config.head_dim, spec, index, config)
        self.up_proj = nn.Linear(size, config.mlp) if config.mlp else None
        self.down_proj = nn.Linear(config.mlp, size) if config.mlp else None

    def forward(self, x: Tensor, inputs: Inputs, record: list[Tensor] | None = None) -> Tensor:
        output = self.attention(self._normed(x), inputs, record)
        x = x + output if self.residual else output
        if self.up_proj is not None and self.down_proj is not None:
            x = x + self.down_proj(gelu(self.up_proj(self._normed(x))))
        return x

    def _normed(self, x: Tensor) -> Tensor:
        return rms_norm(x, x.shape[-1:]) if self.norm else x


class LabModel(PreTrainedModel):
    """Embedded inputs through blocks to an output of each token, `[B, L, outputs]`.

    Args:
        specs: one attention for all layers, or one each.
    """

    config_class = LabConfig
    base_model_prefix = ""
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: LabConfig, specs: AttentionSpec | Sequence[AttentionSpec]) -> None:
        super().__init__(config)
        each = [specs] * config.num_hidden_layers if isinstance(specs, AttentionSpec) else list(specs)
        if len(each) != config.num_hidden_layers:
            raise ValueError(f"{len(each)} attentions for {config.num_hidden_layers} layers; give one, or one each")
        self.specs = tuple(each)
        self.blocks = nn.ModuleList(Block(config, spec, index) for index, spec in enumerate(each))
        self.head = nn.Linear(config.hidden_size, config.outputs)

    def get_decoder(self) -> "LabModel":
        return self

    def embedded(self, data: Tensor) -> Tensor:
        raise NotImplementedError

    def run(self, data: Tensor, inputs: Inputs = ALL_REAL, record: list[Tensor] | None = None) -> Tensor:
        """Output of each token; the weights of every layer, `[B, H, L, S + L]`, go to `record`."""
        x = self.embedded(data)
        for block in self.blocks:
            x = block(x, inputs, record)
        if self.config.norm:
            x = rms_norm(x, x.shape[-1:])
        output: Tensor = self.head(x)
        return output


class FeatureModel(LabModel):
    """Vectors `[B, L, inputs]` in."""

    main_input_name = "inputs_embeds"

    def __init__(self, config: LabConfig, specs: AttentionSpec | Sequence[AttentionSpec]) -> None:
        super().__init__(config, specs)
        self.embed = nn.Linear(config.inputs, config.hidden_size)

    @property
    def dummy_inputs(self) -> dict[str, Tensor]:
        return {"inputs_embeds": torch.zeros(1, 1, self.config.inputs)}

    def embedded(self, features: Tensor) -> Tensor:
        embedded: Tensor = self.embed(features)
        return embedded

    def forward(self, inputs_embeds: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Tensor:
        return self.run(inputs_embeds, Inputs(None if attention_mask is None else attention_mask.bool()))


class TokenModel(LabModel):
    """Token ids `[B, L]` in, logits out; the embedding is tied to the output."""

    main_input_name = "input_ids"

    def __init__(self, config: LabConfig, specs: AttentionSpec | Sequence[AttentionSpec]) -> None:
        super().__init__(config, specs)
        self.embed = nn.Embedding(config.outputs, config.hidden_size)
        nn.init.normal_(self.embed.weight, std=config.hidden_size**-0.5)
        self.head = nn.Linear(config.hidden_size, config.outputs, bias=False)
        self.head.weight = self.embed.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def embedded(self, ids: Tensor) -> Tensor:
        embedded: Tensor = self.embed(ids) * self.config.hidden_size**0.5
        return embedded

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Tensor:
        return self.run(input_ids, Inputs(None if attention_mask is None else attention_mask.bool()))


class PictureModel(LabModel):
    """Pictures `[B, 1, S, S]` in, cut into patches behind a [CLS] token, whose output is the class's logits."""

    main_input_name = "pixel_values"

    def __init__(self, config: LabConfig, specs: AttentionSpec | Sequence[AttentionSpec]) -> None:
        super().__init__(config, specs)
        side = config.image_size // config.patch_size
        self.embed = nn.Linear(config.patch_size**2, config.hidden_size)
        self.start = nn.Parameter(torch.randn(config.hidden_size) * 0.02)
        self.position = nn.Parameter(torch.randn(1 + side * side, config.hidden_size) * 0.02)

    def embedded(self, pixels: Tensor) -> Tensor:
        size = self.config.patch_size
        patches = pixels[:, 0].unfold(1, size, size).unfold(2, size, size).flatten(3).flatten(1, 2)
        first = self.start.expand(len(pixels), 1, -1)
        return torch.cat([first, self.embed(patches)], 1) + self.position

    def forward(self, pixel_values: Tensor, **_: Any) -> ImageClassifierOutput:
        """`hidden_states` holds the embedded tokens alone."""
        embedded = self.embedded(pixel_values)
        return ImageClassifierOutput(logits=self.run(pixel_values)[:, 0], hidden_states=(embedded,))


@functools.cache
def border(side: int) -> Tensor:
    """Which of side x side patches lie at the picture's border, `[side * side]`, row by row."""
    at_border = torch.ones(side, side, dtype=torch.bool)
    at_border[1:-1, 1:-1] = False
    return at_border.flatten()
