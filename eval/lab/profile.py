"""Measure what the heads of a real model look at: position shares, sentences, prose against code, waking tokens."""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantsink.calibration.collect import FIRST_ROW
from quantsink.calibration.text import documents, parse_spec
from quantsink.errors import DataError, UsageError
from quantsink.eval.lab.profile_compare import compare
from quantsink.eval.lab.profile_results import (
    DORMANT,
    FULL,
    SINK,
    SLIDING,
    BosMass,
    Contrast,
    Head,
    HeadContrast,
    HeadPreference,
    HeadShares,
    PositionShares,
    Profile,
    SentencePreference,
    Waking,
    WakingHead,
    WakingToken,
)
from quantsink.eval.lab.profile_weights import Passes, Text, observe, pass_key, read_decoder, read_text, spread_rows
from quantsink.models.architecture import Architecture
from quantsink.models.head_layout import AttentionLayer
from quantsink.models.source import check_length
from quantsink.progress import Progress

FIRST, NEWEST = 3, 10
"""Tokens at the start, and newest tokens (the query's own among them), that make the two named groups."""

LENGTHS = (256, 1024, 4096)
SHARE_TOKENS, SHARE_ROWS = 1024, 128
"""Text a length and condition (at least one window), query rows a window."""
SENTENCES = 256
SENTENCE_TOKENS = (20, 40)
"""Fewest and most tokens of a sentence, without BOS: even the shortest has 5 rows that count."""
SENTENCE_CHARACTERS = 1 << 20
"""Sentences are chosen from at least this much text, where there is as much."""
CONTRAST_LENGTH, CONTRAST_WINDOWS = 512, 4
MIN_COUNT = 3
"""Occurrences below which a token type's mean is not given."""
BATCH_TOKENS = 2048
"""Tokens run at once where sequences are short."""


@dataclass(frozen=True)
class ProfileSettings:
    """How much is measured. `lengths`: those that the model was not made for are refused."""

    lengths: tuple[int, ...] = LENGTHS
    share_tokens: int = SHARE_TOKENS
    share_rows: int = SHARE_ROWS
    sentences: int = SENTENCES
    contrast_windows: int = CONTRAST_WINDOWS
    contrast_length: int = CONTRAST_LENGTH
    seed: int = 0

    @classmethod
    def quick(cls) -> "ProfileSettings":
        return cls(lengths=(256,), sentences=32, contrast_windows=2)


def measure_profile(
    model: Any,
    tokenizer: Any,
    *,
    name: str,
    text: str = "builtin:prose",
    contrast: tuple[str, str] = ("builtin:prose", "builtin:code"),
    settings: ProfileSettings | None = None,
    passes: Passes | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Profile a causal model; `text` and `contrast` are text specs (docs/cli.md).

    `passes` gets what the decoder gave for sequences that ran alone: `measure_streaming` takes it.

    Raises:
        ArchitectureError: an encoder, or heads that cannot be established.
        UsageError, DataError: lengths that the model was not made for, text that cannot be read or is too short.
    """
    settings = settings or ProfileSettings()
    for length in (*settings.lengths, settings.contrast_length):
        check_length(model, length, "length")
    architecture = read_decoder(model)
    tokens = max((length * _count(length, settings.share_tokens) for length in settings.lengths), default=2)
    read = read_text(tokenizer, text, tokens)
    conditions = (True, False) if read.bos is not None else (False,)
    total = len(settings.lengths) * len(conditions)
    shares = []
    for length in settings.lengths:
        for bos in conditions:
            count = _count(length, settings.share_tokens)
            rows = settings.share_rows
            measured = position_shares(
                model, architecture, read, length, windows=count, rows=rows, bos=bos, passes=passes
            )
            shares.append(measured)
            _tell(progress, "position shares", len(shares), total)
    chosen = read_sentences(tokenizer, text, settings.sentences, seed=settings.seed)
    preference = sentence_preference(
        model, architecture, chosen, name=read.name, bos=read.bos, seed=settings.seed, progress=progress
    )
    length, windows = settings.contrast_length, settings.contrast_windows
    length = min([length, *(layer.window for layer in architecture.attentions if layer.window is not None)])
    masses = []
    for spec in contrast:
        words = read_text(tokenizer, spec, length * windows)
        masses.append(bos_mass(model, architecture, words, length, windows, progress=progress))
    heads = list_heads(architecture)
    profile = Profile(
        model=name,
        model_type=architecture.model_type,
        layers=len(architecture.attentions),
        sliding_layers=sum(layer.window is not None for layer in architecture.attentions),
        dtype=str(model.dtype).removeprefix("torch."),
        text=read.name,
        text_fingerprint=read.fingerprint,
        bos=read.bos,
        shares=tuple(shares),
        sentences=preference,
        contrast=contrast_heads(heads, *masses),
        waking=tuple(waking_tokens(heads, mass, tokenizer) for mass in masses),
    )
    return dataclasses.replace(profile, comparisons=compare(profile))


def list_heads(architecture: Architecture) -> tuple[Head, ...]:
    """Every query head, layer by layer."""
    half = len(architecture.attentions) // 2
    return tuple(
        Head(layer.index, head, FULL if layer.window is None else SLIDING, layer.index >= half)
        for layer in architecture.attentions
        for head in range(layer.heads)
    )


def position_shares(
    model: Any,
    architecture: Architecture,
    text: Text,
    length: int,
    *,
    windows: int = 1,
    rows: int | None = SHARE_ROWS,
    bos: bool = True,
    passes: Passes | None = None,
) -> PositionShares:
    """Shares of every head's weight in `windows` windows; `rows` evenly spread query rows of each (None: all).

    Raises:
        DataError: a text that is too short. UsageError: a length without a row that counts.
    """
    chosen = spread_rows(length, rows)
    ids = text.cut(length, windows, bos)
    sums = {layer.index: torch.zeros(6, layer.heads, dtype=torch.float64) for layer in architecture.attentions}

    def see(layer: AttentionLayer, block: Tensor, start: int, weights: Tensor) -> None:
        shares = group_shares(block, start, weights)
        parts = [*shares.unbind(-1), _bos_weight(start, weights)]
        seen = torch.ones(len(block)) if layer.window is None else (block < layer.window).float()
        parts.append(parts[0] * seen.to(parts[0]))
        sums[layer.index] += torch.stack([part.double().sum((0, 2)) for part in parts]).cpu()

    for batch in ids.split(max(1, BATCH_TOKENS // length)):
        output = observe(model, architecture, batch, chosen, see)
        if passes is not None and len(batch) == 1:
            passes[pass_key(batch[0])] = output
    count = len(chosen) * windows
    reach = {layer.index: length if layer.window is None else layer.window for layer in architecture.attentions}
    heads = []
    for head in list_heads(architecture):
        *means, seen = (sums[head.layer][:, head.head] / count).tolist()
        seeing = int((chosen < reach[head.layer]).sum()) * windows
        first, newest, middle, learned, mass = means
        first_seen = seen * count / seeing if seeing else None
        heads.append(HeadShares(head, first, newest, middle, learned, mass, seeing, first_seen))
    return PositionShares(length, bos and text.bos is not None, windows, count, tuple(heads))


def group_shares(rows: Tensor, start: int, weights: Tensor) -> Tensor:
    """`[B, H, Q, 4]` first, newest, middle, learned of weights `[B, H, Q, K]`; rows must be 12 or later."""
    columns = torch.arange(start, start + weights.shape[-1], device=weights.device)
    first = (columns < FIRST).expand(len(rows), -1)
    newest = rows[:, None] - columns < NEWEST
    groups = torch.stack([first, newest, ~first & ~newest], -1).to(weights)  # [Q, K, 3]
    batch, heads, queries, keys = weights.shape
    shares = (weights.permute(2, 0, 1, 3).reshape(queries, -1, keys) @ groups).view(queries, batch, heads, 3)
    shares = shares.permute(1, 2, 0, 3)
    return torch.cat([shares, (1 - shares.sum(-1, keepdim=True)).clamp(min=0)], -1)


def read_sentences(tokenizer: Any, spec: str, count: int, *, seed: int = 0) -> list[list[int]]:
    """Token ids of `count` sentences of 20 to 40 tokens, a seeded choice among those of the text's first MiB or more.

    Documents are cut at blank lines, then behind `.`, `!` or `?` before white space. A sentence begins with a capital
    letter, ends with one of the three marks, and holds no sign that prose seldom has (`= | < > * _ { } [ ] #`).

    Raises:
        UsageError, DataError: a spec that means nothing, text that cannot be read or has too few sentences.
    """
    if count < 1:
        raise UsageError(f"{count} sentences: 1 or more")
    source = parse_spec(spec)
    candidates: list[str] = []
    read = 0
    for document in documents(source):
        candidates += split_sentences(document)
        read += len(document)
        if read >= SENTENCE_CHARACTERS:
            break
    least, most = SENTENCE_TOKENS
    sentences: list[list[int]] = []
    for number in torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed)).tolist():
        ids = tokenizer(candidates[number], add_special_tokens=False, verbose=False)["input_ids"]
        if least <= len(ids) <= most and tokenizer.bos_token_id not in ids:
            sentences.append(ids)
            if len(sentences) == count:
                return sentences
    raise DataError(
        f"data {source.name!r} has {len(sentences)} sentences of {least} to {most} tokens, {count} are needed; name a "
        "longer text, or take fewer sentences"
    )


def split_sentences(document: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", document):
        for sentence in re.split(r"(?<=[.!?])\s+", " ".join(paragraph.split())):
            if re.fullmatch(r"[A-Z][^=|<>*_{}\[\]#]*[.!?]", sentence):
                yield sentence


def sentence_preference(
    model: Any,
    architecture: Architecture,
    sentences: Sequence[Sequence[int]],
    *,
    name: str,
    bos: int | None,
    seed: int = 0,
    progress: Progress | None = None,
) -> SentencePreference:
    """Which heads prefer the first tokens; sentences as `read_sentences` gives them, each behind a BOS of its own.

    Sentences of like length run together, filled up on the right: what lies there no counted row sees.
    """
    prefix = [] if bos is None else [bos]
    ordered = sorted(([*prefix, *ids] for ids in sentences), key=len)
    heads = list_heads(architecture)
    offsets = _offsets(architecture)
    totals = torch.zeros(len(heads), 3, dtype=torch.float64)
    preferring = torch.zeros(len(heads), dtype=torch.int64)
    step = max(1, BATCH_TOKENS // len(ordered[-1]))
    for start in range(0, len(ordered), step):
        batch = ordered[start : start + step]
        lengths = torch.tensor([len(ids) for ids in batch])
        longest = int(lengths.max())
        filled = torch.tensor([ids + [ids[-1]] * (longest - len(ids)) for ids in batch])
        sums = torch.zeros(len(batch), len(heads), 3, dtype=torch.float64)

        def see(
            layer: AttentionLayer, block: Tensor, first: int, weights: Tensor,
            sums: Tensor = sums, lengths: Tensor = lengths,
        ) -> None:  # fmt: skip
            shares = group_shares(block, first, weights)[..., :3].double().cpu()  # [B, H, Q, 3]
            real = (block.cpu() < lengths[:, None]).double()
            at = offsets[layer.index]
            sums[:, at : at + layer.heads] += torch.einsum("bhqg,bq->bhg", shares, real)

        observe(model, architecture, filled, spread_rows(longest), see)
        means = sums / (lengths - FIRST_ROW)[:, None, None]
        totals += means.sum(0)
        preferring += ((means[..., 0] > means[..., 1]) & (means[..., 0] > means[..., 2])).sum(0)
        _tell(progress, "sentences", start + len(batch), len(ordered))
    mean = (totals / len(ordered)).tolist()
    return SentencePreference(
        text=name,
        bos=bos is not None,
        sentences=len(ordered),
        rows=sum(len(ids) - FIRST_ROW for ids in ordered),
        tokens=sum(len(ids) for ids in ordered),
        seed=seed,
        heads=tuple(
            HeadPreference(head, first, newest, middle, number)
            for head, (first, newest, middle), number in zip(heads, mean, preferring.tolist(), strict=True)
        ),
    )


def bos_mass(
    model: Any,
    architecture: Architecture,
    text: Text,
    length: int,
    windows: int,
    *,
    progress: Progress | None = None,
) -> BosMass:
    """BOS mass of every head at every row from 16 on.

    Raises:
        DataError: a text that is too short. UsageError: a length without a row that counts, or one at which a sliding
            layer loses sight of the first token.
    """
    narrow = [layer for layer in architecture.attentions if layer.window is not None and layer.window < length]
    if narrow:
        raise UsageError(
            f"length {length}: {narrow[0].name} sees {narrow[0].window} tokens, so rows behind lose sight of the first "
            f"one; take {narrow[0].window} or less"
        )
    rows = spread_rows(length)
    ids = text.cut(length, windows)
    offsets = _offsets(architecture)
    mass = torch.zeros(sum(layer.heads for layer in architecture.attentions), windows, len(rows))
    done = 0
    for batch in ids.split(max(1, BATCH_TOKENS // length)):

        def see(layer: AttentionLayer, block: Tensor, start: int, weights: Tensor, done: int = done) -> None:
            bos_weights = _bos_weight(start, weights).transpose(0, 1).cpu()  # [H, B, Q]
            at, row = offsets[layer.index], int(block[0]) - FIRST_ROW
            mass[at : at + layer.heads, done : done + bos_weights.shape[1], row : row + len(block)] = bos_weights

        observe(model, architecture, batch, rows, see)
        done += len(batch)
        _tell(progress, f"BOS mass, {text.name}", done, windows)
    return BosMass(text.name, text.bos is not None, windows, length, mass.flatten(1), ids[:, FIRST_ROW:].flatten())


def contrast_heads(heads: Sequence[Head], one: BosMass, other: BosMass) -> Contrast:
    """Each head's mean BOS mass on two texts."""
    return Contrast(
        texts=(one.text, other.text),
        bos=one.bos,
        length=one.length,
        rows=(one.rows, other.rows),
        heads=tuple(HeadContrast(*masses) for masses in zip(heads, one.mean, other.mean, strict=True)),
    )


def waking_tokens(
    heads: Sequence[Head], mass: BosMass, tokenizer: Any, *, count: int = 4, tokens: int = 8, min_count: int = MIN_COUNT
) -> Waking:
    """The `count` dormant heads that are awake (BOS mass < 0.3) in most rows, and the token types that wake them.

    A type is a decoded string; types that occur fewer than `min_count` times are not ranked. Heads are not chosen by
    what wakes them, but the first of many ranked types is still the largest of many means: `least` tempers it.
    """
    ids, inverse = mass.tokens.unique(return_inverse=True)
    names = [tokenizer.decode([token]) for token in ids.tolist()]
    kinds = sorted(set(names))
    number = {name: i for i, name in enumerate(kinds)}
    kind = torch.tensor([number[name] for name in names])[inverse]  # [R]
    counts = torch.bincount(kind, minlength=len(kinds))
    awake = (mass.mass < SINK).sum(1).tolist()
    dormant = [i for i, mean in enumerate(mass.mean) if mean >= DORMANT]
    chosen = sorted((i for i in dormant if awake[i]), key=lambda i: -awake[i])[:count]
    woken = []
    for i in chosen:
        moved = 1 - mass.mass[i].double()
        means = torch.zeros(len(kinds), dtype=torch.float64).index_add_(0, kind, moved) / counts
        least = torch.full((len(kinds),), torch.inf, dtype=torch.float64).scatter_reduce_(0, kind, moved, "amin")
        means[counts < min_count] = -torch.inf
        order = [k for k in means.argsort(descending=True, stable=True)[:tokens].tolist() if counts[k] >= min_count]
        ranked = tuple(WakingToken(kinds[k], int(counts[k]), float(means[k]), float(least[k])) for k in order)
        types = int((counts >= min_count).sum())
        woken.append(WakingHead(heads[i], mass.text, mass.rows, float(moved.mean()), awake[i], types, ranked))
    return Waking(mass.text, mass.rows, len(dormant), sum(not awake[i] for i in dormant), min_count, tuple(woken))


def _bos_weight(start: int, weights: Tensor) -> Tensor:
    """`[B, H, Q]` on column 0, which a block of a sliding layer may not reach."""
    return weights[..., 0] if start == 0 else torch.zeros_like(weights[..., 0])


def _offsets(architecture: Architecture) -> dict[int, int]:
    """Of each layer's first head among all heads."""
    offsets, at = {}, 0
    for layer in architecture.attentions:
        offsets[layer.index] = at
        at += layer.heads
    return offsets


def _count(length: int, tokens: int) -> int:
    return max(1, tokens // length)


def _tell(progress: Progress | None, name: str, done: int, total: int) -> None:
    if progress is not None:
        progress(name, done, total)
