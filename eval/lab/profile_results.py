"""What a profile of a model's heads found, as plain data.

Words. Of a query row's weight, `first` lies on the first 3 tokens, `newest` on the newest 10 (its own among them),
`middle` on the rest, `learned` on a learned sink where the model has one. Only rows from 16 on count, so that the
groups never overlap. BOS mass is the weight on the first token alone, whatever token that is. A head is called dormant
from a mean BOS mass of 0.8 on here (a report's `strong`; its own `dormant`, 0.98, is `SHUT`), awake below 0.3. Deep
layers are the upper half of all attention layers.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

SINK, DORMANT, SHUT = 0.3, 0.8, 0.98
"""Mean BOS masses from which a head is a sink head, dormant, and all but shut."""
LEARNED = 1e-3
"""Share of the weight from which a learned sink is shown."""
FULL, SLIDING = "full", "sliding"
ALL, DEEP = "all layers", "deep layers"
AGREES, IN_PART, DISAGREES, NO_FIGURE = "agrees", "in part", "disagrees", "no figure to compare"


@dataclass(frozen=True)
class Head:
    """One query head; `kind` says whether its layer sees all tokens (`full`) or its newest ones (`sliding`)."""

    layer: int
    head: int
    kind: str
    deep: bool

    @property
    def label(self) -> str:
        return f"{self.layer}.{self.head}" + ("" if self.kind == FULL else f" ({self.kind})")


@dataclass(frozen=True)
class HeadShares:
    """Mean shares of one head's weight over query rows; `bos` is on the first token alone."""

    head: Head
    first: float
    newest: float
    middle: float
    learned: float
    bos: float
    seeing: int
    """Rows that see the first token: not all in a sliding layer."""
    first_seen: float | None
    """`first` over those rows only; None: there are none."""


@dataclass(frozen=True)
class MeanShares:
    """Means over `heads` heads of one kind; `seeing`: rows of each, at least, that see the first token."""

    kind: str
    depth: str
    heads: int
    first: float
    newest: float
    middle: float
    learned: float
    seeing: int
    first_seen: float | None


@dataclass(frozen=True)
class PositionShares:
    """Shares in windows of one length, with or without BOS; every head's rest on the same `rows` query rows."""

    length: int
    bos: bool
    windows: int
    rows: int
    heads: tuple[HeadShares, ...]

    @property
    def means(self) -> tuple[MeanShares, ...]:
        """Over heads of full-attention layers and of sliding ones, each of all layers and of the deep ones."""
        means = []
        for kind in (FULL, SLIDING):
            for depth in (ALL, DEEP):
                heads = [h for h in self.heads if h.head.kind == kind and (h.head.deep or depth == ALL)]
                if heads:
                    mean = {n: mean_of(getattr(h, n) for h in heads) for n in ("first", "newest", "middle", "learned")}
                    seen = [h.first_seen for h in heads if h.first_seen is not None]
                    means.append(
                        MeanShares(
                            kind,
                            depth,
                            len(heads),
                            **mean,
                            seeing=min(h.seeing for h in heads),
                            first_seen=mean_of(seen) if seen else None,
                        )
                    )
        return tuple(means)

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "means": [dataclasses.asdict(mean) for mean in self.means]}


@dataclass(frozen=True)
class HeadPreference:
    """One head over all sentences: mean shares, each sentence counting alike, and in how many it prefers the first."""

    head: Head
    first: float
    newest: float
    middle: float
    sentences: int

    @property
    def prefers_first(self) -> bool:
        """More weight on the first 3 tokens than on the newest 10, and more than on all between them."""
        return self.first > self.newest and self.first > self.middle


@dataclass(frozen=True)
class SentencePreference:
    """Which heads prefer the first tokens, over `sentences` sentences with `rows` counted query rows in all."""

    text: str
    bos: bool
    sentences: int
    rows: int
    tokens: int
    seed: int
    heads: tuple[HeadPreference, ...]

    def share(self, depth: str = DEEP) -> float:
        """Share of heads whose mean over sentences prefers the first tokens."""
        return mean_of(h.prefers_first for h in self._own(depth))

    def pairs(self, depth: str = DEEP) -> float:
        """Share of (head, sentence) pairs in which the head prefers the first tokens in this sentence."""
        return mean_of(h.sentences / self.sentences for h in self._own(depth))

    def count(self, depth: str = DEEP) -> int:
        return len(self._own(depth))

    def _own(self, depth: str) -> list[HeadPreference]:
        return [h for h in self.heads if h.head.deep or depth == ALL]

    def to_dict(self) -> dict[str, Any]:
        shares = {depth: {"heads": self.count(depth), "share": self.share(depth), "pairs": self.pairs(depth)}
                  for depth in (ALL, DEEP)}  # fmt: skip
        return {**dataclasses.asdict(self), "shares": shares}


@dataclass(frozen=True, eq=False)
class BosMass:
    """BOS mass of every head at every counted row of one text.

    `mass` `[heads, R]` float32, `tokens` `[R]`: the token id at each row.
    """

    text: str
    bos: bool
    windows: int
    length: int
    mass: Tensor
    tokens: Tensor

    @property
    def rows(self) -> int:
        return len(self.tokens)

    @property
    def mean(self) -> list[float]:
        means: list[float] = self.mass.double().mean(1).tolist()
        return means


@dataclass(frozen=True)
class HeadContrast:
    """Mean BOS mass of one head on two texts."""

    head: Head
    one: float
    other: float

    @property
    def difference(self) -> float:
        return self.one - self.other

    def switches(self, level: float = DORMANT) -> bool:
        """Dormant on one of the texts, awake on the other."""
        return max(self.one, self.other) >= level and min(self.one, self.other) < SINK


@dataclass(frozen=True)
class Contrast:
    """Every head's BOS mass on two texts, `rows` query rows each in windows of `length` tokens."""

    texts: tuple[str, str]
    bos: bool
    length: int
    rows: tuple[int, int]
    heads: tuple[HeadContrast, ...]

    def strongest(self, count: int = 10) -> tuple[HeadContrast, ...]:
        return tuple(sorted(self.heads, key=lambda h: -abs(h.difference))[:count])

    def switching(self, level: float = DORMANT) -> tuple[HeadContrast, ...]:
        return tuple(h for h in self.heads if h.switches(level))

    def at_least(self, level: float) -> tuple[int, int]:
        """Heads whose BOS mass is `level` or more on each text."""
        return sum(h.one >= level for h in self.heads), sum(h.other >= level for h in self.heads)

    @property
    def means(self) -> tuple[float, float]:
        return mean_of(h.one for h in self.heads), mean_of(h.other for h in self.heads)

    def to_dict(self) -> dict[str, Any]:
        return {
            **dataclasses.asdict(self),
            "means": self.means,
            "levels": {str(level): self.at_least(level) for level in (SINK, DORMANT, SHUT)},
            "switching": {str(level): len(self.switching(level)) for level in (DORMANT, SHUT)},
        }


@dataclass(frozen=True)
class WakingToken:
    """Weight that a head moves off the sink at one token type: mean and least over `count` occurrences."""

    token: str
    count: int
    mean: float
    least: float


@dataclass(frozen=True)
class WakingHead:
    """A head that is dormant on average. `moved`: mean weight off the sink over all rows; `awake_rows`: rows whose BOS
    mass is below 0.3; `types`: token types that occur often enough to be ranked, of which `tokens` are the first."""

    head: Head
    text: str
    rows: int
    moved: float
    awake_rows: int
    types: int
    tokens: tuple[WakingToken, ...]


@dataclass(frozen=True)
class Waking:
    """Of the `dormant` heads of one text those that wake most often, and what wakes them. `never`: dormant heads that
    are awake in no row."""

    text: str
    rows: int
    dormant: int
    never: int
    min_count: int
    heads: tuple[WakingHead, ...]


@dataclass(frozen=True)
class Comparison:
    """What others reported beside what was measured here; `verdict`: agrees, in part, disagrees, or no figure."""

    claim: str
    source: str
    measured: str
    verdict: str


@dataclass(frozen=True)
class Profile:
    """All of it, of one model."""

    model: str
    model_type: str
    layers: int
    sliding_layers: int
    dtype: str
    text: str
    text_fingerprint: str
    bos: int | None
    shares: tuple[PositionShares, ...]
    sentences: SentencePreference
    contrast: Contrast
    waking: tuple[Waking, ...]
    comparisons: tuple[Comparison, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            **fields,
            "shares": [share.to_dict() for share in self.shares],
            "sentences": self.sentences.to_dict(),
            "contrast": self.contrast.to_dict(),
            "waking": [dataclasses.asdict(waking) for waking in self.waking],
            "comparisons": [dataclasses.asdict(comparison) for comparison in self.comparisons],
        }


def mean_of(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)
