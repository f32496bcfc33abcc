"""MODEL: a hub id, a local folder, or a `.gguf` file, and what identifies the weights that came out of it."""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.utils import has_offloaded_params
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
            file = self._file(name)
            if file is None:
                continue
            names = [name] if name == SAFE_WEIGHTS_NAME else shard_names(file)
            files = [self._file(shard) for shard in names]
            if None in files:
                raise ModelError(f"{self.name}: {names[files.index(None)]} is not there; fetch the model again")
            return [file for file in files if file is not None]
        return None

    def _file(self, name: str) -> Path | None:
        try:
            path = cached_file(self.root, name)
        except OSError:
            return None
        return None if path is None else Path(path)

    def model(self, dtype: str = "auto", device: str = "cpu", trust_remote_code: bool = False) -> Any:
        """The model in eval mode. `dtype`: auto (the checkpoint's own; float32 for GGUF), float32, bfloat16, float16.

        Raises:
            ModelError: not found, damaged, not a causal language model, quantized already, or with custom code that
                is not trusted.
        """
        chosen = self.dtype(dtype)
        if Path(self.root).is_dir() and not self.gguf:
            self.weight_files()
        with self.loading("model"):
            loader: Any = AutoModelForCausalLM
            if not self.gguf:
                loader = model_class(self.config(trust_remote_code))
            loaded: Any = loader.from_pretrained(
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
                    f"{self.name}: its {what} needs custom code from its repository (auto_map), which is disabled by "
                    "default; review it, then pass --trust-remote-code"
                ) from error
            first = " ".join(str(error).split()).split(". ")[0][:240]
            raise ModelError(
                f"{self.name}: its {what} cannot be loaded: {type(error).__name__}: {first}; "
                "give a complete local folder, or check the hub id and the network"
            ) from error


def model_class(config: Any) -> Any:
    """What loads a model: AutoModelForCausalLM, or the model's class where it cannot generate, as an encoder."""
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
        raise ModelError(f"{index}: cannot be read: {strict_json.one_line(error)}; fetch the model again") from error
    outside = [name for name in names if not isinstance(name, str) or not _SHARD.fullmatch(name)]
    if outside or not names:
        fault = f"names {strict_json.abbreviated(outside[0])}, no file beside it" if outside else "names no file"
        raise ModelError(f"{index}: {fault}; do not use this model, or fetch it again")
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


def check_not_offloaded(model: nn.Module) -> None:
    """Refuse a model whose modules cannot be exchanged, because accelerate keeps their weights elsewhere."""
    for name, module in model.named_modules():
        if has_offloaded_params(module):
            raise ModelError(f"{name}: its weights are offloaded; only calibrate takes such models, load it whole")


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
