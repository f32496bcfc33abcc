"""Text specs, documents, token windows and self-sampled text."""

from __future__ import annotations

import importlib
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from quantsink.calibration import text as text_module
from quantsink.calibration.text import Source, Windows, check_not_empty, documents, parse_spec, sample_self, windows
from quantsink.errors import DataError, UsageError

TEXT = "The first token draws attention whatever follows.\nNo other does so, not even this one.\n\nSo it is kept.\n" * 8


def byte_level(bos: str | None) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token="</s>", model_max_length=16)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_level("<s>")


@pytest.fixture(scope="module")
def without_bos() -> PreTrainedTokenizerFast:
    return byte_level(None)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=336,  # padded past the tokenizer, as many checkpoints are
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=0.5,
    )
    return LlamaForCausalLM(config)


def plain_ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def body(read: Windows) -> list[int]:
    return [token for window in read.ids for token in window.tolist()[read.bos is not None :]]


def assert_one_bos_first(read: Windows) -> None:
    for window in read.ids:
        assert window[0] == read.bos
        assert (window == read.bos).sum() == 1


# Specs


@pytest.mark.parametrize("spec", ["builtin:prose", "builtin:code", "self"])
def test_built_in_sources_need_no_file(spec: str) -> None:
    source = parse_spec(spec)
    assert (source.spec, source.name, source.format) == (spec, spec, spec)
    check_not_empty(source)


def test_a_file_is_named_without_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "corpus.TXT"
    path.write_text("a")
    assert parse_spec(str(path)).name == "corpus.TXT"


def test_a_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "corpus.txt").write_text("at home")
    assert list(documents(parse_spec("~/corpus.txt"))) == ["at home"]


@pytest.mark.parametrize(
    ("spec", "error", "says"),
    [
        ("builtin:poems", UsageError, "builtin:prose or builtin:code"),
        ("missing.txt", DataError, "no such file"),
        ("folder", DataError, "is a folder"),
        ("table.csv", UsageError, "use .txt, .jsonl, .parquet"),
        ("notes", UsageError, "file without suffix"),
        ("absent.csv", UsageError, "cannot read .csv"),
        ("no such thing!", UsageError, "check the path"),
        ("/a/b/c", UsageError, "check the path"),
        ("", UsageError, "check the path"),
        ("a:b:c:d", UsageError, "check the path"),
    ],
)
def test_a_wrong_spec_is_one_line(
    spec: str, error: type[Exception], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "table.csv").write_text("text\na\n")
    (tmp_path / "notes").write_text("a")
    with pytest.raises(error) as caught:
        parse_spec(spec)
    assert repr(spec) in str(caught.value)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("spec", "package"), [("owner/corpus:test", "datasets"), ("rows.parquet", "pyarrow")])
def test_a_missing_library_is_named_with_its_extra(
    spec: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.parquet").touch()
    monkeypatch.setattr(text_module, "_installed", lambda name: name != package)
    with pytest.raises(UsageError, match=r"pip install 'quantsink\[data\]'"):
        parse_spec(spec)


def test_a_folder_named_like_a_library_is_not_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "quantsink_absent").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not text_module._installed("quantsink_absent")
    assert text_module._installed("tokenizers")


# Documents


def test_builtin_text_comes_in_a_fixed_order() -> None:
    for spec in ("builtin:prose", "builtin:code"):
        first, again = (list(itertools.islice(documents(parse_spec(spec)), 5)) for _ in range(2))
        assert first == again
        assert sum(map(len, first)) > 1000


def test_builtin_code_reads_the_library_not_its_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b.py", "a.py", "package/c.py", "test/d.py", "site-packages/e.py", "package/tests/f.py", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(text_module.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert list(documents(Source("builtin:code", "code"))) == ["a.py", "b.py", "package/c.py"]


def test_a_txt_file_is_one_document_unstripped(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeff  é\r\n\n".encode())
    assert list(documents(parse_spec(str(path)))) == ["  é\r\n\n"]


@pytest.mark.parametrize(("raw", "offset"), [(b"abc\xff\xfe", 3), (b"ab\0c", 2), (b"\x89PNG", 0)])
@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_a_binary_file_is_named_with_its_byte(raw: bytes, offset: int, suffix: str, tmp_path: Path) -> None:
    head = b'{"text": "a"}\n' if suffix == ".jsonl" else b""
    path = tmp_path / f"a{suffix}"
    path.write_bytes(head + raw)
    with pytest.raises(DataError) as caught:
        list(documents(parse_spec(str(path))))
    assert f"{path}: byte {len(head) + offset} is not UTF-8" in str(caught.value)


def test_jsonl_rows_are_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one\\ntwo"}\n\n{"id": 3, "text": "\u2028"}\n{"text": null}\n{"text": ""}')
    assert list(documents(parse_spec(str(path)))) == ["one\ntwo", "\u2028", ""]


@pytest.mark.parametrize(
    "bad", ['{"text": "a"', '{"body": "a"}', '["text"]', '"text"', '{"text": 3}', "[" * 100_000, '{"text": "\\ud800"}']
)
def test_a_malformed_jsonl_line_is_named(bad: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "fine"}}\n\n{bad}\n')
    read = documents(parse_spec(str(path)))
    assert next(read) == "fine"
    with pytest.raises(DataError, match=r"a\.jsonl, line 3[ :]"):
        next(read)


def test_parquet_rows_are_documents(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    path = tmp_path / "a.parquet"
    texts = [f"document {i}" for i in range(1000)]
    table = pyarrow.table({"id": list(range(1001)), "text": [*texts, None]})
    importlib.import_module("pyarrow.parquet").write_table(table, path)
    assert list(documents(parse_spec(str(path)))) == texts


@pytest.mark.parametrize(
    ("columns", "says"), [({"id": [1], "body": ["a"]}, "only id, body"), ({"text": [1]}, "holds a int")]
)
def test_a_parquet_file_without_text_says_what_it_has(columns: dict[str, list], says: str, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    path = tmp_path / "a.parquet"
    importlib.import_module("pyarrow.parquet").write_table(pyarrow.table(columns), path)
    with pytest.raises(DataError, match=says):
        check_not_empty(parse_spec(str(path)))


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match=r"a\.parquet cannot be read"):
        check_not_empty(parse_spec(str(path)))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A stand-in for the datasets library: its rows say what was asked for."""
    (tmp_path / "datasets.py").write_text(
        "def load_dataset(name, config, *, split, streaming):\n"
        "    if name == 'gone':\n"
        "        raise RuntimeError('not\\nfound')\n"
        "    yield {'body' if name == 'other' else 'text': f'{name} {config} {split} {streaming}'}\n"
        "    raise AssertionError('read further than needed')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "datasets", raising=False)
    yield
    sys.modules.pop("datasets", None)


@pytest.mark.parametrize(
    ("spec", "asked"),
    [
        ("owner/corpus", "owner/corpus None train True"),
        ("corpus:test", "corpus None test True"),
        ("corpus:raw-v1", "corpus raw-v1 train True"),
        ("corpus:raw-v1:validation", "corpus raw-v1 validation True"),
        ("corpus::extra", "corpus None extra True"),
    ],
)
@pytest.mark.usefixtures("hub")
def test_a_hub_data_set_is_streamed(spec: str, asked: str) -> None:
    source = parse_spec(spec)
    check_not_empty(source)
    assert next(documents(source)) == asked


@pytest.mark.parametrize(("spec", "says"), [("gone", r"not found"), ("other", "only body")])
@pytest.mark.usefixtures("hub")
def test_a_hub_failure_is_one_line(spec: str, says: str) -> None:
    with pytest.raises(DataError, match=says):
        check_not_empty(parse_spec(spec))


@pytest.mark.parametrize(("name", "content"), [("a.txt", ""), ("a.txt", " \n\t"), ("a.jsonl", '{"text": "\\n"}\n')])
def test_empty_text_is_refused_before_any_model(name: str, content: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(DataError, match="holds no text"):
        check_not_empty(parse_spec(str(path)))


def test_check_not_empty_stops_at_the_first_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": " "}\n{"text": "a"}\nnot json\n')
    check_not_empty(parse_spec(str(path)))


# Windows


@pytest.mark.parametrize("seq_len", [2, 7, 64, 10_000])
def test_windows_keep_and_count_every_token(tokenizer: PreTrainedTokenizerFast, seq_len: int) -> None:
    texts = [TEXT, "", "short", TEXT[:100]]
    read = windows(tokenizer, texts, seq_len=seq_len, max_tokens=100_000)
    assert body(read) == [token for text in texts for token in plain_ids(tokenizer, text)]
    assert_one_bos_first(read)
    assert all(window.dtype == torch.int64 and 2 <= len(window) <= seq_len for window in read.ids)
    assert read.tokens == sum(map(len, read.ids))
    assert (read.documents, read.removed_bos, read.complete, read.bos) == (3, 0, True, 0)


def test_only_a_documents_last_window_is_short(tokenizer: PreTrainedTokenizerFast) -> None:
    count = len(plain_ids(tokenizer, TEXT))
    read = windows(tokenizer, [TEXT, TEXT], seq_len=17, max_tokens=100_000)
    full, rest = divmod(count, 16)
    assert [len(window) for window in read.ids] == ([17] * full + [rest + 1] * (rest > 0)) * 2


def test_a_bos_in_the_text_is_removed(tokenizer: PreTrainedTokenizerFast) -> None:
    read = windows(tokenizer, ["<s>one<s><s>two</s>"], seq_len=4, max_tokens=100)
    assert_one_bos_first(read)
    assert read.removed_bos == 3
    assert body(read) == [*plain_ids(tokenizer, "one"), *plain_ids(tokenizer, "two</s>")]


def test_bos_only_text_gives_no_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(DataError, match="'corpus' gives no tokens"):
        windows(tokenizer, ["<s><s>", ""], seq_len=4, max_tokens=100, name="corpus")


def test_without_a_bos_the_windows_hold_only_text(
    tokenizer: PreTrainedTokenizerFast, without_bos: PreTrainedTokenizerFast
) -> None:
    ids = plain_ids(without_bos, TEXT)
    for read in (
        windows(without_bos, [TEXT], seq_len=8, max_tokens=10_000),
        windows(tokenizer, [TEXT], seq_len=8, max_tokens=10_000, bos=False),
    ):
        assert read.bos is None
        assert body(read) == ids
        assert read.tokens == len(ids)
        assert {len(window) for window in read.ids[:-1]} == {8}


@pytest.mark.parametrize("max_tokens", [8, 9, 10, 15, 16, 17, 18])
def test_max_tokens_bounds_the_sum_with_bos(tokenizer: PreTrainedTokenizerFast, max_tokens: int) -> None:
    read = windows(tokenizer, [TEXT], seq_len=8, max_tokens=max_tokens)
    full, rest = divmod(max_tokens, 8)
    assert [len(window) for window in read.ids] == [8] * full + [rest] * (rest >= 2)
    assert read.tokens == max_tokens - (rest == 1)
    assert not read.complete


def test_text_that_just_fits_is_complete(tokenizer: PreTrainedTokenizerFast) -> None:
    count = len(plain_ids(tokenizer, TEXT[:100]))
    exact = windows(tokenizer, [TEXT[:100], ""], seq_len=count + 1, max_tokens=count + 1)
    assert (exact.complete, exact.tokens, exact.documents) == (True, count + 1, 1)
    more = windows(tokenizer, [TEXT[:100], "x"], seq_len=count + 1, max_tokens=count + 1)
    assert (more.complete, more.tokens, more.documents) == (False, count + 1, 1)


def test_reading_stops_with_max_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    def texts() -> Iterator[str]:
        yield TEXT
        yield TEXT
        raise AssertionError("read further than needed")

    assert windows(tokenizer, texts(), seq_len=8, max_tokens=32).documents == 1


def test_a_long_document_is_tokenized_in_pieces(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = TEXT.replace("so,", "so,\r\n")
    whole = windows(tokenizer, [text], seq_len=16, max_tokens=10_000)
    pieces: list[str] = []
    encode = type(tokenizer).__call__

    def spy(self: PreTrainedTokenizerFast, piece: str, **options: object) -> object:
        pieces.append(piece)
        return encode(self, piece, **options)

    monkeypatch.setattr(type(tokenizer), "__call__", spy)
    monkeypatch.setattr(text_module, "CHUNK_CHARACTERS", 60)
    cut = windows(tokenizer, [text], seq_len=16, max_tokens=10_000)
    assert len(pieces) > 5
    assert "".join(pieces) == text
    assert cut.fingerprint == whole.fingerprint
    pieces.clear()
    windows(tokenizer, [text], seq_len=16, max_tokens=16)
    assert len(pieces) == 1


def test_a_text_longer_than_the_models_context_gives_no_warning(
    tokenizer: PreTrainedTokenizerFast, capfd: pytest.CaptureFixture[str]
) -> None:
    windows(tokenizer, [TEXT], seq_len=16, max_tokens=10_000)
    assert "longer than" not in capfd.readouterr().err


def test_a_source_names_its_windows(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    path = tmp_path / "corpus.txt"
    path.write_text(TEXT)
    source = parse_spec(str(path))
    assert windows(tokenizer, source, seq_len=8, max_tokens=64).name == "corpus.txt"
    assert windows(tokenizer, source, seq_len=8, max_tokens=64, name="corpus").name == "corpus"
    assert windows(tokenizer, ["a"], seq_len=8, max_tokens=64).name == "documents"


def test_the_fingerprint_follows_what_was_read(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    def fingerprint(text: str, name: str = "a.txt", seq_len: int = 32, max_tokens: int = 64) -> str:
        path = tmp_path / name
        path.write_text(json.dumps({"text": text}) if name.endswith("jsonl") else text)
        return windows(tokenizer, parse_spec(str(path)), seq_len=seq_len, max_tokens=max_tokens).fingerprint

    first = fingerprint(TEXT)
    assert len(first) == 64
    assert fingerprint(TEXT) == first
    assert fingerprint(TEXT, "renamed.txt") == first
    assert fingerprint(TEXT + "text that is not reached") == first
    others = [
        fingerprint("x" + TEXT),
        fingerprint(TEXT, "a.jsonl"),
        fingerprint(TEXT, seq_len=33),
        fingerprint(TEXT, max_tokens=65 + 1),
        fingerprint("short"),
        fingerprint("short", seq_len=64),
    ]
    assert len({first, *others}) == 1 + len(others)


@pytest.mark.parametrize(("seq_len", "max_tokens"), [(1, 8), (0, 8), (-3, 8), (8, 7), (8, 0)])
def test_impossible_sizes_are_refused(
    tokenizer: PreTrainedTokenizerFast, model: LlamaForCausalLM, seq_len: int, max_tokens: int
) -> None:
    with pytest.raises(UsageError):
        windows(tokenizer, ["a"], seq_len=seq_len, max_tokens=max_tokens)
    with pytest.raises(UsageError):
        sample_self(model, tokenizer, seq_len=seq_len, tokens=max_tokens, seed=0)


def test_input_other_than_a_list_of_texts_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UsageError, match="wrap it"):
        windows(tokenizer, "a text", seq_len=8, max_tokens=8)
    with pytest.raises(UsageError, match="pass strings"):
        windows(tokenizer, [b"bytes"], seq_len=8, max_tokens=8)  # type: ignore[list-item]
    with pytest.raises(UsageError, match="sample_self"):
        windows(tokenizer, parse_spec("self"), seq_len=8, max_tokens=8)


# Text sampled from the model


def test_self_text_is_seeded_and_leaves_random_state_alone(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    model.train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    before = torch.random.get_rng_state()
    first, again, other = (sample_self(model, tokenizer, tokens=100, seq_len=16, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert [module.training for module in model.modules()] == modes
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert len({tuple(window.tolist()) for window in first.ids}) == len(first.ids)


@pytest.mark.parametrize(("tokens", "lengths"), [(16, [16]), (17, [16]), (18, [16, 2]), (40, [16, 16, 8])])
def test_self_text_has_one_bos_per_window_and_is_counted(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, tokens: int, lengths: list[int]
) -> None:
    read = sample_self(model, tokenizer, tokens=tokens, seq_len=16, seed=0)
    assert [len(window) for window in read.ids] == lengths
    assert read.tokens == sum(lengths)
    assert_one_bos_first(read)
    assert (read.name, read.documents, read.removed_bos, read.complete) == ("self", len(lengths), 0, True)


def test_self_text_stays_in_the_tokenizers_vocabulary(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    read = sample_self(model, tokenizer, tokens=3000, seq_len=20, seed=0)
    ids = torch.cat(read.ids)
    assert ids.max() < len(tokenizer) < model.config.vocab_size
    assert (ids == tokenizer.eos_token_id).any()  # the text goes on after it


def test_self_text_without_bos_starts_with_an_ordinary_token(
    model: LlamaForCausalLM, without_bos: PreTrainedTokenizerFast, tokenizer: PreTrainedTokenizerFast
) -> None:
    for read in (
        sample_self(model, without_bos, tokens=400, seq_len=8, seed=0),
        sample_self(model, tokenizer, tokens=400, seq_len=8, seed=0, bos=False),
    ):
        firsts = {int(window[0]) for window in read.ids}
        assert read.bos is None
        assert len(firsts) > 10
        assert not firsts & set(without_bos.all_special_ids)


def test_self_text_follows_the_models_distribution(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cached steps see the same logits as a pass without a cache: a sharp model repeats its own argmax."""
    monkeypatch.setattr(model.lm_head, "forward", lambda hidden: 1e6 * hidden @ model.lm_head.weight.T)
    window = sample_self(model, tokenizer, tokens=12, seq_len=12, seed=0).ids[0]
    model.eval()
    with torch.no_grad():
        logits = model(window[None], use_cache=False).logits[0, :, : len(tokenizer)]
    logits[:, tokenizer.bos_token_id] = -torch.inf
    assert logits.argmax(-1)[:-1].tolist() == window[1:].tolist()


def test_logits_that_are_not_finite_are_reported(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.lm_head, "forward", lambda hidden: torch.full((*hidden.shape[:-1], 336), torch.nan))
    with pytest.raises(DataError, match="not finite"):
        sample_self(model, tokenizer, tokens=8, seq_len=8, seed=0)


def test_held_out_text_repeats_nothing_of_the_prose() -> None:
    """Topics of pydoc repeat each other's paragraphs; what calibration has read is no test."""
    prose = {run for text in documents(parse_spec("builtin:prose")) for run in eights(text)}
    (held,) = documents(parse_spec("builtin:heldout"))
    paragraphs = held.split("\n\n")
    assert len(held) > 10_000
    assert not any(run in prose for text in paragraphs for run in eights(text))


def eights(text: str) -> list[str]:
    words = text.split()
    return [" ".join(words[i : i + 8]) for i in range(len(words) - 7)]
