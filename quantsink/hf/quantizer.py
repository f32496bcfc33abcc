"""What makes transformers save and load quantsink checkpoints: a quantization config and a quantizer, registered."""

import logging
from pathlib import Path
from typing import Any

import torch
from transformers.core_model_loading import dot_natural_key
from transformers.quantizers.base import HfQuantizer

from quantsink.errors import CheckpointError, QuantSinkError
from quantsink.hf.attention import NAME
from quantsink.hf.config import MOST_LAYERS, UNIMPORTED, QuantSinkConfig
from quantsink.hf.convert import Exchange, apply_plan, build
from quantsink.hf.own_cache import install
from quantsink.hf.patches import Changes, changing, mark, use_attention
from quantsink.hf.validate import check_tensors, check_values
from quantsink.plan import Plan


class QuantSinkQuantizer(HfQuantizer):
    """Builds the quantized modules before transformers fills them from the shards."""

    requires_calibration = True
    quantization_config: QuantSinkConfig
    ours = False
    """Whether the model computes attention through quantsink."""

    def update_attn_implementation(self, config: Any) -> Any:
        """Ours is set once the modules are there: some model classes take it only then."""
        self._check_layers(config)
        has_tables = bool(self.quantization_config.attentions) or self.quantization_config.kv_cache is not None
        requested = config._attn_implementation
        if requested in (None, UNIMPORTED, NAME):
            self.ours = has_tables
            config._attn_implementation = None
        elif has_tables:
            logging.getLogger(__name__).warning(
                "attn_implementation=%r: the checkpoint's INT8 attention and its KV cache are not used; leave the "
                "argument out to use them",
                requested,
            )
        return config

    def _check_layers(self, config: Any) -> None:
        """Before the model is built: a damaged number of layers would have transformers build for hours."""
        layers = getattr(config.get_text_config(decoder=True), "num_hidden_layers", None)
        most = max(len(self.quantization_config.attentions), MOST_LAYERS)
        if isinstance(layers, int) and layers > most:
            raise CheckpointError(f"config.json: num_hidden_layers {layers}, {most} at most here; export again")

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        with changing(model) as changes:
            build(changes, self.quantization_config)
            if self.ours:
                use_attention(changes)
        files = kwargs.get("checkpoint_files")
        if files:
            check_tensors(model, [Path(file) for file in files])
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        check_values(model)
        plan = self.quantization_config.cache_plan()
        with changing(model) as changes:
            mark(changes, self)
            if plan is not None and model.config._attn_implementation == NAME:
                try:
                    install(changes, plan)
                except QuantSinkError as error:
                    raise CheckpointError(f"config.json: quantization_config.kv_cache: {error}") from error
        return model

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """In the order in which transformers saves a loaded model, so that a second save gives the same shards."""
        return dict(sorted(model.state_dict().items(), key=lambda item: dot_natural_key(item[0]))), {}

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False


def quantize(model: Any, plan: Plan) -> Any:
    """Quantize `model` in place, ready for `save_pretrained`, and return it.

    Raises:
        As `convert.apply`; the model has not been changed then.
    """
    with changing(model) as changes:
        quantize_with(changes, plan)
    return model


def quantize_with(changes: Changes, plan: Plan) -> dict[str, Exchange]:
    """As `quantize`, with other changes; returns what was exchanged, by place."""
    quantizer = QuantSinkQuantizer(QuantSinkConfig.of(plan), pre_quantized=True)
    exchanges = apply_plan(changes, plan)
    mark(changes, quantizer)
    return exchanges
