"""A calibration that was killed resumes to the same bits, and refuses to resume with other inputs."""

import os
import signal
import subprocess
import sys

import pytest

from quantsink.calibration import Calibration, calibrate, partial
from quantsink.calibration.stored import FACTS, PARTIAL, TENSORS
from quantsink.errors import CalibrationError

OPTIONS = {"seq_len": 64, "max_tokens": 1024}


CHILD = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from transformers import AutoModelForCausalLM, AutoTokenizer
from quantsink.calibration import calibrate, partial
partial.SAVE_EVERY = 0.0
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(sys.argv[2])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
def progress(name, done, total):
    print(name, done, flush=True)
    if sys.argv[4] == "slow":
        import time; time.sleep(0.05)
calibration = calibrate(model, tokenizer, ["builtin:prose", "builtin:code"], seq_len=64, max_tokens=2048,
                        folder=sys.argv[3], resume=True, progress=progress)
calibration.save(sys.argv[3])
"""


def child(model_folder, out, pace="fast"):
    command = [sys.executable, "-c", CHILD, str(out), str(model_folder), str(out), pace]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("after", ["builtin:prose 5", pytest.param("builtin:code 3", marks=pytest.mark.slow)])
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
    monkeypatch.setattr(partial, "SAVE_EVERY", 0.0)

    def progress(name, done, total):
        if done == 3:
            raise Stop

    with pytest.raises(Stop):
        calibrate(model, tokenizer, "builtin:prose", folder=folder, progress=progress, **{**OPTIONS, **changes})


@pytest.mark.parametrize(
    ("changed", "named"),
    [({"seq_len": 32}, "settings"), ({"sink_size": 2}, "settings"), ({"data": "builtin:code"}, "data")],
)
def test_resume_refuses_changed_settings(changed, named, tiny_llama, tokenizer, tmp_path, monkeypatch):
    interrupted(tiny_llama(), tokenizer, tmp_path, monkeypatch)
    options = {"data": "builtin:prose", **OPTIONS, **changed}
    with pytest.raises(CalibrationError, match=f"another {named}"):
        calibrate(tiny_llama(), tokenizer, folder=tmp_path, resume=True, **options)


def test_resume_refuses_another_model_and_damage(tiny_llama, tokenizer, tmp_path, monkeypatch):
    interrupted(tiny_llama(), tokenizer, tmp_path, monkeypatch)
    with pytest.raises(CalibrationError, match="another model"):
        calibrate(tiny_llama(seed=1), tokenizer, "builtin:prose", folder=tmp_path, resume=True, **OPTIONS)
    path = tmp_path / PARTIAL
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(CalibrationError, match="damaged"):
        calibrate(tiny_llama(), tokenizer, "builtin:prose", folder=tmp_path, resume=True, **OPTIONS)


def test_saving_removes_the_partial_state(tiny_llama, tokenizer, tmp_path, monkeypatch, same_tensors):
    interrupted(tiny_llama(), tokenizer, tmp_path, monkeypatch)
    done = calibrate(tiny_llama(), tokenizer, "builtin:prose", folder=tmp_path, resume=True, **OPTIONS)
    done.save(tmp_path)
    assert not (tmp_path / PARTIAL).exists()
    assert same_tensors(Calibration.load(tmp_path), done)


def test_resuming_a_finished_calibration_returns_it(tiny_llama, tokenizer, tmp_path, same_tensors):
    done = calibrate(tiny_llama(), tokenizer, "builtin:prose", **OPTIONS)
    done.save(tmp_path)
    steps = []
    again = calibrate(
        tiny_llama(),
        tokenizer,
        "builtin:prose",
        folder=tmp_path,
        resume=True,
        progress=lambda *step: steps.append(step),
        **OPTIONS,
    )
    assert same_tensors(done, again)
    assert steps == []
    with pytest.raises(CalibrationError, match="another settings"):
        calibrate(tiny_llama(), tokenizer, "builtin:prose", folder=tmp_path, resume=True, seq_len=32, max_tokens=1024)
