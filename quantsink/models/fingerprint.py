"""What identifies a model's weights and a tokenizer."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import torch
from accelerate.utils import align_module_device, has_offloaded_params
from torch import nn

from quantsink.errors import ModelError
from quantsink.models.finite import all_finite

CONFIG_FACTS = (
    "rope_parameters", "sliding_window", "layer_types", "hidden_act", "hidden_activation", "rms_norm_eps",
    "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "attention_multiplier",
    "residual_multiplier", "embedding_multiplier", "logits_scaling",
)  # fmt: skip


HASHED = 2**22
"""Numbers hashed at a time."""


def model_fingerprint(model: nn.Module) -> tuple[str, str]:
    """What identifies a model whatever type it was loaded in.

    Two sha256 over the config's facts that change results and each parameter's name, shape and values: rounded to
    bfloat16, and rounded to float16 and then to bfloat16. Models in float32 and bfloat16 share the first; a model in
    float16 has the second twice.

    A parameter that accelerate keeps elsewhere is read where it lies.

    Raises:
        ModelError: a weight that is not finite, or that has no data, by name.
    """
    tied = getattr(model, "all_tied_weights_keys", {})
    parameters = (
        (name, _values(model, name, parameter))
        for name, parameter in model.named_parameters()
        if not (parameter.is_meta and name in tied)  # two empty parameters are no longer seen to be one
    )
    return fingerprint(model.config, parameters)


def fingerprint(config: Any, parameters: Iterable[tuple[str, torch.Tensor]]) -> tuple[str, str]:
    """`model_fingerprint` of parameters that come one by one."""
    text = config.get_text_config(decoder=True)
    known = {name: getattr(text, name, None) for name in CONFIG_FACTS}
    facts = json.dumps(known, sort_keys=True, default=str).encode()
    digests = hashlib.sha256(facts), hashlib.sha256(facts)
    for name, values in parameters:
        for digest in digests:
            digest.update(f"{name}{tuple(values.shape)}".encode())
        for part in values.flatten().split(HASHED):
            if not all_finite(part):
                raise ModelError(f"{name}: holds NaN or inf; this model cannot be measured or quantized")
            for digest, rounded in zip(digests, (part, part.half()), strict=True):
                digest.update(rounded.to(torch.bfloat16).view(torch.uint8).numpy())
    return digests[0].hexdigest(), digests[1].hexdigest()


def _values(model: nn.Module, name: str, parameter: nn.Parameter) -> torch.Tensor:
    if not parameter.is_meta:
        return parameter.detach().to("cpu")
    owner, _, attribute = name.rpartition(".")
    module = model.get_submodule(owner)
    if has_offloaded_params(module):
        with align_module_device(module, torch.device("cpu")):
            parameter = getattr(module, attribute)
    if parameter.is_meta:
        raise ModelError(f"{name}: on the meta device, without data; load the model with its weights")
    return parameter.detach()


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """sha256 over the vocabulary and the special tokens; of nothing where a model needs no tokenizer."""
    digest = hashlib.sha256()
    if tokenizer is None:
        return digest.hexdigest()
    for token, index in sorted(tokenizer.get_vocab().items()):
        digest.update(f"{token}\0{index}\0".encode("utf-8", "surrogatepass"))
    digest.update(repr(sorted(tokenizer.special_tokens_map.items(), key=str)).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()
