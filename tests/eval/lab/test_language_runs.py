"""The language experiments: their claims, and a small run of all of them."""

import dataclasses
import json
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from quantsink.eval.lab.attention import AttentionSpec
from quantsink.eval.lab.language import (
    Cache,
    model_for,
    text,
)
from quantsink.eval.lab.language_runs import (
    LEARNED,
    PAIRS,
    SOFTMAX,
    VARIANTS,
    Claim,
    LanguageResult,
    Scale,
    claims,
    fine_tuned,
    run_language,
)
from quantsink.eval.lab.model import TokenModel
from quantsink.eval.lab.seeds import Spread

TINY = Scale(
    seeds=1, steps=6, scored=1024, looked=2, quantized=1, streamed=1, tuned=2, batches=2, looks=2, cost_steps=10
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def result() -> LanguageResult:
    return run_language(TINY, workers=1)


def loud(spec: AttentionSpec = SOFTMAX, seed: int = 0) -> TokenModel:
    """Untrained, its scores large enough that it matters which keys are seen."""
    model = model_for(spec, seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                weight.mul_(4)
    model.train(False)
    return model


def weights_of(model: TokenModel) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_fine_tuning_starts_from_the_trained_weights_and_leaves_them() -> None:
    model = loud()
    before = weights_of(model).clone()
    started = fine_tuned(model, LEARNED, Cache(8), text(), 1, 0)
    assert torch.equal(weights_of(model), before)
    assert any(name.endswith("mechanisms.0.key") for name, _ in started.named_parameters())
    assert float((started.embed.weight - model.embed.weight).detach().abs().max()) < 5e-3


def claim(bound: float | None, *changes: float) -> Claim:
    return Claim("", "", bound, Spread.of([1]), Spread.of([1]), changes)


@pytest.mark.parametrize(
    ("bound", "changes", "verdict"),
    [
        (-0.15, [-0.2, -0.2, -0.2, -0.1, -0.1], "reproduced"),
        (-0.15, [-0.1, -0.1, -0.1, -0.1, -0.1], "not reproduced"),
        (-0.15, [0.1, -0.9, -0.9, -0.9, -0.9], "undecided"),
        (-0.15, [-0.2, -0.1, -0.1, -0.1, -0.1], "undecided"),
        (0.05, [0.04, -0.01, 0.05, 0.0, 0.01], "reproduced"),
        (0.05, [0.06, 0.07, 0.08, 0.09, 0.1], "not reproduced"),
        (0.05, [0.04, 0.04, 0.04, 0.04, 0.06], "undecided"),
        (-0.15, [-0.2] * (PAIRS - 1), "undecided"),
        (-0.15, [-0.2] * PAIRS + [math.nan], "undecided"),
        (None, [-0.2] * PAIRS, None),
    ],
)
def test_the_rule_of_the_verdict(bound: float | None, changes: list[float], verdict: str | None) -> None:
    assert claim(bound, *changes).verdict == verdict


def test_a_quick_run_has_every_figure_and_goes_to_json(result: LanguageResult) -> None:
    assert [run.name for run in result.runs] == [spec.name for spec in VARIANTS]
    for run in result.runs:
        assert [at.length for at in run.lengths] == [128, 512]
        assert [at.scored for at in run.lengths] == [1024, 1024]
        assert len(run.noise) == (2 if run.name in ("softmax", "softmax1") else 0)
        assert len(run.eight_bits) == 5
        assert len(run.streaming) == (6 if run.name == "softmax" else 0)
        assert all(math.isfinite(found.kl) for found in run.eight_bits)
    for curve in result.of("softmax")[0].streaming:
        assert len(curve.buckets) == 16
        logs = [math.log(bucket.perplexity) for bucket in curve.buckets[2:]]
        assert math.log(curve.beyond) == pytest.approx(math.fsum(logs) / len(logs))
    again = json.loads(json.dumps(dataclasses.asdict(result)))
    assert again["runs"][0]["lengths"][0]["perplexity"] == result.runs[0].perplexity(128)


def test_claims_pair_seeds(result: LanguageResult) -> None:
    found = claims(result)
    softmax, softmax1 = result.of("softmax")[0], result.of("softmax1")[0]
    assert found[1].changes == pytest.approx([softmax1.perplexity(512) / softmax.perplexity(512) - 1])
    assert found[-1].changes == result.cost.overhead
    assert len(found[-1].changes) == 5
    assert {one.verdict for one in found[:-1]} == {None, "undecided"}
