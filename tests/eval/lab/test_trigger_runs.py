"""The trigger experiments: their jobs, and one of them trained."""

import pytest

from quantsink.eval.lab.attention import AttentionSpec
from quantsink.eval.lab.normalizers import ReLU
from quantsink.eval.lab.trigger import (
    Task,
    Training,
)
from quantsink.eval.lab.trigger_runs import LONG, Job, Scale, jobs, run_one


def test_every_variant_has_every_seed() -> None:
    found = jobs(Scale(seeds=3))
    seeds: dict[tuple[str, int, bool], set[int]] = {}
    for job in found:
        seeds.setdefault((job.spec.name, job.layers, job.task.own), set()).add(job.seed)
    assert len(seeds) == 13
    assert all(each == {0, 1, 2} for each in seeds.values())


@pytest.mark.real
def test_softmax_needs_the_bos_token_and_relu_does_not() -> None:
    """The sign of the whole laboratory, on one seed: the page has five."""
    found = {}
    for spec in (AttentionSpec(), AttentionSpec(ReLU())):
        job = Job(spec, 0, Task(), Training(400), measured=1024)
        run = found[spec.name] = run_one(job)
        assert run.solved.share >= 0.99
    softmax, relu = found["softmax"], found["relu"]
    assert softmax.heads[0].bos >= 0.98
    assert relu.heads[0].bos < 0.01
    assert softmax.strong == (1.0,)
    assert relu.strong == (0.0,)
    assert softmax.errors["sink"] < 0.1 * softmax.errors["block"], f"at {LONG} tokens"
    assert softmax.errors["random"] > 0.9 * softmax.errors["block"], "it is the sink that counts"
    assert relu.errors["sink"] > 0.5 * relu.errors["block"], "nothing to gain without a sink"
    assert relu.calibrated is None


def test_the_same_job_gives_the_same_figures() -> None:
    job = Job(AttentionSpec(), 0, Task(), Training(3), measured=64)
    assert run_one(job) == run_one(job)
