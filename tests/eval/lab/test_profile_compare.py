"""A profile beside what was published."""

import dataclasses
from typing import Any

from quantsink.eval.lab.profile_compare import compare
from quantsink.eval.lab.profile_results import (
    AGREES,
    DISAGREES,
    FULL,
    IN_PART,
    Contrast,
    Head,
    HeadContrast,
    HeadShares,
    PositionShares,
    Profile,
)

HEADS = tuple(Head(0, head, FULL, True) for head in range(4))


def share(first: float, newest: float, layers: int = 4, length: int = 256, bos: float = 0.4) -> PositionShares:
    heads = tuple(
        HeadShares(Head(n, 0, FULL, n >= layers // 2), first, newest, 1 - first - newest, 0.0, bos, 9, first)
        for n in range(layers)
    )
    return PositionShares(length, True, 1, 9, heads)


def verdicts(shares: tuple[PositionShares, ...], one: float = 0.4, other: float = 0.3) -> list[str]:
    contrast = Contrast(("builtin:prose", "builtin:code"), True, 512, (9, 9), (HeadContrast(HEADS[0], one, other),))
    made: Any = Profile("m", "llama", 4, 0, "float32", "t", "", 0, shares, None, contrast, ())  # type: ignore[arg-type]
    return [comparison.verdict for comparison in compare(made)]


def test_agreement_is_read_off_the_figures() -> None:
    assert verdicts((share(0.5, 0.25),))[:3] == [AGREES, AGREES, AGREES]
    assert verdicts((share(0.5, 0.25), share(0.7, 0.2)))[:3] == [IN_PART, IN_PART, AGREES]
    assert verdicts((share(0.1, 0.6),))[:3] == [DISAGREES, DISAGREES, DISAGREES]
    assert verdicts((share(0.5, 0.25),))[-1] == AGREES
    assert verdicts((share(0.5, 0.25),), 0.3, 0.4)[-1] == DISAGREES


def test_a_claim_about_heads_is_counted_by_heads() -> None:
    """A layer's mean can hide a head that looks elsewhere."""
    one = share(0.7, 0.1)
    others = tuple(
        dataclasses.replace(h, head=dataclasses.replace(h.head, head=1), first=0.2, newest=0.6) for h in one.heads
    )
    assert verdicts((dataclasses.replace(one, heads=one.heads + others),))[2] == IN_PART
