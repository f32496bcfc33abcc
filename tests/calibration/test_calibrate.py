"""Calibrations on disk: complete or resumable, bit for bit, and refused where they do not belong."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantsink.calibration import Calibration, calibrate
from quantsink.calibration import calibrate as calibrate_function
from quantsink.calibration.calibrate import PARTIAL
from quantsink.calibration.calibration import FACTS, TENSORS
from quantsink.errors import CalibrationError, DataError, ModelError, UsageError

OPTIONS = {"seq_len": 64, "max_tokens": 1024}


def same(first, second):
    a, b = first.tensors(), second.tensors()
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_round_trip(tiny_llama, tokenizer, tmp_path):
    calibration = calibrate(tiny_llama(), tokenizer, ["builtin:prose", "builtin:code"], **OPTIONS)
    calibration.save(tmp_path)
    again = Calibration.load(tmp_path)
    assert same(calibration, again)
    assert again.heads() == calibration.heads()
    assert (again.settings, again.domains, again.layers) == (
        calibration.settings,
        calibration.domains,
        calibration.layers,
    )
    facts = json.loads((tmp_path / FACTS).read_text())
    assert len(facts["heads"]) == 8
    assert {"layer", "head", "kv_head", "bos_mass", "sink_mass", "entropy", "sink", "route"} <= facts["heads"][0].keys()


def test_counts_are_true(tiny_llama, tokenizer, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("x" * 630)
    found = calibrate(tiny_llama(), tokenizer, str(text), seq_len=64, max_tokens=10_000).domains[0]
    assert (found.tokens, found.windows, found.complete) == (640, 10, True)


def test_without_a_bos_the_output_says_so(tiny_llama, tokenizer):
    assert calibrate(tiny_llama(), tokenizer, "builtin:prose", bos=False, **OPTIONS).bos is None


def test_self_text(tiny_llama, tokenizer):
    runs = [calibrate(tiny_llama(), tokenizer, "self", seed=seed, **OPTIONS) for seed in (3, 3, 4)]
    assert same(runs[0], runs[1])
    assert runs[0].domains[0].fingerprint != runs[2].domains[0].fingerprint


CHILD = """
import importlib, sys, torch
sys.path.insert(0, sys.argv[1])
from transformers import AutoModelForCausalLM, AutoTokenizer
run = importlib.import_module("quantsink.calibration.calibrate")
run.SAVE_EVERY = 0.0
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(sys.argv[2])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
def progress(name, done, total):
    print(name, done, flush=True)
    if sys.argv[4] == "slow":
        import time; time.sleep(0.05)
found = run.calibrate(model, tokenizer, ["builtin:prose", "builtin:code"], seq_len=64, max_tokens=2048,
                      folder=sys.argv[3], resume=True, progress=progress)
found.save(sys.argv[3])
"""


def child(model_folder, out, pace="fast"):
    command = [sys.executable, "-c", CHILD, str(out), str(model_folder), str(out), pace]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("after", ["builtin:prose 5", "builtin:code 3"])
def test_killed_and_resumed_is_bit_identical(after, tiny_llama, tokenizer, tmp_path):
    tiny_llama().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = child(tmp_path / "model", tmp_path / "whole")
    assert whole.wait() == 0
    killed = child(tmp_path / "model", tmp_path / "killed", "slow")
    for line in killed.stdout:
        if line.strip() == after:
            os.kill(killed.pid, signal.SIGKILL)
            break
    assert killed.wait() == -signal.SIGKILL
    assert (tmp_path / "killed" / PARTIAL).is_file()
    assert not (tmp_path / "killed" / FACTS).exists()
    resumed = child(tmp_path / "model", tmp_path / "killed")
    first = resumed.stdout.readline()
    resumed.stdout.read()
    assert resumed.wait() == 0
    assert first.strip() != "builtin:prose 1", "it began again"
    files = [(tmp_path / name / TENSORS).read_bytes() for name in ("whole", "killed")]
    assert files[0] == files[1]


class Stop(Exception):
    pass


def interrupted(model, tokenizer, folder, monkeypatch, **changes):
    module = sys.modules[calibrate_function.__module__]
    monkeypatch.setattr(module, "SAVE_EVERY", 0.0)

    def progress(name, done, total):
        if done == 3:
            raise Stop

    with pytest.raises(Stop):
        calibrate(model, tokenizer, "builtin:prose", folder=folder, progress=progress, **{**OPTIONS, **changes})


@pytest.mark.parametrize(
    ("changed", "said"),
    [({"seq_len": 32}, "settings"), ({"sink_size": 2}, "settings"), ({"data": "builtin:code"}, "data")],
)
def test_resume_refuses_changed_settings(changed, said, tiny_llama, tokenizer, tmp_path, monkeypatch):
    interrupted(tiny_llama(), tokenizer, tmp_path, monkeypatch)
    options = {"data": "builtin:prose", **OPTIONS, **changed}
    with pytest.raises(CalibrationError, match=f"another {said}"):
        calibrate(tiny_llama(), tokenizer, folder=tmp_path, resume=True, **options)


def test_resume_refuses_another_model_and_damage(tiny_llama, tokenizer, tmp_path, monkeypatch):
    interrupted(tiny_llama(), tokenizer, tmp_path, monkeypatch)
    with pytest.raises(CalibrationError, match="another model"):
        calibrate(tiny_llama(seed=1), tokenizer, "builtin:prose", folder=tmp_path, resume=True, **OPTIONS)
    path = tmp_path / PARTIAL
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(CalibrationError, match="damaged"):
        calibrate(tiny_llama(), tokenizer, "builtin:prose", folder=tmp_path, resume=True, **OPTIONS)


def test_saving_ends_what_was_unfinished(tiny_llama, tokenizer, tmp_path, monkeypatch):
    interrupted(tiny_llama(), tokenizer, tmp_path, monkeypatch)
    done = calibrate(tiny_llama(), tokenizer, "builtin:prose", folder=tmp_path, resume=True, **OPTIONS)
    done.save(tmp_path)
    assert not (tmp_path / PARTIAL).exists()
    assert same(Calibration.load(tmp_path), done)


def test_resuming_what_is_finished_returns_it(tiny_llama, tokenizer, tmp_path):
    done = calibrate(tiny_llama(), tokenizer, "builtin:prose", **OPTIONS)
    done.save(tmp_path)
    ran = []
    again = calibrate(
        tiny_llama(),
        tokenizer,
        "builtin:prose",
        folder=tmp_path,
        resume=True,
        progress=lambda *step: ran.append(step),
        **OPTIONS,
    )
    assert same(done, again)
    assert ran == []
    with pytest.raises(CalibrationError, match="another settings"):
        calibrate(tiny_llama(), tokenizer, "builtin:prose", folder=tmp_path, resume=True, seq_len=32, max_tokens=1024)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sink_size": 0}, "--sink-size 0"),
        ({"sink_size": 64}, "--sink-size 64"),
        ({"query_rows": 0}, "--query-rows 0"),
        ({"max_tokens": 10}, "--max-tokens 10"),
        ({"data": ["builtin:prose", "builtin:prose"]}, "two texts are called builtin:prose"),
        ({"data": []}, "no text"),
    ],
)
def test_bad_options(options, said, tiny_llama, tokenizer):
    with pytest.raises(UsageError, match=said):
        calibrate(tiny_llama(), tokenizer, **{"data": "builtin:prose", **OPTIONS, **options})


def test_text_too_short_for_any_query(tiny_llama, tokenizer, tmp_path):
    (tmp_path / "short.txt").write_text("hello")
    with pytest.raises(DataError, match="longer than 16 tokens"):
        calibrate(tiny_llama(), tokenizer, str(tmp_path / "short.txt"), **OPTIONS)


def test_a_quantized_model_is_refused(tiny_llama, tokenizer):
    model = tiny_llama()
    model.quantization_method = "bitsandbytes"
    with pytest.raises(ModelError, match="already quantized"):
        calibrate(model, tokenizer, "builtin:prose", **OPTIONS)


def damage_facts(folder, change):
    facts = json.loads((folder / FACTS).read_text())
    change(facts)
    (folder / FACTS).write_text(json.dumps(facts))


def damage_tensors(folder, change):
    tensors = load_file(folder / TENSORS)
    change(tensors)
    save_file(tensors, folder / TENSORS)


KEY = "builtin:prose/heads/model.layers.0.self_attn/bos_mass"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: (f / FACTS).unlink(), "no calibration.json"),
        (lambda f: (f / FACTS).write_text("{"), "cannot be read"),
        (lambda f: (f / TENSORS).write_bytes(b"x" * 20), "cannot be read"),
        (lambda f: damage_facts(f, lambda d: d.update(schema=9)), "schema 9"),
        (lambda f: damage_facts(f, lambda d: d.pop("layers")), "layers"),
        (lambda f: damage_facts(f, lambda d: d["layers"].pop()), "does not belong"),
        (lambda f: damage_facts(f, lambda d: d["settings"].update(extra=1)), "extra"),
        (lambda f: damage_tensors(f, lambda t: t.pop(KEY)), f"{KEY} is missing"),
        (lambda f: damage_tensors(f, lambda t: t.update({KEY: t[KEY] * torch.nan})), "NaN"),
        (lambda f: damage_tensors(f, lambda t: t.update({KEY: t[KEY][:1].clone()})), r"float64 \[1\]"),
        (lambda f: damage_tensors(f, lambda t: t.update(extra=torch.zeros(1))), "extra does not belong"),
    ],
)
def test_damage_is_named(damage, said, tiny_llama, tokenizer, tmp_path):
    calibrate(tiny_llama(), tokenizer, "builtin:prose", **OPTIONS).save(tmp_path)
    damage(tmp_path)
    with pytest.raises(CalibrationError, match=said):
        Calibration.load(tmp_path)


def test_memory_does_not_grow_with_the_square_of_the_length(tiny_llama, tokenizer):
    """Bytes that the statistics allocate at once, by the allocator's own count."""
    from quantsink.calibration.collect import Collector, collecting
    from quantsink.models.architecture import Architecture

    model = tiny_llama(max_position_embeddings=8192)
    peaks = {}
    for length in (512, 8192):
        collector = Collector(model, Architecture.of(model), sink_size=1)
        tokens = torch.randint(2, 258, (1, length))
        with (
            collecting(collector),
            torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile,
        ):
            collector.run(tokens)
        peaks[length] = max(event.cpu_memory_usage for event in profile.events())
    assert peaks[8192] < 32 * peaks[512], "16 x the length; 256 x would be the square"
