"""A profile's pictures."""

from typing import Any

import torch

from quantsink.eval.lab.profile import (
    waking_tokens,
)
from quantsink.eval.lab.profile_plots import contrast_scatter, share_bars, waking_bars
from quantsink.eval.lab.profile_results import (
    FULL,
    BosMass,
    Head,
    Profile,
)


def made_up(mass: list[list[float]], tokens: list[int], name: str = "made up") -> BosMass:
    return BosMass(name, True, 1, 16 + len(tokens), torch.tensor(mass), torch.tensor(tokens))


HEADS = tuple(Head(0, head, FULL, True) for head in range(4))


def test_pictures_are_drawn(profile: Profile, tokenizer: Any) -> None:
    a, b = tokenizer("$'")["input_ids"]
    odd = waking_tokens(HEADS, made_up([[0.0, *[1.0] * 8]] * 4, [a] * 4 + [b] * 5), tokenizer)
    pictures = [
        share_bars(profile.shares, "shares"),
        contrast_scatter(profile.contrast, "contrast"),
        *(waking_bars(waking, "waking") for waking in (*profile.waking, odd)),
    ]
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)
