"""Export tensor by tensor: each is read from the model's safetensors, quantized and put in its place in the output.

The model itself exists only on the meta device: what transformers would have loaded, without data. One source tensor
and what is made of it are in memory at a time, whatever the size of the model or of a shard.
"""

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from quantsink.checkpoint.safetensors_io import NotStreamableError, Stored, lay, put, read_headers
from quantsink.errors import ModelError, QuantSinkError
from quantsink.hf.config import QuantSinkConfig
from quantsink.hf.convert import apply, dead_channels, warn_of_zeros
from quantsink.hf.quantizer import finish
from quantsink.layers.experts import ExpertWeights
from quantsink.layers.linear import QuantizedLinear
from quantsink.layers.tables import AttentionTable, CacheTable
from quantsink.models.architecture import Architecture, matrix
from quantsink.models.fingerprint import fingerprint
from quantsink.models.source import Source, model_class
from quantsink.plan import Plan, head_plan
from quantsink.progress import Progress


class StreamedModel:
    """A model whose tensors stay in their files until one is needed. `quantize`, then `save_pretrained`.

    Args:
        model: on the meta device, as transformers loads it.
        stored: the source's tensors.
        progress: told of bytes, in MB.
    """

    def __init__(self, model: Any, stored: Mapping[str, Stored], progress: Progress = lambda *_: None) -> None:
        self.model, self.progress = model, progress
        state = model.state_dict(keep_vars=True)
        tied: dict[int, list[str]] = {}
        for name, tensor in state.items():
            tied.setdefault(id(tensor), []).append(name)
        names = {name: next((n for n in tied[id(tensor)] if n in stored), None) for name, tensor in state.items()}
        self._origin = {name: stored[own] for name, own in names.items() if own is not None}
        self._dtypes = {name: tensor.dtype for name, tensor in state.items()}
        self._original = dict(model.named_modules())
        self._owned = {prefix: self._names(prefix, module) for prefix, module in self._original.items()}
        self._plan: Plan | None = None

    @property
    def quantization_method(self) -> str | None:
        return getattr(self.model, "quantization_method", None)

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def bytes(self) -> int:
        """What the weights would take in memory."""
        return sum(parameter.numel() * parameter.dtype.itemsize for parameter in self.model.parameters())

    def read(self, name: str) -> Tensor:
        """A tensor of the model in the type that it is loaded in."""
        return self._origin[name].read().to(self._dtypes[name])

    def fingerprint(self) -> tuple[str, str]:
        """`model_fingerprint` of what the files hold.

        Raises:
            ModelError: a weight that is not finite, by name.
        """
        return fingerprint(self.model.config, self._parameters())

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        names = [name for name, _ in self.model.named_parameters()]
        total, done = sum(self._origin[name].size for name in names), 0
        for name in names:
            yield name, self.read(name)
            done += self._origin[name].size
            self._tell("checking, MB", done, total)

    def _tell(self, what: str, done: int, total: int) -> None:
        self.progress(what, done // 10**6, max(1, total // 10**6))

    def quantize(self, plan: Plan) -> None:
        """Exchange modules as `plan` says; their tensors are made when they are saved."""
        config = QuantSinkConfig.of(plan)
        architecture = Architecture.of(self.model)
        self._layers = {layer.name: layer for layer in architecture.attentions}
        apply(self.model, plan)
        finish(self.model, config)
        self._plan = plan

    def save_pretrained(self, folder: str | Path, max_shard_size: str = "5GB") -> None:
        """Write what `save_pretrained` of the quantized model would write, byte for byte."""
        folder, model = Path(folder), self.model
        state, metadata = model.hf_quantizer.get_state_dict_and_metadata(model)
        for name in model._keys_to_ignore_on_save or ():
            state.pop(name, None)
        state = remove_tied_weights_from_state_dict(state, model)
        split = split_torch_state_dict_into_shards(
            state, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
        )
        model.hf_quantizer, quantizer = None, model.hf_quantizer
        try:
            model.save_pretrained(folder, state_dict={})  # the configs alone
        finally:
            model.hf_quantizer = quantizer
        places: dict[str, tuple[Path, int]] = {}
        for file, names in split.filename_to_tensors.items():
            places |= lay(folder / file, {name: state[name] for name in names}, {**metadata, "format": "pt"})
        if split.is_sharded:
            index = {
                "metadata": {"total_parameters": model.num_parameters(), **split.metadata},
                "weight_map": split.tensor_to_filename,
            }
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(text, encoding="utf-8")
        for name, tensor in self._made(places):
            expected = state[name]
            if (tensor.shape, tensor.dtype) != (expected.shape, expected.dtype):
                raise QuantSinkError(f"{name}: {tensor.dtype} {list(tensor.shape)} is not what was announced; a bug")
            put(*places.pop(name), tensor)
        if places:
            raise QuantSinkError(f"{min(places)}: no tensor was made for it; a bug")

    def _made(self, wanted: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """Every tensor that is in `wanted`, made in the order of the modules."""
        left = set(wanted)
        total, done = sum(self._origin[name].size for names in self._owned.values() for name in names), 0
        dead: dict[str, int] = {}
        for prefix, module in self.model.named_modules():
            yield from self._tensors(prefix, module, left, dead)
            done += sum(self._origin[name].size for name in self._owned.get(prefix, ()))
            self._tell("writing, MB", done, total)
        warn_of_zeros(dead)

    def _names(self, prefix: str, module: nn.Module) -> list[str]:
        """Names of the source's tensors that belong to a module itself."""
        names = (f"{prefix}.{own}".strip(".") for own in (*module._parameters, *module._buffers))
        return [name for name in names if name in self._origin]

    def _tensors(
        self, prefix: str, module: nn.Module, names: set[str], dead: dict[str, int]
    ) -> Iterator[tuple[str, Tensor]]:
        made = self._module(prefix, module, dead)
        if made is not None:
            yield from ((f"{prefix}.{name}", tensor) for name, tensor in made.state_dict().items())
            return
        for own in (*module._parameters, *module._buffers):
            name = f"{prefix}.{own}".strip(".")
            if name in names:
                yield name, self.read(name)

    def _module(self, prefix: str, module: nn.Module, dead: dict[str, int]) -> nn.Module | None:
        """The module with its data, where it is one of ours."""
        plan = self._plan
        assert plan is not None
        parent = prefix.rpartition(".")[0]
        if isinstance(module, QuantizedLinear):
            linear = self._filled(prefix)
            if prefix in plan.linears:
                dead[prefix] = dead_channels(matrix(linear))
            return QuantizedLinear.of(
                prefix, linear, plan.linears.get(prefix) or head_plan(plan.recipe), module.context
            )
        if isinstance(module, ExpertWeights):
            return ExpertWeights.of(self.read(prefix), module.transposed)
        if isinstance(module, AttentionTable):
            return AttentionTable.of(
                self._layers[parent], plan.attentions[parent], plan.recipe.attention, module.context
            )
        if isinstance(module, CacheTable):
            assert plan.cache is not None
            table: nn.Module = copy.copy(module)
            table._buffers = {"query_gram": plan.cache.query_gram[parent]}
            return table
        return None

    def _filled(self, name: str) -> nn.Module:
        """An original module with its weights."""
        module: nn.Module = copy.copy(self._original[name])
        module._parameters = {
            own: None if empty is None else nn.Parameter(self.read(f"{name}.{own}"), requires_grad=False)
            for own, empty in module._parameters.items()
        }
        return module


def stream(
    source: Source, dtype: str = "auto", trust_remote_code: bool = False, progress: Progress = lambda *_: None
) -> StreamedModel:
    """Find a model's tensors and build it without data.

    Raises:
        ModelError: not found, damaged, incomplete, or quantized already.
        NotStreamableError: transformers would convert something on loading it.
    """
    chosen = source.dtype(dtype)
    if source.gguf:
        raise NotStreamableError("a GGUF file needs conversion")
    config = source.config(trust_remote_code)
    files = source.weight_files()
    if files is None or getattr(config, "transformers_weights", None) or getattr(type(config), "extra_files", None):
        raise NotStreamableError("its weights are not in model.safetensors or its shards")
    if (Path(source.root) / "adapter_config.json").exists():
        raise NotStreamableError("it has an adapter")
    stored = read_headers(files)
    with source.loading("model"):
        model, missing = _skeleton(source, config, chosen, stored, trust_remote_code)
    if missing:
        raise ModelError(f"{source.name}: {missing[0]} is missing from its weight files; fetch the model again")
    names = model.state_dict().keys()
    own = {name for name in names if name in stored}
    left = names - own - set(model.all_tied_weights_keys) - set(model.all_tied_weights_keys.values())
    if model._weight_conversions or left:
        raise NotStreamableError("its tensors need conversion")
    return StreamedModel(model, stored, progress)


def _skeleton(
    source: Source, config: Any, dtype: Any, stored: Mapping[str, Stored], trust_remote_code: bool
) -> tuple[Any, list[str]]:
    """What `from_pretrained` makes of tensors that hold no data, and the tensors that it misses."""
    kind = model_class(config)
    config.name_or_path = source.root
    with torch.device("meta"):
        auto = hasattr(kind, "from_config")
        first = kind.from_config(config, trust_remote_code=trust_remote_code) if auto else kind(copy.deepcopy(config))
    tied = first.all_tied_weights_keys
    for target, main in tied.items():
        if target in stored and main in stored and not _same(stored[target], stored[main]):
            raise NotStreamableError(f"{target} and {main} are tied and differ")
    stored = {name: tensor for name, tensor in stored.items() if tied.get(name) not in stored}
    model, info = type(first).from_pretrained(
        None,
        config=first.config,
        state_dict={name: tensor.meta() for name, tensor in stored.items()},
        device_map={"": "meta"},
        dtype=dtype,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    for name, found, expected in sorted(info["mismatched_keys"]):
        raise ModelError(
            f"{source.name}: {name} is {list(found)} where {list(expected)} belongs by its config.json; fetch the "
            "model again"
        )
    model.config.name_or_path = source.root
    if model.can_generate():
        try:
            model.generation_config = GenerationConfig.from_pretrained(source.root)
        except OSError:
            model.generation_config = GenerationConfig.from_pretrained(
                source.root, config_file_name="config.json", _from_model_config=True
            )
    return model, sorted(info["missing_keys"])


def _same(first: Stored, second: Stored) -> bool:
    return (first.shape, first.dtype) == (second.shape, second.dtype) and torch.equal(first.read(), second.read())


__all__ = ["NotStreamableError", "StreamedModel", "stream"]
