"""Checkpoints on disk: written whole, loaded strictly, with a model card beside the weights."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from quantsink import strict_json
from quantsink.errors import CheckpointError, QuantSinkError, UsageError
from quantsink.files import contents, whole_folder, write_text
from quantsink.hf.config import METHOD, MOST_LAYERS
from quantsink.models.source import DTYPES, check_device, model_class, shard_names

CARD = "README.md"
FILES = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab)\.json"
    r"|model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|README\.md"
    r"|chat_template\.jinja|additional_chat_templates|merges\.txt|tokenizer\.model|spiece\.model"
)
"""Names of what a checkpoint with its tokenizer consists of."""


def save(
    model: Any,
    folder: str | Path,
    *,
    tokenizer: Any = None,
    card: str | None = None,
    force: bool = False,
    max_shard_size: str = "5GB",
) -> Path:
    """Write a quantized model to `folder`: all of it, or nothing if the process is killed or the disk is full.

    Args:
        model: what `quantsink.quantize` or `quantsink.load` returned.
        tokenizer: saved beside the model, so that the folder can be used alone.
        card: text of a README.md.
        force: replace a checkpoint that is there already; a folder with anything else in it is never replaced.
        max_shard_size: largest safetensors file, such as "500MB" or "5GB".

    Returns:
        `folder` as a path.

    Raises:
        UsageError: the folder is taken and `force` is not given, or the model is not quantized by quantsink.
        OutputError: the folder cannot be written.
    """
    if getattr(model, "quantization_method", None) != METHOD:
        raise UsageError(f"{type(model).__name__}: not quantized by quantsink; call quantsink.quantize first")
    target = Path(folder)
    with whole_folder(target, is_checkpoint, force=force) as work:
        model.save_pretrained(work, max_shard_size=max_shard_size)
        if tokenizer is not None:
            tokenizer.save_pretrained(work)
        if card is not None:
            write_text(work / CARD, card)
    return target


def load(folder: str | Path, dtype: str = "auto", device: str = "cpu", trust_remote_code: bool = False) -> Any:
    """Load a checkpoint that quantsink wrote, in eval mode.

    Args:
        folder: a checkpoint folder or a hub id.
        dtype: type of everything that is not INT8: auto (the saved one), float32, bfloat16 or float16. The INT8 tensors
            and their scales never change.
        device: cpu, cuda, cuda:1, ...
        trust_remote_code: run a model class that lies in the checkpoint. Review it first.

    Returns:
        the transformers model.

    Raises:
        CheckpointError: not a quantsink checkpoint, or damaged; the message names the file or the tensor.
    """
    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype}: not one of {', '.join(DTYPES)}")
    name = str(folder)
    if Path(folder).is_dir():
        read_config(Path(folder))
        index = Path(folder) / SAFE_WEIGHTS_INDEX_NAME
        if index.is_file():
            shard_names(index)
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        model = model_class(config).from_pretrained(name, dtype=DTYPES[dtype], trust_remote_code=trust_remote_code)
    except QuantSinkError as error:
        raise CheckpointError(f"{name}: {error}") from error
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise CheckpointError(
                f"{name}: needs custom code from the checkpoint (auto_map in config.json), which is disabled by "
                "default; review it, then pass trust_remote_code=True"
            ) from error
        error_type, why = type(error).__name__, strict_json.one_line(error)
        raise CheckpointError(
            f"{name}: cannot be loaded: {error_type}: {why}; fetch or export the checkpoint again"
        ) from error
    if getattr(model, "quantization_method", None) != METHOD:
        raise CheckpointError(f"{name}: not a quantsink checkpoint; load it with transformers")
    return check_device(model, device).eval()


def read_config(folder: Path) -> dict[str, Any]:
    """`quantization_config` of a checkpoint folder.

    Raises:
        CheckpointError: there is none, or not quantsink's.
    """
    path = folder / "config.json"
    try:
        config = strict_json.parse(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}; fetch or export the checkpoint again") from error
    quantization = config.get("quantization_config") if isinstance(config, dict) else None
    if not isinstance(quantization, Mapping) or quantization.get("quant_method") != METHOD:
        raise CheckpointError(f"{path}: not a quantsink checkpoint; `quantsink export` writes one")
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        layers = part.get("num_hidden_layers")
        if isinstance(layers, int) and layers > MOST_LAYERS:  # transformers would make them one by one
            raise CheckpointError(
                f"{path}: num_hidden_layers {strict_json.abbreviated(layers)}; export the checkpoint again"
            )
    return dict(quantization)


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder holds a quantsink checkpoint and nothing that does not belong to one."""
    try:
        read_config(folder)
    except CheckpointError:
        return False
    return all(FILES.fullmatch(name) for name in contents(folder))


def payload_bytes(folder: Path) -> int:
    """Bytes of all safetensors shards of a folder, headers included."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
