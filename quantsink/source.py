"""MODEL: a hub id, a local folder, or a `.gguf` file, and what identifies the weights that came out of it."""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.utils import align_module_device, has_offloaded_params
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import cached_file

from quantsink import strict_json
from quantsink.errors import ModelError, UsageError

DTYPES = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
GGUF_NOTE = (
    "The weights come from a GGUF file and lie on its grid already (4 bits, where it is Q4): 8-bit weights, "
    "activations and attention can be judged on them, weights below 8 bits cannot."
)
_SHARD = re.compile(r"[\w-][\w.-]*\.safetensors")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class Source:
    """A model that was found but not loaded yet."""

    name: str
    root: str
    gguf: str | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of figures measured on this model must know."""
        return (GGUF_NOTE,) if self.gguf else ()

    @property
    def _arguments(self) -> dict[str, Any]:
        return {"gguf_file": self.gguf} if self.gguf else {}

    def tokenizer(self, trust_remote_code: bool = False) -> Any:
        with self.loading("tokenizer"):
            return AutoTokenizer.from_pretrained(self.root, trust_remote_code=trust_remote_code, **self._arguments)

    def config(self, trust_remote_code: bool = False) -> Any:
        """The config of a model that is not quantized.

        Raises:
            ModelError: not found, damaged, or quantized already.
        """
        with self.loading("model"):
            config = AutoConfig.from_pretrained(self.root, trust_remote_code=trust_remote_code)
        method = getattr(config, "quantization_config", None)
        if method:
            name = method.get("quant_method") if isinstance(method, dict) else method
            raise ModelError(f"{self.name}: already quantized ({name}); give the original model")
        return config

    def weight_files(self) -> list[Path] | None:
        """The safetensors files, in order of their names; None where there are none.

        Raises:
            ModelError: an index that is damaged, names files outside the model, or files that are not there.
        """
        for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME):
            found = self._file(name)
            if found is None:
                continue
            names = [name] if name == SAFE_WEIGHTS_NAME else shard_names(found)
            files = [self._file(shard) for shard in names]
            if None in files:
                raise ModelError(f"{self.name}: {names[files.index(None)]} is not there; fetch the model again")
            return [file for file in files if file is not None]
        return None

    def _file(self, name: str) -> Path | None:
        try:
            found = cached_file(self.root, name)
        except OSError:
            return None
        return None if found is None else Path(found)

    def model(self, dtype: str = "auto", device: str = "cpu", trust_remote_code: bool = False) -> Any:
        """The model in eval mode. `dtype`: auto (the checkpoint's own; float32 for GGUF), float32, bfloat16, float16.

        Raises:
            ModelError: not found, damaged, not a causal language model, quantized already, or code of its own that is
                not trusted.
        """
        chosen = self.dtype(dtype)
        if Path(self.root).is_dir() and not self.gguf:
            self.weight_files()
        with self.loading("model"):
            kind: Any = AutoModelForCausalLM
            if not self.gguf:
                kind = model_class(self.config(trust_remote_code))
            loaded: Any = kind.from_pretrained(
                self.root,
                dtype=chosen,
                output_loading_info=True,
                trust_remote_code=trust_remote_code,
                **self._arguments,
            )
            model, info = loaded
        missing = sorted(info["missing_keys"])
        if missing:
            raise ModelError(f"{self.name}: {missing[0]} is missing from its weight files; fetch the model again")
        if self.gguf:
            model.hf_quantizer.remove_quantization_config(model)
            model.config.dtype = model.dtype
        return check_device(model, device).eval()

    def dtype(self, name: str) -> Any:
        """What transformers takes for `--dtype`."""
        if name not in DTYPES:
            raise UsageError(f"--dtype {name}: not one of {', '.join(DTYPES)}")
        return torch.float32 if self.gguf and name == "auto" else DTYPES[name]

    @contextlib.contextmanager
    def loading(self, what: str) -> Iterator[None]:
        """Turn whatever transformers raises into one line."""
        try:
            yield
        except ModelError:
            raise
        except Exception as error:
            if "trust_remote_code" in str(error):
                raise ModelError(
                    f"{self.name}: its {what} is code in its own repository (auto_map), which does not run unless you "
                    "say so; read it, then pass --trust-remote-code"
                ) from error
            first = " ".join(str(error).split()).split(". ")[0][:240]
            raise ModelError(
                f"{self.name}: its {what} cannot be loaded: {type(error).__name__}: {first}; "
                "give a complete local folder, or check the hub id and the network"
            ) from error


def model_class(config: Any) -> Any:
    """What loads a model: AutoModelForCausalLM, or the own class of one that cannot generate, such as an encoder."""
    names = getattr(config, "architectures", None)
    named = getattr(transformers, str(names[0]), None) if isinstance(names, list) and names else None
    return AutoModelForCausalLM if named is None or named.can_generate() else named


def shard_names(index: Path) -> list[str]:
    """Names of the files that a safetensors index speaks of, in order.

    Raises:
        ModelError: a damaged index, or one that names a file outside its own folder.
    """
    try:
        names = sorted(set(strict_json.parse(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{index}: cannot be read: {strict_json.said(error)}; fetch the model again") from error
    outside = [name for name in names if not isinstance(name, str) or not _SHARD.fullmatch(name)]
    if outside or not names:
        found = f"names {strict_json.shown(outside[0])}, no file beside it" if outside else "names no file"
        raise ModelError(f"{index}: {found}; do not use this model, or fetch it again")
    return names


def find(name: str) -> Source:
    """Decide what MODEL is, without loading anything.

    Raises:
        ModelError: no such file or folder, and not a possible hub id.
    """
    path = Path(name)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"{name}: no such .gguf file")
        return Source(name, str(path.parent), path.name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{name}: the folder has no config.json; a model folder is what save_pretrained writes")
        return Source(name, str(path))
    if path.exists() or not _HUB_ID.fullmatch(name):
        raise ModelError(f"{name}: neither a folder, a .gguf file nor a hub id")
    return Source(name, name)


def check_length(model: Any, length: int, option: str) -> None:
    """Refuse windows longer than the model was made for."""
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if isinstance(limit, int) and length > limit:
        raise UsageError(f"{option} {length}: the model takes at most {limit} tokens")


def check_vocabulary(model: Any, largest: int) -> None:
    """Refuse token ids that the model does not have."""
    size = model.get_input_embeddings().num_embeddings
    if largest >= size:
        raise ModelError(f"token id {largest} from the tokenizer, the model has {size}; they do not belong together")


def check_device(model: Any, device: str) -> Any:
    try:
        return model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {device}: {str(error).splitlines()[0]}") from error


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
            if part.numel() and not bool(part.amax().isfinite() & part.amin().isfinite()):  # both carry NaN
                raise ModelError(f"{name}: holds NaN or inf; this model cannot be measured or quantized")
            for digest, rounded in zip(digests, (part, part.half()), strict=True):
                digest.update(rounded.to(torch.bfloat16).view(torch.uint8).numpy())
    return digests[0].hexdigest(), digests[1].hexdigest()


def _values(model: nn.Module, name: str, parameter: nn.Parameter) -> torch.Tensor:
    if not parameter.is_meta:
        return parameter.detach().to("cpu")
    owner, _, own = name.rpartition(".")
    module = model.get_submodule(owner)
    if has_offloaded_params(module):
        with align_module_device(module, torch.device("cpu")):
            parameter = getattr(module, own)
    if parameter.is_meta:
        raise ModelError(f"{name}: on the meta device, without data; load the model with its weights")
    return parameter.detach()


def check_not_offloaded(model: nn.Module) -> None:
    """Refuse a model whose modules cannot be exchanged, because accelerate keeps their weights elsewhere."""
    for name, module in model.named_modules():
        if has_offloaded_params(module):
            raise ModelError(f"{name}: its weights are offloaded; only calibrate takes such models, load it whole")


def input_device(model: nn.Module) -> torch.device:
    """Where token ids belong, also if accelerate keeps the weights elsewhere until they are needed."""
    for module in model.modules():
        if has_offloaded_params(module):
            hook: Any = module._hf_hook
            return torch.device(hook.execution_device)
        for parameter in module.parameters(recurse=False):
            return parameter.device
    raise ModelError(f"{type(model).__name__}: no parameters")


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """sha256 over the vocabulary and the special tokens; of nothing where a model needs no tokenizer."""
    digest = hashlib.sha256()
    if tokenizer is None:
        return digest.hexdigest()
    for token, index in sorted(tokenizer.get_vocab().items()):
        digest.update(f"{token}\0{index}\0".encode("utf-8", "surrogatepass"))
    digest.update(repr(sorted(tokenizer.special_tokens_map.items(), key=str)).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


@contextlib.contextmanager
def quiet_loading() -> Iterator[None]:
    """No progress bars and warnings of transformers while the command line has its own."""
    level = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
