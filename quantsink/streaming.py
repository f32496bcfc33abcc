"""Export tensor by tensor: each is read from the model's safetensors, quantized and put in its place in the output.

The model itself exists only on the meta device: what transformers would have loaded, without data. One source tensor
and what is made of it are in memory at a time, whatever the size of the model or of a shard.
"""

import copy
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from quantsink import strict_json
from quantsink.apply import apply, dead_channels, warn_of_zeros
from quantsink.architecture import Architecture, matrix
from quantsink.attention import AttentionTable
from quantsink.cache import CacheTable
from quantsink.errors import ModelError, QuantSinkError
from quantsink.experts import ExpertWeights
from quantsink.integration import QuantSinkConfig, finish
from quantsink.linear import QuantizedLinear
from quantsink.plan import Plan, head_plan
from quantsink.source import Source, fingerprint, model_class

_DTYPES = {
    "U64": torch.uint64, "I64": torch.int64, "F64": torch.float64, "F32": torch.float32, "U32": torch.uint32,
    "I32": torch.int32, "BF16": torch.bfloat16, "F16": torch.float16, "U16": torch.uint16, "I16": torch.int16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip
"""Types by their names in a file, in the order in which safetensors lays tensors."""
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ORDER = {dtype: place for place, dtype in enumerate(_DTYPES.values())}
_LONGEST_HEADER = 100_000_000

Progress = Callable[[str, int, int], None]


class NotStreamableError(ModelError):
    """Why a model must be loaded whole: transformers does more on loading it than reading tensors."""


@dataclass(frozen=True)
class Stored:
    """One tensor of a safetensors file: its bytes lie from `start` on."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def meta(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def read(self) -> Tensor:
        """Read, not mapped: a mapped file would count against what limits a process's memory.

        Raises:
            ModelError: the file cannot be read.
        """
        found = torch.empty(self.shape, dtype=self.dtype)
        into, done = memoryview(_bytes(found)), 0
        try:
            with self.file.open("rb", buffering=0) as file:
                file.seek(self.start)
                while done < self.size:
                    count = file.readinto(into[done:])
                    if not count:
                        raise OSError(f"ends after {self.start + done} bytes")
                    done += count
        except OSError as error:
            raise ModelError(
                f"{self.file}: cannot be read: {error.strerror or error}; fetch the model again"
            ) from error
        return found


def read_headers(files: Iterable[Path]) -> dict[str, Stored]:
    """Every tensor of a model's safetensors files.

    Raises:
        ModelError: a damaged file, or a tensor that is in two of them.
        NotStreamableError: a type that PyTorch does not have.
    """
    found: dict[str, Stored] = {}
    for file in files:
        for name, stored in sorted(_header(file).items()):
            if name in found:
                raise ModelError(
                    f"{file}: {name} is also in {found[name].file.name}, two tensors of one name; fetch the model again"
                )
            found[name] = stored
    return found


def _header(file: Path) -> dict[str, Stored]:
    """A file's tensors, which must fill it without gaps or overlaps."""
    found, end = {}, 0
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if length > min(_LONGEST_HEADER, file.stat().st_size):
                raise ValueError("its header is longer than the file")
            entries = strict_json.parse(opened.read(length))
        entries.pop("__metadata__", None)
        for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
            first, last = entry["data_offsets"]
            if entry["dtype"] not in _DTYPES:
                raise NotStreamableError(f"{name} in {file.name} is {entry['dtype']}")
            if not all(type(size) is int and size >= 0 for size in entry["shape"]):
                raise ValueError(f"{name} has a shape that cannot be right")
            stored = Stored(file, _DTYPES[entry["dtype"]], tuple(entry["shape"]), 8 + length + first)
            if first != end or last != first + stored.size:
                raise ValueError(f"{name} does not lie where its header says")
            found[name], end = stored, last
        if 8 + length + end != file.stat().st_size:
            raise ValueError(f"holds {file.stat().st_size} bytes where its header says {8 + length + end}")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelError(f"{file}: its model cannot be loaded, damaged: {error}; fetch the model again") from error
    return found


def _bytes(tensor: Tensor) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy()


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


def lay(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, tuple[Path, int]]:
    """Begin a safetensors file: its header, and room for tensors in the order that safetensors gives them.

    Returns:
        Where each tensor's bytes belong.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    starts, end = {}, 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (_ORDER[item[1].dtype], item[0])):
        starts[name], size = end, tensor.numel() * tensor.dtype.itemsize
        end += size
        header[name] = {
            "dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [end - size, end],
        }  # fmt: skip
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return {name: (path, 8 + len(text) + start) for name, start in starts.items()}


def put(path: Path, start: int, tensor: Tensor) -> None:
    """Write a tensor's bytes where `lay` made room for them."""
    rest = memoryview(_bytes(tensor.detach().contiguous()))
    with path.open("r+b", buffering=0) as file:
        while rest:
            start += (count := os.pwrite(file.fileno(), rest, start))
            rest = rest[count:]


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
