"""What is damaged: one calibration and one checkpoint of a tiny Llama; and what counts as a good end."""

import contextlib
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import quantsink
from quantsink.checkpoint.save_load import load, save
from quantsink.errors import QuantSinkError
from quantsink.recipe import Activations, Attention, Clip, KVCache, Recipe

IDS = torch.arange(2, 40)[None]
SECONDS = 10
"""A case that takes longer hangs."""
MEMORY = 4 * 2**30
"""Bytes of address space that all cases together may add."""
tried: dict[str, tuple[int, int]] = {}
"""By surface: cases, refused ones."""


@dataclass(frozen=True)
class Subjects:
    """Folders that stay whole; a case works on a copy."""

    calibration: Path
    checkpoint: Path
    recipe: Recipe
    model: Any
    logits: torch.Tensor


@pytest.fixture(scope="session")
def subjects(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Subjects:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, initializer_range=0.1,
        tie_word_embeddings=True, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    options = {"seq_len": 64, "max_tokens": 512, "error_windows": 1}
    calibration = quantsink.calibrate(model, tokenizer, ["builtin:code", "builtin:prose"], **options)
    recipe = Recipe(
        activations=Activations(kind="static", sink_rows="table", native_columns=0.05),
        attention=Attention(native_heads=1, clip=Clip(kind="row")),
        kv_cache=KVCache(bits=4.0, widths="uniform"),
    )
    folder = tmp_path_factory.mktemp("fuzz")
    calibration.save(folder / "calibration")
    save(quantsink.quantize(model, calibration, recipe), folder / "checkpoint", max_shard_size="40KB")
    assert len(list((folder / "checkpoint").glob("*.safetensors"))) > 1
    loaded = load(folder / "checkpoint")
    return Subjects(folder / "calibration", folder / "checkpoint", recipe, loaded, forward(loaded))


def forward(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[Path], Path]:
    """A copy of a folder to damage."""

    def copy(folder: Path) -> Path:
        return shutil.copytree(folder, tmp_path / folder.name)

    return copy


class Hang(BaseException):
    """No `except Exception` may swallow it."""


@contextlib.contextmanager
def limited() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise Hang(f"longer than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True)
def bounded_memory() -> Iterator[None]:
    """What a file says it holds is not allocated."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


REMEDIES = (" again", "export", "load it", "update", "trust_remote_code", "recipe", "calibrate with", "at least")


@pytest.fixture
def ends_well() -> Callable[..., Any]:
    """Runs a case: its result, or None where it was refused as it should be. Anything else fails."""

    def run(surface: str, case: str, call: Callable[[], Any], names: tuple[str, ...]) -> Any:
        cases, refused = tried.get(surface, (0, 0))
        try:
            with limited():
                result = call()
        except QuantSinkError as error:
            tried[surface] = cases + 1, refused + 1
            message = str(error)
            assert "emory" not in message, f"{case}: {message!r}: allocated what the file only claims to hold"
            assert message.isprintable(), f"{case}: {message!r} is not one line"
            assert 10 < len(message) < 800, f"{case}: {message!r}"
            assert any(name in message for name in names), f"{case}: {message!r} does not say where"
            assert any(remedy in message for remedy in REMEDIES), f"{case}: {message!r} does not say what to do"
            return None
        except AssertionError:
            raise
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error
        tried[surface] = cases + 1, refused
        return result

    return run


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if tried:
        terminalreporter.section("damaged files")
        for surface, (cases, refused) in sorted(tried.items()):
            terminalreporter.line(f"{surface:40} {cases:6} cases, {refused:6} refused, {cases - refused:6} taken")
        terminalreporter.line(f"{'all':40} {sum(cases for cases, _ in tried.values()):6} cases")
