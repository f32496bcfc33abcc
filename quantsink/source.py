"""MODEL: a hub id, a local folder, or a `.gguf` file, and what identifies the weights that came out of it."""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from quantsink.errors import ModelError, UsageError

DTYPES = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
GGUF_NOTE = (
    "The weights come from a GGUF file and lie on its grid already (4 bits, where it is Q4): 8-bit weights, "
    "activations and attention can be judged on them, weights below 8 bits cannot."
)
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

    def tokenizer(self) -> Any:
        with self._loading("tokenizer"):
            return AutoTokenizer.from_pretrained(self.root, **self._arguments)

    def model(self, dtype: str = "auto", device: str = "cpu") -> Any:
        """The model in eval mode. `dtype`: auto (the checkpoint's own; float32 for GGUF), float32, bfloat16, float16.

        Raises:
            ModelError: not found, damaged, not a causal language model, or quantized already.
        """
        if dtype not in DTYPES:
            raise UsageError(f"--dtype {dtype}: not one of {', '.join(DTYPES)}")
        chosen = torch.float32 if self.gguf and dtype == "auto" else DTYPES[dtype]
        with self._loading("model"):
            if not self.gguf:
                method = getattr(AutoConfig.from_pretrained(self.root), "quantization_config", None)
                if method:
                    name = method.get("quant_method") if isinstance(method, dict) else method
                    raise ModelError(f"{self.name}: already quantized ({name}); give the original model")
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                self.root, dtype=chosen, output_loading_info=True, **self._arguments
            )
            model, info = loaded
        missing = sorted(info["missing_keys"])
        if missing:
            raise ModelError(f"{self.name}: {missing[0]} is missing from its weight files; fetch the model again")
        if self.gguf:
            model.hf_quantizer.remove_quantization_config(model)
            model.config.dtype = model.dtype
        return check_device(model, device).eval()

    @contextlib.contextmanager
    def _loading(self, what: str) -> Iterator[None]:
        try:
            yield
        except ModelError:
            raise
        except Exception as error:
            first = " ".join(str(error).split()).split(". ")[0][:240]
            raise ModelError(
                f"{self.name}: its {what} cannot be loaded: {type(error).__name__}: {first}; "
                "give a complete local folder, or check the hub id and the network"
            ) from error


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


def model_fingerprint(model: nn.Module) -> tuple[str, str]:
    """What identifies a model whatever type it was loaded in.

    Two sha256 over the config's facts that change results and each parameter's name, shape and values: rounded to
    bfloat16, and rounded to float16 and then to bfloat16. Models in float32 and bfloat16 share the first; a model in
    float16 has the second twice.

    Raises:
        ModelError: a weight that is not finite, by name.
    """
    config: Any = model.config
    text = config.get_text_config(decoder=True)
    known = {name: getattr(text, name, None) for name in CONFIG_FACTS}
    facts = json.dumps(known, sort_keys=True, default=str).encode()
    digests = hashlib.sha256(facts), hashlib.sha256(facts)
    for name, parameter in model.named_parameters():
        values = parameter.detach().to("cpu")
        if not bool(values.isfinite().all()):
            raise ModelError(f"{name}: holds NaN or inf; this model cannot be measured or quantized")
        for digest, rounded in zip(digests, (values, values.half()), strict=True):
            digest.update(f"{name}{tuple(values.shape)}".encode())
            digest.update(rounded.to(torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes())
    return digests[0].hexdigest(), digests[1].hexdigest()


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """sha256 over the vocabulary and the special tokens."""
    digest = hashlib.sha256()
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
