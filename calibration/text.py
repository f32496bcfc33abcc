"""From a text spec to the windows of token ids that calibration reads, counted and fingerprinted.

Before a model is loaded: `parse_spec`, then `check_not_empty`. After: `windows`, or `sample_self` for the spec `self`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache

from quantsink.errors import DataError, UsageError
from quantsink.models.inputs import cache_argument, input_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers import PreTrainedTokenizerBase as Tokenizer

BUILTINS = ("builtin:prose", "builtin:code", "builtin:heldout")
SHARED_WORDS = 8
CHUNK_CHARACTERS = 1 << 20  # documents are tokenized in pieces of about this many characters

_TEXT_FILES = {".txt", ".jsonl", ".parquet"}
_OTHER_FILES = {".arrow", ".csv", ".gz", ".html", ".json", ".md", ".pdf", ".tsv", ".xml", ".zip", ".zst"}
_HUB_SPEC = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.+-]*){0,2}")
_NOT_LIBRARY = {"__pycache__", "dist-packages", "idlelib", "lib2to3", "pydoc_data", "site-packages", "test", "tests"}
_CUT = re.compile(r"(?<=\S)\r?\n(?=\S)")


@dataclass(frozen=True)
class Source:
    """A valid text spec, from `parse_spec`. `name` is its name in reports: of a file, without its folder."""

    spec: str
    name: str

    @property
    def format(self) -> str:
        """How the text is read: `self`, a built-in's whole spec, a file's suffix, or `hub`."""
        suffix = Path(self.spec).suffix.lower()
        return self.spec if self.spec in ("self", *BUILTINS) else suffix if suffix in _TEXT_FILES else "hub"


@dataclass(frozen=True, eq=False)
class Windows:
    """Token windows of one text, in reading order.

    ids: 1-D int64 tensors of at most seq_len ids, each with exactly one BOS, its first id, where `bos` is not None.
    tokens: sum of their lengths, BOS included. documents: how many documents gave at least one of them.
    removed_bos: BOS ids that the text itself contained and that were taken out.
    complete: False where max_tokens stopped the reading and text was left unread.
    fingerprint: sha256 over the source's format, seq_len and ids; changed data has another one.
    """

    name: str
    ids: tuple[torch.Tensor, ...]
    tokens: int
    documents: int
    bos: int | None
    removed_bos: int
    complete: bool
    fingerprint: str


def parse_spec(spec: str) -> Source:
    """Check a text spec without opening a model or the network.

    Spec: `builtin:prose`, `builtin:code`, `builtin:heldout` (prose that is in neither), `self`, a .txt, .jsonl or
    .parquet file, or `name[:config][:split]` of a hub data set (`name:test` is a split, `name:other` a
    configuration; the split is `train` unless given).

    Raises UsageError for an invalid spec, DataError for a missing file or a folder.
    """
    if spec == "self" or spec in BUILTINS:
        return Source(spec, spec)
    if spec.startswith("builtin:"):
        raise UsageError(f"data {spec!r}: no such built-in text; use {' or '.join(BUILTINS)}")
    path = os.path.expanduser(spec)
    suffix = Path(path).suffix.lower()
    if os.path.isdir(path):
        raise DataError(f"data {spec!r} is a folder; name a file in it (a hub data set: {spec}:train)")
    if suffix in _TEXT_FILES:
        if not os.path.isfile(path):
            raise DataError(f"data {spec!r}: there is no such file; check the path (now in {os.getcwd()})")
        if suffix == ".parquet" and not _installed("pyarrow"):
            raise UsageError(f"data {spec!r}: reading parquet needs pyarrow; pip install 'quantsink[data]'")
        return Source(spec, Path(path).name)
    if os.path.exists(path) or suffix in _OTHER_FILES:
        raise UsageError(f"data {spec!r}: cannot read {suffix or 'a file without suffix'}; use .txt, .jsonl, .parquet")
    if not _HUB_SPEC.fullmatch(spec):
        raise UsageError(
            f"data {spec!r} is neither a built-in text nor a file nor name[:config][:split]; check the path"
        )
    if not _installed("datasets"):
        raise UsageError(f"data {spec!r} is not a file, and a hub data set needs pip install 'quantsink[data]'")
    return Source(spec, spec)


def documents(source: Source) -> Iterator[str]:
    """The documents of a source, lazily and in a fixed order; content is not stripped.

    A .txt file is one document, a .jsonl or .parquet file one per row. Raises DataError where text cannot be read.
    """
    if source.format == "self":
        raise UsageError("data 'self' has no documents; sample them with sample_self(model, tokenizer, ...)")
    if source.format == "hub":
        return _hub(source.spec)
    builtins = dict(zip(BUILTINS, (_prose, _code, _heldout), strict=True))
    readers = {".txt": _txt, ".jsonl": _jsonl, ".parquet": _parquet, **builtins}
    return readers[source.format](Path(source.spec).expanduser())


def check_not_empty(source: Source) -> None:
    """Raise DataError unless the text has a character that is not white space; reads no further than that one."""
    if source.format != "self" and not any(text and not text.isspace() for text in documents(source)):
        raise DataError(f"data {source.spec!r} holds no text; name a source with text in it")


def windows(
    tokenizer: Tokenizer,
    source: Source | Iterable[str],
    *,
    seq_len: int,
    max_tokens: int,
    bos: bool = True,
    encoder: bool = False,
    name: str | None = None,
) -> Windows:
    """Tokenize documents and cut each into windows of seq_len tokens, BOS included; the shorter rest is kept.

    The only special token added is one BOS before each window, where the tokenizer has one and `bos` is true; BOS ids
    in the text itself are taken out. No window spans two documents. max_tokens bounds the sum: the last window is cut
    to fit if two tokens remain, else reading stops. A document of over 1,048,576 characters is tokenized in pieces, cut
    at single newlines between non-blank characters, as they are needed: byte-level BPE then gives the same ids as for
    the whole, a tokenizer that adds a leading space adds one per piece.

    An encoder's windows stand between [CLS], which counts as their BOS, and [SEP], where the tokenizer has them.

    Raises UsageError for seq_len < 2 or max_tokens < seq_len, DataError where no token comes out.
    """
    _check_sizes(seq_len, max_tokens)
    if isinstance(source, str):
        raise UsageError("windows() takes parse_spec(spec) or a list of texts, not one string; wrap it: [text]")
    text_format = source.format if isinstance(source, Source) else "documents"
    name = name or (source.name if isinstance(source, Source) else text_format)
    bos_id = tokenizer.bos_token_id
    if encoder and bos_id is None:
        bos_id = tokenizer.cls_token_id
    prefix = [bos_id] if bos and bos_id is not None else []
    end = [tokenizer.sep_token_id] if encoder and bos and tokenizer.sep_token_id is not None else []
    ids: list[torch.Tensor] = []
    tokens = read = removed = 0
    complete = True
    for text in documents(source) if isinstance(source, Source) else source:
        before, window = len(ids), list(prefix)
        for token in _tokenize(tokenizer, text):
            if token == bos_id:
                removed += 1
                continue
            if max_tokens - tokens < 2 + len(end):
                complete = False
                break
            window.append(token)
            if len(window) == min(seq_len, max_tokens - tokens) - len(end):
                ids.append(torch.tensor(window + end, dtype=torch.int64))
                tokens += len(ids[-1])
                window = list(prefix)
        if len(window) > len(prefix):
            ids.append(torch.tensor(window + end, dtype=torch.int64))
            tokens += len(ids[-1])
        read += len(ids) > before
        if not complete:
            break
    if not ids:
        raise DataError(f"data {name!r} gives no tokens; name a source with text in it")
    used_bos = prefix[0] if prefix else None
    return Windows(name, tuple(ids), tokens, read, used_bos, removed, complete, _fingerprint(text_format, seq_len, ids))


@torch.no_grad()
def tensors(model: Any, data: torch.Tensor) -> Windows:
    """Pictures `[N, C, H, W]`, each a window of as many tokens as the model makes of it, or vectors `[N, L, K]` for a
    model whose main input they are, each a window of L tokens.

    Raises:
        UsageError: neither, or a model that takes something else.
    """
    name, dims = {"pixel_values": ("pictures", 4), "inputs_embeds": ("vectors", 3)}.get(model.main_input_name, ("", 0))
    if data.dim() != dims or not data.numel():
        raise UsageError(
            f"data: a tensor {list(data.shape)} where {type(model).__name__} takes {model.main_input_name}; give "
            "text, [N, C, H, W] pictures to a model of pictures, or [N, L, K] vectors to a model of inputs_embeds"
        )
    device, dtype = input_device(model), next(model.parameters()).dtype
    tokens = data.shape[1]
    if name == "pictures":
        tokens = model(pixel_values=data[:1].to(device, dtype), output_hidden_states=True).hidden_states[0].shape[1]
    ids = tuple(part.to(dtype) for part in data)
    digest = _fingerprint(name, tokens, [part.float().contiguous().view(torch.int32) for part in ids])
    return Windows(name, ids, tokens * len(ids), len(ids), None, 0, True, digest)


@torch.no_grad()
def sample_self(
    model: PreTrainedModel, tokenizer: Tokenizer, *, tokens: int, seq_len: int, seed: int, bos: bool = True
) -> Windows:
    """Text that the model samples from itself: at most `tokens` tokens in windows of seq_len, at temperature 1.

    Each window starts with BOS, which is not sampled again; without one, with a random token that is not special. EOS
    does not end it. A separate generator on the CPU draws the tokens, so the global random state and the training mode
    stay as they were. Another device may round differently and so give other text.

    Raises UsageError for seq_len < 2 or tokens < seq_len, DataError where logits are not finite.
    """
    _check_sizes(seq_len, tokens, "tokens")
    generator = torch.Generator().manual_seed(seed)
    bos_id = tokenizer.bos_token_id
    used_bos = bos_id if bos else None
    bias = torch.zeros(min(len(tokenizer), model.config.get_text_config().vocab_size))  # checkpoints pad theirs
    if bos_id is not None:
        bias[bos_id] = -torch.inf
    ordinary = sorted(set(range(len(bias))) - set(tokenizer.all_special_ids))
    firsts = torch.tensor(ordinary if used_bos is None else [used_bos])
    lengths = [min(seq_len, tokens - first) for first in range(0, tokens - 1, seq_len)]
    rows = max(1, 2**14 // seq_len)  # a batch's KV cache holds about 16k tokens
    training = [module for module in model.modules() if module.training]
    ids: list[torch.Tensor] = []
    try:
        for module in training:
            module.training = False
        with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
            for first in range(0, len(lengths), rows):
                batch = lengths[first : first + rows]
                start = firsts[torch.randint(len(firsts), (len(batch), 1), generator=generator)]
                sampled = _continue(model, start, max(batch), bias, generator)
                ids += [row[:length].clone() for row, length in zip(sampled, batch, strict=True)]
    finally:
        for module in training:
            module.training = True
    return Windows("self", tuple(ids), sum(lengths), len(ids), used_bos, 0, True, _fingerprint("self", seq_len, ids))


def _continue(
    model: PreTrainedModel, ids: torch.Tensor, length: int, bias: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Ancestral sampling from ids [B, 1] to [B, length] by logits + bias [V], with the KV cache."""
    cache = DynamicCache(config=model.config)
    arguments = {cache_argument(model): cache, "use_cache": True}
    step, device = ids, input_device(model)
    while ids.shape[1] < length:
        output: Any = model(input_ids=step.to(device), **arguments)
        weights = (output.logits[:, -1, : len(bias)].float().cpu() + bias).softmax(-1)
        if not torch.isfinite(weights).all():
            raise DataError(f"data 'self': logits at position {ids.shape[1]} are not finite; use another dtype")
        step = torch.multinomial(weights, 1, generator=generator)
        ids = torch.cat([ids, step], dim=1)
    return ids


def _check_sizes(seq_len: int, max_tokens: int, name: str = "max_tokens") -> None:
    if seq_len < 2:
        raise UsageError(f"seq_len is {seq_len}; a window needs at least 2 tokens")
    if max_tokens < seq_len:
        raise UsageError(f"{name} is {max_tokens}, less than one window; raise it, or lower seq_len from {seq_len}")


def _fingerprint(text_format: str, seq_len: int, ids: Sequence[torch.Tensor]) -> str:
    digest = hashlib.sha256(f"{text_format} {seq_len}".encode())
    for window in ids:
        digest.update(f" {len(window)} ".encode() + window.numpy().astype("<i8").tobytes())
    return digest.hexdigest()


def _tokenize(tokenizer: Tokenizer, text: str) -> Iterator[int]:
    if not isinstance(text, str):
        raise UsageError(f"a document is a {type(text).__name__}; windows() takes texts, so pass strings")
    start = 0
    while start < len(text):
        cut = _CUT.search(text, start + CHUNK_CHARACTERS)
        end = cut.end() if cut else len(text)
        # verbose=False: a document may be longer than the model's context, its windows are not
        yield from tokenizer(text[start:end], add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
        start = end


def _installed(package: str) -> bool:
    return getattr(importlib.util.find_spec(package), "origin", None) is not None  # a mere folder has no origin


def _topics(*, heldout: bool) -> Iterator[str]:
    """Python's help topics; every fifth is held out, so that calibration and report read different text."""
    with _reading("builtin:prose", "this Python comes without it; use builtin:code or a file"):
        from pydoc_data.topics import topics
    yield from (topics[topic] for number, topic in enumerate(sorted(topics)) if (number % 5 == 4) is heldout)


def _prose(_: Path) -> Iterator[str]:
    return _topics(heldout=False)


def _heldout(_: Path) -> Iterator[str]:
    """One document, so that its windows are full; without the paragraphs that topics of the prose repeat."""
    known = {run for topic in _topics(heldout=False) for run in _runs(topic)}
    paragraphs = "\n\n".join(_topics(heldout=True)).split("\n\n")
    yield "\n\n".join(text for text in paragraphs if known.isdisjoint(_runs(text)))


def _runs(text: str) -> Iterator[tuple[str, ...]]:
    """Every run of words too long to be shared by chance."""
    words = text.split()
    return (tuple(words[i : i + SHARED_WORDS]) for i in range(len(words) - SHARED_WORDS + 1))


def _code(_: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(sysconfig.get_paths()["stdlib"]):
        folders[:] = sorted(set(folders) - _NOT_LIBRARY)
        for file in sorted(files):
            if file.endswith(".py"):
                yield from _txt(Path(folder, file))


def _txt(path: Path) -> Iterator[str]:
    with _reading(str(path), "check the path and its permissions"):
        yield _decode(path.read_bytes(), path, 0).removeprefix("\ufeff")


def _jsonl(path: Path) -> Iterator[str]:
    offset = 0
    with _reading(str(path), "check the path and its permissions"), path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            line = _decode(raw, path, offset).removeprefix("\ufeff")
            offset += len(raw)
            if line.strip():
                try:
                    row = json.loads(line)
                    json.dumps(row, ensure_ascii=False).encode()  # no tokenizer takes half a surrogate pair
                except (ValueError, RecursionError) as error:
                    raise DataError(f"{path}, line {number} is not valid JSON; fix or remove it") from error
                yield from _texts([row], f"{path}, line {number}")


def _parquet(path: Path) -> Iterator[str]:
    with _reading(str(path), "check that it is a complete parquet file"):
        import pyarrow.parquet

        file = pyarrow.parquet.ParquetFile(path)
        columns = file.schema_arrow.names
        for batch in file.iter_batches(batch_size=256, columns=["text"] if "text" in columns else columns):
            yield from _texts(batch.to_pylist(), str(path))


def _hub(spec: str) -> Iterator[str]:
    name, *rest = spec.split(":")
    if len(rest) == 1 and rest[0] in ("train", "validation", "test"):
        rest = ["", *rest]
    config, split = (*rest, "", "")[:2]
    with _reading(f"data {spec!r}", "check name, configuration, split and network"):
        import datasets

        rows = datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
        yield from _texts(rows, f"data {spec!r}")


def _texts(rows: Iterable[Any], place: str) -> Iterator[str]:
    for row in rows:
        if not isinstance(row, dict) or "text" not in row:
            instead = f"only {', '.join(row)}" if isinstance(row, dict) else f"but a {type(row).__name__}"
            raise DataError(f'{place} has no "text" {instead}; rename the column that holds the text')
        if isinstance(row["text"], str):
            yield row["text"]
        elif row["text"] is not None:
            raise DataError(f'{place}: "text" holds a {type(row["text"]).__name__}, not a string; convert it')


@contextmanager
def _reading(place: str, remedy: str) -> Iterator[None]:
    """Turn exceptions of files, optional libraries and the network into one line."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{place} cannot be read ({' '.join(str(error).split())}); {remedy}") from error


def _decode(raw: bytes, path: Path, offset: int) -> str:
    try:
        if (bad := raw.find(0)) < 0:
            return raw.decode()
    except UnicodeDecodeError as error:
        bad = error.start
    raise DataError(f"{path}: byte {offset + bad} is not UTF-8 text; save the file as UTF-8 or name another one")
