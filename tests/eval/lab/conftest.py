"""Fixtures of the laboratory's tests: a short text, a small profile, and vision models of one epoch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantsink.eval.lab.profile import ProfileSettings, measure_profile
from quantsink.eval.lab.profile_results import Profile
from quantsink.eval.lab.profile_weights import Text, read_text
from quantsink.eval.lab.vision import Scale, VisionRun, run_vision

Build = Callable[..., Any]


@pytest.fixture(scope="session")
def prose(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lab") / "prose.txt"
    path.write_text("".join(f"line {number * 7919 % 1000} of many, none like another.\n" for number in range(100)))
    return path


@pytest.fixture
def text(tokenizer: Any, prose: Path) -> Text:
    return read_text(tokenizer, str(prose), 1024)


@pytest.fixture(params=["llama", "gemma"])
def profile(
    request: pytest.FixtureRequest, tiny_llama: Build, tiny_gemma: Build, tokenizer: Any, tmp_path: Path
) -> Profile:
    """Everything that a profile measures, on a tiny model with random weights."""
    model = (tiny_llama if request.param == "llama" else tiny_gemma)(initializer_range=0.3)
    path = tmp_path / "text.txt"
    path.write_text("".join(f"The brown fox number {number} jumps over. " for number in range(40)))
    settings = ProfileSettings(lengths=(64, 128), share_tokens=256, sentences=8, contrast_windows=2, contrast_length=96)
    steps: list[tuple[str, int, int]] = []
    result = measure_profile(
        model,
        tokenizer,
        name="tiny",
        text=str(path),
        contrast=("builtin:prose", "builtin:code"),
        settings=settings,
        progress=lambda *step: steps.append(step),
    )
    assert {name: (done, total) for name, done, total in steps} == {
        "position shares": (4, 4),
        "sentences": (8, 8),
        "BOS mass, builtin:prose": (2, 2),
        "BOS mass, builtin:code": (2, 2),
    }
    return result


@pytest.fixture(scope="session")
def vision_runs() -> list[VisionRun]:
    """Every variant of the vision experiment, one seed."""
    return run_vision(Scale(1, 1), workers=1)
