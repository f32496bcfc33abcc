"""Evaluation windows: every token scored once, whatever the layout."""

import math
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from quantsink.errors import DataError, UsageError
from quantsink.eval import EvalWindow, cut, read
from quantsink.eval.bootstrap import perplexity
from quantsink.eval.divergence import log_probs, score_reference


def positions(windows: list[EvalWindow], stride: int, has_bos: bool) -> list[int]:
    """Text positions of all scored tokens, from the windows' own numbers."""
    return [
        number * stride + column - has_bos
        for number, window in enumerate(windows)
        for column in range(window.first_scored, len(window.ids))
    ]


@pytest.mark.parametrize("bos", [None, 0])
@pytest.mark.parametrize(
    ("tokens", "length", "stride"),
    [(20, 10, 5), (20, 10, 9), (21, 10, 1), (9, 10, 9), (10, 10, 9), (11, 10, 9), (100, 16, 7), (5, 2, 1)],
)
def test_each_token_is_scored_once(tokens: int, length: int, stride: int, bos: int | None) -> None:
    ids = torch.arange(1, tokens + 1)
    windows = cut(ids, length=length, stride=stride, bos=bos)
    first = 0 if bos is not None else 1
    assert positions(windows, stride, bos is not None) == list(range(first, tokens))
    for number, window in enumerate(windows):
        assert 1 <= window.first_scored < len(window.ids) <= length
        body = window.ids[0 if bos is None else 1 :]
        assert torch.equal(body, ids[number * stride :][: len(body)])
        assert bos is None or window.ids[0] == bos


def test_windows_do_not_overlap_unless_asked() -> None:
    assert [len(w.ids) for w in cut(torch.arange(1, 21), length=11, bos=0)] == [11, 11]
    assert [w.scored for w in cut(torch.arange(1, 21), length=11, bos=0)] == [10, 10]


@pytest.mark.parametrize("bos", [None, 0])
@pytest.mark.parametrize("stride", [9, 4, 6])
@pytest.mark.parametrize("tokens", [9, 14, 40, 43])
def test_context_is_never_scored_and_no_token_twice(tokens: int, stride: int, bos: int | None) -> None:
    ids, context = torch.arange(1, tokens + 1), 6
    whole = cut(ids, length=10, stride=stride, bos=bos)
    windows = cut(ids, length=10, stride=stride, bos=bos, context=context)
    assert all(context <= window.first_scored < len(window.ids) for window in windows)
    for window, same in zip(windows, whole, strict=False):
        assert torch.equal(window.ids, same.ids)
    scored = positions(windows, stride, bos is not None)
    assert len(set(scored)) == len(scored)
    starts = range(0, tokens, stride)
    reached = {p for s in starts for p in range(s + context - (bos is not None), s + 10 - (bos is not None))}
    assert sorted(scored) == sorted(p for p in reached if p < tokens)


@pytest.mark.parametrize("context", [10, 11, -1])
def test_a_context_that_leaves_nothing_to_score_is_refused(context: int) -> None:
    with pytest.raises(UsageError, match=f"--length 10: the first {context} tokens"):
        cut(torch.arange(20), length=10, context=context)


@pytest.mark.parametrize("tokens", [0, 1])
def test_a_first_token_without_bos_is_not_scored(tokens: int) -> None:
    assert cut(torch.arange(tokens), length=4) == []


@pytest.mark.parametrize(("length", "stride"), [(1, None), (10, 10), (10, 0)])
def test_a_layout_that_would_lose_tokens_is_refused(length: int, stride: int | None) -> None:
    with pytest.raises(UsageError, match="token"):
        cut(torch.arange(20), length=length, stride=stride)


def test_strided_perplexity_equals_brute_force(model: LlamaForCausalLM) -> None:
    ids = torch.randint(2, 31, (20,), generator=torch.Generator().manual_seed(1))
    windows = cut(ids, length=10, stride=5)
    with log_probs() as store:
        sums = score_reference(model, windows, store)
    assert sum(window.count for window in sums) == 19

    nll = []
    for target in range(1, 20):
        start = max(0, -(-(target - 9) // 5) * 5)  # of the first window that reaches the target
        with torch.no_grad():
            logits = model(ids[None, start:target]).logits[0, -1].double()
        nll.append(-float(logits.log_softmax(-1)[ids[target]]))
    assert perplexity(sums) == pytest.approx(math.exp(sum(nll) / 19), rel=1e-5)


def test_reading_counts_windows_and_tokens(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    path = tmp_path / "two.jsonl"
    path.write_text('{"text": "abcdefghij"}\n{"text": ""}\n{"text": "abc"}\n')
    whole = read(tokenizer, str(path), length=6)
    assert [len(window.ids) for window in whole.windows] == [6, 6, 4]
    assert (whole.scored, whole.tokens, whole.bos, whole.complete, whole.stride) == (13, 16, 0, True, 5)
    part = read(tokenizer, str(path), length=6, max_windows=2)
    assert (part.scored, part.complete) == (10, False)
    assert read(tokenizer, str(path), length=6, max_windows=3).complete
    behind = read(tokenizer, str(path), length=6, context=4)
    assert [(len(w.ids), w.first_scored) for w in behind.windows] == [(6, 4), (6, 4)]
    assert (behind.scored, behind.context, whole.context) == (4, 4, 0)
    plain = read(tokenizer, str(path), length=6, bos=False)
    assert (plain.scored, plain.bos) == (9 + 2, None)


def test_the_fingerprint_follows_ids_and_layout(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    path, copy, other = (tmp_path / name for name in ("a.txt", "b.txt", "c.txt"))
    path.write_text("abcdefghijklm")
    copy.write_text("abcdefghijklm")
    other.write_text("abcdefghijkl.")
    same = read(tokenizer, str(path), length=6).fingerprint
    assert read(tokenizer, str(copy), length=6).fingerprint == same
    different = [
        read(tokenizer, str(other), length=6),
        read(tokenizer, str(path), length=7),
        read(tokenizer, str(path), length=6, stride=3),
        read(tokenizer, str(path), length=6, bos=False),
        read(tokenizer, str(path), length=6, context=2),
    ]
    assert len({same, *(text.fingerprint for text in different)}) == 6


def test_a_bos_in_the_text_is_removed(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("ab<s>cd")
    text = read(tokenizer, str(path), length=8)
    assert text.windows[0].ids.tolist() == [0, *tokenizer("abcd", add_special_tokens=False)["input_ids"]]
    assert text.removed_bos == 1


def test_text_without_tokens_is_refused(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    path = tmp_path / "empty.txt"
    path.write_text("")
    with pytest.raises(DataError, match="no token"):
        read(tokenizer, str(path))
    with pytest.raises(UsageError, match="self"):
        read(tokenizer, "self")
