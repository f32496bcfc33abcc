"""A profile beside what was published; no published figure is quoted that could not be checked."""

from collections.abc import Sequence

from quantsink.calibration.collect import FIRST_ROW
from quantsink.eval.lab.profile_results import (
    AGREES,
    ALL,
    DEEP,
    DISAGREES,
    FULL,
    IN_PART,
    NO_FIGURE,
    SINK,
    Comparison,
    PositionShares,
    Profile,
    mean_of,
)

NEAR = 0.1
"""How far a share may lie from a reported one to count as agreeing; the tolerance is this project's own."""


def compare(profile: Profile) -> tuple[Comparison, ...]:
    """Set the measurement beside what was published; no published figure is quoted that could not be checked."""
    comparisons: list[Comparison] = []
    with_bos = [share for share in profile.shares if share.bos] or list(profile.shares)
    if with_bos:
        for depth in (ALL, DEEP):
            comparisons += _halves(with_bos, depth)
        comparisons += _by_layer(with_bos[-1])
        short = with_bos[0]
        sinks = sum(h.bos >= SINK for h in short.heads)
        comparisons.append(
            Comparison(
                "sink metric: share of heads whose mean weight on the first token passes 0.3",
                "Gu et al. 2025, When Attention Sink Emerges in Language Models (there over all rows of 64 tokens)",
                f"{sinks} of {len(short.heads)} heads ({sinks / len(short.heads):.0%}) at length {short.length}, rows "
                f"from {FIRST_ROW} on",
                NO_FIGURE,
            )
        )
    one, other = profile.contrast.means
    if profile.contrast.texts == ("builtin:prose", "builtin:code"):
        comparisons.append(
            Comparison(
                "of five kinds of text, code draws the least weight to the first token",
                "OpenReview AJgzo9JhtM (GPT-2, Llama, Mistral)",
                f"mean BOS mass {one:.3f} on prose, {other:.3f} on code (two kinds only)",
                AGREES if other < one else DISAGREES,
            )
        )
    return tuple(comparisons)


def _halves(shares: Sequence[PositionShares], depth: str) -> list[Comparison]:
    means = [
        (share.length, mean) for share in shares for mean in share.means if (mean.kind, mean.depth) == (FULL, depth)
    ]
    if not means:
        return []
    words = "; ".join(f"{length}: {m.first:.0%} / {m.newest:.0%} / {m.middle:.0%}" for length, m in means)
    near = [abs(m.first - 0.5) <= NEAR and abs(m.newest - 0.25) <= NEAR for _, m in means]
    return [
        Comparison(
            "the first 3 tokens get about half of the weight at all lengths, the newest 10 a quarter, the middle the "
            "rest",
            "said of attention-sink audits; no citation found",
            f"heads of full attention, {depth}, {words} (within {NEAR:.0%} counts)",
            _verdict(sum(near), len(near)),
        )
    ]


def _by_layer(share: PositionShares) -> list[Comparison]:
    heads = [h for h in share.heads if h.head.kind == FULL and h.head.layer >= 2]
    if not heads:
        return []
    wins = sum(h.first > h.newest for h in heads)
    bottom = [h for h in share.heads if h.head.layer < 2]
    return [
        Comparison(
            "beyond the bottom two layers, attention goes to the initial tokens in all layers and heads",
            "Xiao et al. 2024, StreamingLLM, section 3.1",
            f"first 3 > newest 10 in {wins} of {len(heads)} heads of full attention from the third layer on, at length "
            f"{share.length}; bottom two layers: {mean_of(h.first for h in bottom):.0%} on the first 3, "
            f"{mean_of(h.newest for h in bottom):.0%} on the newest 10",
            _verdict(wins, len(heads)),
        )
    ]


def _verdict(agreeing: int, total: int) -> str:
    return AGREES if agreeing == total else IN_PART if agreeing else DISAGREES
