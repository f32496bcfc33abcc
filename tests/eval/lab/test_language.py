"""The language laboratory: text apart from text, each measure against an independent computation, a quick run whole."""

import dataclasses
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from quantsink.errors import DataError, QuantSinkError, UsageError
from quantsink.eval.lab import language
from quantsink.eval.lab.attention import AttentionSpec
from quantsink.eval.lab.language import (
    BOS,
    COMMON,
    LENGTH,
    Cache,
    GradientNoise,
    Training,
    activations,
    at_length,
    eight_bits,
    gradients,
    head_masses,
    losses,
    mean_loss,
    model_for,
    prepared,
    step_times,
    streaming,
    text,
    train,
    with_bos,
)
from quantsink.eval.lab.language_runs import (
    LEARNED,
    SOFTMAX,
    SOFTMAX1,
    VARIANTS,
)
from quantsink.eval.lab.mechanisms import LearnableSinksPart
from quantsink.eval.lab.model import TokenModel
from quantsink.eval.lab.quantize import Bits
from quantsink.eval.lab.windows import WindowDecay, WindowDecayPart

SHORT = Training(steps=6, sequences=2)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def loud(spec: AttentionSpec = SOFTMAX, seed: int = 0) -> TokenModel:
    """Untrained, its scores large enough that it matters which keys are seen."""
    model = model_for(spec, seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                weight.mul_(4)
    model.train(False)
    return model


def some(length: int = 40, count: int = 3, seed: int = 0) -> Tensor:
    return with_bos(torch.randint(256, (count, length), generator=torch.Generator().manual_seed(seed)))


def weights_of(model: TokenModel) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_training_text_has_no_passage_of_the_held_out_text() -> None:
    found = text()
    train_bytes, heldout = bytes(found.train.tolist()), bytes(found.heldout.tolist())
    grams = {heldout[i : i + COMMON] for i in range(len(heldout) - COMMON + 1)}
    # Windows are pieces of training text; what spans two pieces is never read.
    last = -1
    for start in found.starts.tolist():
        for i in range(max(start, last + 1), start + LENGTH - COMMON + 1):
            assert train_bytes[i : i + COMMON] not in grams, train_bytes[i : i + COMMON]
            last = i
    assert found.cut > 0
    assert len(train_bytes) > 10 * len(heldout)


def test_a_known_passage_is_cut_out_and_no_window_spans_the_cut() -> None:
    first, second, known = b"a" * 150, b"b" * LENGTH, bytes(range(40, 100))
    found = prepared([first + known + second, b"short"], b"before" + known + b"after")
    assert bytes(found.train.tolist()) == first + second
    assert found.cut == len(known) + len(b"short")
    assert found.starts.tolist() == [*range(150 - LENGTH + 1), 150]
    with pytest.raises(DataError, match="not held out"):
        prepared([known], known)


def test_batches_and_windows_start_with_bos() -> None:
    found = text()
    batch = found.batch(3, torch.Generator().manual_seed(0))
    assert batch.shape == (3, 1 + LENGTH)
    assert batch[:, 0].tolist() == [BOS] * 3
    assert bool((batch[:, 1:] < BOS).all())
    windows = found.windows(100)
    assert windows.shape == (len(found.heldout) // 100, 101)
    assert torch.equal(windows[:, 1:].flatten(), found.heldout[: windows[:, 1:].numel()])
    assert windows[:, 0].tolist() == [BOS] * len(windows)
    few = found.windows(100, 4)
    assert len(few) == 4
    assert torch.equal(few[2], windows[len(windows) // 2])
    with pytest.raises(DataError, match="no window"):
        found.windows(len(found.heldout) + 1)


def test_every_variant_of_a_seed_starts_from_the_same_weights() -> None:
    plain = model_for(SOFTMAX, 1).state_dict()
    for spec in VARIANTS:
        own = model_for(spec, 1).state_dict()
        assert all(torch.equal(own[name], weight) for name, weight in plain.items()), spec.name
    other = model_for(SOFTMAX, 2).state_dict()
    assert not torch.equal(other["embed.weight"], plain["embed.weight"])


@pytest.mark.parametrize("spec", [SOFTMAX1, LEARNED], ids=lambda spec: spec.name)
def test_a_seed_gives_the_same_bits_whatever_the_global_generator(spec: AttentionSpec) -> None:
    found = []
    for noise in (0, 1):
        torch.manual_seed(noise)
        model = model_for(spec, 3)
        before = torch.get_rng_state()
        found.append((train(model, text(), SHORT, 3), weights_of(model)))
        assert torch.equal(torch.get_rng_state(), before)
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


def test_training_learns() -> None:
    model = model_for(SOFTMAX, 0)
    windows = text().windows(LENGTH, 8)
    before = float(losses(model, windows).mean())
    train(model, text(), Training(steps=40), 0)
    assert float(losses(model, windows).mean()) < before - 1
    assert not model.training


def test_training_works_where_gradients_are_off() -> None:
    with torch.no_grad():
        model = model_for(SOFTMAX, 0)
        before = weights_of(model).clone()
        train(model, text(), SHORT, 0)
    assert not torch.equal(weights_of(model), before)


def test_the_learning_rate_climbs_and_falls() -> None:
    training = Training(steps=20)
    assert [round(training.factor(step), 3) for step in (0, 1, 2, 11)] == [0.5, 1, 1, 0.5]
    assert 0 < training.factor(19) < 0.01
    assert Training(steps=1).factor(0) == 1


def test_a_diverged_training_names_variant_and_seed() -> None:
    with pytest.raises(QuantSinkError, match="softmax1, seed 7: the training diverged"):
        train(model_for(SOFTMAX1, 7), text(), dataclasses.replace(SHORT, rate=1e30), 7)


def test_perplexity_against_probabilities_multiplied_one_by_one() -> None:
    model, windows = loud(), some(length=24, count=2)
    found = at_length(losses(model, windows), 10)
    product, far = 1.0, []
    for row in windows:
        for i in range(24):
            chances = model(row[None, : i + 1])[0, -1].detach().double().exp()
            chance = float(chances[row[i + 1]] / chances.sum())
            product *= chance
            if i >= 20:
                far.append(chance)
    assert found.perplexity == pytest.approx(product ** (-1 / 48), rel=1e-5)
    assert found.scored == 48
    assert [(b.start, b.end) for b in found.buckets] == [(0, 10), (10, 20), (20, 24)]
    assert found.buckets[2].perplexity == pytest.approx(math.prod(far) ** (-1 / 8), rel=1e-5)


def test_losses_do_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, windows = loud(), some(count=5)
    whole = losses(model, windows)
    monkeypatch.setattr(language, "CHUNK", 90)
    assert len(language.chunks(windows)) == 3
    torch.testing.assert_close(losses(model, windows), whole, rtol=1e-5, atol=1e-5)


def test_gradient_variance_by_hand() -> None:
    # Mean (2, 1); deviations (-1, -1), (1, -1), (0, 2): 8 in all, over 3 - 1.
    found = GradientNoise.of(9, iter([torch.tensor([1.0, 0.0]), torch.tensor([3.0, 0.0]), torch.tensor([2.0, 3.0])]))
    assert (found.step, found.batches) == (9, 3)
    assert found.trace == pytest.approx(4.0)
    assert found.mean_square == pytest.approx(5.0)
    assert found.relative == pytest.approx(4 / (5 - 4 / 3))
    assert math.isnan(GradientNoise(0, 2, 4.0, 2.0).relative), "nothing but noise"
    with pytest.raises(UsageError, match="at least 2"):
        GradientNoise.of(0, iter([torch.ones(2)]))


def test_gradients_are_those_of_backward_and_leave_the_model_alone() -> None:
    model, batches = loud(), [some(seed=0), some(seed=1)]
    before = weights_of(model).clone()
    found = torch.stack(list(gradients(model, batches)))
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(weights_of(model), before)
    mean_loss(model, batches[1]).backward()
    own = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(found[1], own)
    noise = GradientNoise.of(0, iter(found))
    assert noise.trace == pytest.approx(float(found.double().var(0).sum()), rel=1e-9)


def test_head_masses_of_every_sink() -> None:
    model = loud(LEARNED)
    assert sum(isinstance(part, LearnableSinksPart) for part in model.modules()) == language.LAYERS
    windows = some()
    flat = {(h.layer, h.head): h for h in head_masses(model, windows)}
    assert len(flat) == language.LAYERS * language.HEADS
    record: list[Tensor] = []
    with torch.no_grad():
        model.run(windows[:, :-1], record=record)
    assert flat[2, 1].bos == pytest.approx(float(record[2][:, 1, 16:, 1].mean()), rel=1e-5)
    assert flat[2, 1].learned == pytest.approx(float(record[2][:, 1, 16:, 0].mean()), rel=1e-5)
    assert flat[2, 1].total == pytest.approx(1, rel=1e-5)
    assert all(h.total < 1 for h in head_masses(loud(SOFTMAX1), windows))


def test_activations_separate_bos_from_other_tokens() -> None:
    model = loud()
    with torch.no_grad():
        model.embed.weight[BOS] = 0
        model.embed.weight[BOS, 5] = 1000
    found = activations(model, some())
    assert [a.layer for a in found] == [0, 1, 2]
    assert all(a.bos > 1000 for a in found)
    assert all(a.others < 500 for a in found)
    assert not any(block._forward_hooks for block in model.blocks)


@pytest.mark.parametrize("spec", [SOFTMAX, LEARNED, VARIANTS[2], VARIANTS[4]], ids=lambda spec: spec.name)
def test_bits_without_parts_change_nothing(spec: AttentionSpec) -> None:
    model = loud(spec)
    before = weights_of(model).clone()
    nothing, all_of_it = eight_bits(model, some(), {"nothing": Bits(parts=()), "all": Bits()})
    assert abs(nothing.kl) < 1e-12
    assert nothing.ratio == pytest.approx(1, abs=1e-12)
    assert all_of_it.kl > 1e-7
    assert torch.equal(weights_of(model), before)
    assert next(model.parameters()).dtype == torch.float32


@pytest.mark.parametrize("sinks", [0, 1])
@pytest.mark.parametrize("cache", [Cache(8), Cache(6, 2), Cache(40), Cache(1, 3)], ids=str)
def test_a_cache_sees_what_a_loop_says(cache: Cache, sinks: int) -> None:
    seen = cache.seen(40, sinks)
    for query in range(40):
        keys = {key for key in range(query + 1) if key > query - cache.newest or key < cache.first}
        found = seen[query].tolist()
        assert all(found[:sinks])
        assert {key for key in range(query + 1) if found[sinks + key]} == keys


def test_streaming_against_a_window_mechanism(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of the lab's own, its decay taken out, is a cache of the newest keys."""
    windows = some()
    spec = dataclasses.replace(SOFTMAX, mechanisms=(WindowDecay(8, keep_sink=True),))
    other = loud(spec)
    for part in other.modules():
        if isinstance(part, WindowDecayPart):
            monkeypatch.setattr(part, "bias", lambda tokens, visible: None)
    own = loud()
    with streaming(own, Cache(8, 1, renumbered=False)):
        found = losses(own, windows)
    torch.testing.assert_close(found, losses(other, windows), rtol=1e-5, atol=1e-5)
    with streaming(own, Cache(8, renumbered=False)):
        assert not torch.allclose(losses(own, windows), found, atol=1e-3)


def test_a_large_cache_is_full_attention_and_none_stays_behind() -> None:
    model, windows = loud(LEARNED), some()
    full = losses(model, windows)
    for cache in (None, Cache(40), Cache(38, 2)):
        with streaming(model, cache):
            torch.testing.assert_close(losses(model, windows), full, rtol=1e-5, atol=1e-5)
    with pytest.raises(RuntimeError), streaming(model, Cache(4)):
        raise RuntimeError
    assert torch.equal(losses(model, windows), full)


def test_positions_in_a_cache_are_those_of_a_text_that_holds_only_what_it_keeps() -> None:
    """One layer, so that a key does not depend on what was seen before: the last query's cache is a text of its own."""
    model = loud()
    model.blocks = model.blocks[:1]
    ids = some(length=40, count=2)[:, :-1]
    with torch.no_grad(), streaming(model, Cache(8, 3)):
        found = model.run(ids)[:, -1]
    kept = torch.cat([ids[:, :3], ids[:, -8:]], 1)
    with torch.no_grad():
        torch.testing.assert_close(found, model.run(kept)[:, -1], rtol=1e-4, atol=1e-5)
        with streaming(model, Cache(8, 3, renumbered=False)):
            assert not torch.allclose(model.run(ids)[:, -1], found, atol=1e-3)


def test_each_step_of_each_variant_has_a_time() -> None:
    found = step_times((SOFTMAX, SOFTMAX1), text(), SHORT, 0)
    assert [len(times) for times in found] == [6, 6]
    assert all(time > 0 for times in found for time in times)
