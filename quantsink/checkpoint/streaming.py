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

from quantsink.checkpoint.safetensors_io import NotStreamableError, Stored, lay, read_headers, write
from quantsink.errors import ModelError, QuantSinkError
from quantsink.hf.convert import Exchange, dead_channels, warn_of_zeros
from quantsink.hf.patches import changing
from quantsink.hf.quantizer import quantize_with
from quantsink.layers.replacement import Site
from quantsink.layers.token_context import TokenContext
from quantsink.models.architecture import matrix
from quantsink.models.fingerprint import fingerprint
from quantsink.models.source import Source, model_class
from quantsink.plan import Plan
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
        self._origin = {name: stored[stored_name] for name, stored_name in names.items() if stored_name is not None}
        self._dtypes = {name: tensor.dtype for name, tensor in state.items()}
        self._original = dict(model.named_modules())
        self._owned = {prefix: self._names(prefix, module) for prefix, module in self._original.items()}
        self._exchanges: Mapping[str, Exchange] = {}
        self._counted: set[str] = set()

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
        with changing(self.model) as changes:
            self._exchanges = quantize_with(changes, plan)
        self._counted = set(plan.linears)

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
        for name, tensor in self._tensors_of_modules(places):
            expected = state[name]
            if (tensor.shape, tensor.dtype) != (expected.shape, expected.dtype):
                raise QuantSinkError(f"{name}: {tensor.dtype} {list(tensor.shape)} is not what was announced; a bug")
            write(*places.pop(name), tensor)
        if places:
            raise QuantSinkError(f"{min(places)}: no tensor was made for it; a bug")

    def _tensors_of_modules(self, announced: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """Every announced tensor, made in the order of the modules."""
        left = set(announced)
        total, done = sum(self._origin[name].size for names in self._owned.values() for name in names), 0
        dead: dict[str, int] = {}
        for prefix, module in self.model.named_modules():
            yield from self._tensors(prefix, module, left, dead)
            done += sum(self._origin[name].size for name in self._owned.get(prefix, ()))
            self._tell("writing, MB", done, total)
        warn_of_zeros(dead)

    def _names(self, prefix: str, module: nn.Module) -> list[str]:
        """Names of the source's tensors that belong to a module itself."""
        names = (f"{prefix}.{tensor}".strip(".") for tensor in (*module._parameters, *module._buffers))
        return [name for name in names if name in self._origin]

    def _tensors(
        self, prefix: str, module: nn.Module, names: set[str], dead: dict[str, int]
    ) -> Iterator[tuple[str, Tensor]]:
        replacement = self._module(prefix, dead)
        if replacement is not None:
            yield from ((f"{prefix}.{name}", tensor) for name, tensor in replacement.state_dict().items())
            return
        for tensor_name in (*module._parameters, *module._buffers):
            name = f"{prefix}.{tensor_name}".strip(".")
            if name in names:
                yield name, self.read(name)

    def _module(self, prefix: str, dead: dict[str, int]) -> nn.Module | None:
        """The module with its data, where it is one of ours."""
        if prefix not in self._exchanges:
            return None
        original: Any = self._filled(prefix) if prefix in self._original else None
        if original is None and prefix in self._origin:
            original = self.read(prefix)
        if prefix in self._counted:
            dead[prefix] = dead_channels(matrix(original))
        replacement, place, specification = self._exchanges[prefix]
        return replacement.of(Site(place, original, torch.device("cpu"), TokenContext(0)), specification)

    def _filled(self, name: str) -> Any:
        """An original module with its weights."""
        module: nn.Module = copy.copy(self._original[name])
        module._parameters = {
            parameter: None if empty is None else nn.Parameter(self.read(f"{name}.{parameter}"), requires_grad=False)
            for parameter, empty in module._parameters.items()
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
    read_as_stored = {name for name in names if name in stored}
    left = names - read_as_stored - set(model.all_tied_weights_keys) - set(model.all_tied_weights_keys.values())
    if model._weight_conversions or left:
        raise NotStreamableError("its tensors need conversion")
    return StreamedModel(model, stored, progress)


def _skeleton(
    source: Source, config: Any, dtype: Any, stored: Mapping[str, Stored], trust_remote_code: bool
) -> tuple[Any, list[str]]:
    """What `from_pretrained` makes of tensors that hold no data, and the tensors that it misses."""
    loader = model_class(config)
    config.name_or_path = source.root
    with torch.device("meta"):
        auto = hasattr(loader, "from_config")
        options = {"trust_remote_code": trust_remote_code}
        first = loader.from_config(config, **options) if auto else loader(copy.deepcopy(config))
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
    for name, shape, expected in sorted(info["mismatched_keys"]):
        raise ModelError(
            f"{source.name}: {name} is {list(shape)} where {list(expected)} belongs by its config.json; fetch the "
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
