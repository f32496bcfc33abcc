"""Several processes give the tables of one; a failure in one ends all and is reported once; offloaded models work."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import quantsink
from quantsink.calibration import Calibration, calibrate
from quantsink.calibration.processes import Processes
from quantsink.calibration.statistics import MAXIMA
from quantsink.calibration.stored import PARTIAL, is_calibration
from quantsink.cli.main import main
from quantsink.errors import CalibrationError, ModelError

OPTIONS = ["--data", "builtin:prose", "--data", "builtin:code", "--seq-len", "160", "--max-tokens", "3840"]
COUNTS = {"rows", "windows", "key_count", "query_rows", "error_rows", "kv_rows", "far_rows", "gap_count"}
OTHER = "partial-1-of-2.safetensors"
TORCHRUN = ["torch.distributed.run", "--nproc-per-node", "2", "--standalone"]

FAILING = """
import os, sys
from quantsink.calibration import partial
from quantsink.calibration.collect import Collector
from quantsink.cli.main import main
from quantsink.errors import ModelError
partial.SAVE_EVERY = 0.0
rank, run = int(os.environ["RANK"]), Collector.run
def failing(self, ids):
    if rank == 1 and self.windows == 3:
        raise ModelError("layer 0: broken on purpose")
    run(self, ids)
    if rank == 0 and self.windows == 5:
        import time; time.sleep(60)
Collector.run = failing
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def folder(tiny_llama, tokenizer, tmp_path):
    tiny_llama().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path


def launch(launcher, *command):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, "-m", *launcher, *map(str, command)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def quantsink_lines(done):
    return [line for line in done.stderr.splitlines() if line.startswith("quantsink:")]


def check_same_tables(one: Path, several: Path) -> None:
    first, second = (Calibration.load(path) for path in (one, several))
    assert (first.domains, first.settings, first.fingerprint) == (second.domains, second.settings, second.fingerprint)
    a, b = first.tensors(), second.tensors()
    assert a.keys() == b.keys()
    for key, value in a.items():
        exact = (
            {"rtol": 0, "atol": 0} if key.rpartition("/")[2] in COUNTS | set(MAXIMA) else {"rtol": 1e-6, "atol": 1e-9}
        )
        torch.testing.assert_close(b[key], value, msg=lambda text, key=key: f"{key}: {text}", **exact)
    assert any(value.any() for key, value in a.items() if key.endswith("/kv_error")), "no error was measured"


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_two_processes_give_the_tables_of_one(folder):
    assert main(["calibrate", str(folder / "model"), "-o", str(folder / "one"), *OPTIONS]) == 0
    launcher = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]
    command = ["calibrate", folder / "model", "-o", folder / "two", *OPTIONS, "--json"]
    done = launch(launcher, "-m", "quantsink", *command)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["calibration"] == str(folder / "two")
    assert done.stderr.count("loading ") == 1
    assert {path.name for path in (folder / "two").glob("*.*")} == {path.name for path in (folder / "one").glob("*.*")}
    check_same_tables(folder / "one", folder / "two")


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_failure_ends_all_and_is_resumed(folder, capfd):
    (folder / "failing.py").write_text(FAILING)
    command = ["calibrate", folder / "model", "-o", folder / "out", *OPTIONS]
    done = launch(TORCHRUN, folder / "failing.py", *command)
    assert done.returncode != 0
    assert quantsink_lines(done) == ["quantsink: layer 0: broken on purpose"]
    assert done.stdout == ""
    assert {path.name for path in (folder / "out").iterdir()} == {PARTIAL, OTHER}
    assert is_calibration(folder / "out")

    assert main([*map(str, command), "--resume"]) == 1
    assert "begun with another number of processes" in capfd.readouterr().err

    done = launch(TORCHRUN, "-m", "quantsink", *command, "--resume")
    assert done.returncode == 0, done.stderr
    assert not {PARTIAL, OTHER} & {path.name for path in (folder / "out").iterdir()}
    assert main(["calibrate", str(folder / "model"), "-o", str(folder / "one"), *OPTIONS]) == 0
    check_same_tables(folder / "one", folder / "out")


def test_a_failure_in_all_processes_is_reported_once(folder):
    (folder / "model" / "model.safetensors").write_bytes(b"nothing")
    done = launch(TORCHRUN, "-m", "quantsink", "calibrate", folder / "model", "-o", folder / "out", *OPTIONS)
    assert done.returncode != 0
    (line,) = quantsink_lines(done)
    assert "cannot be loaded" in line
    assert not (folder / "out").exists()


def test_processes_with_different_files_are_refused(monkeypatch):
    def gather(everyone, facts):
        everyone[:] = [facts, {**facts, "tokenizer": "b"}]

    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    with pytest.raises(CalibrationError, match="process 1: another tokenizer than process 0's"):
        Processes(0, 2).check_same({"model": "a", "tokenizer": "a"})


def test_each_process_has_its_own_gpu(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert Processes(11, 16).device("cuda") == "cuda:3"
    assert Processes(11, 16).device("cuda:1") == "cuda:1"
    assert Processes(11, 16).device("cpu") == "cpu"
    assert Processes().device("cuda") == "cuda"


@pytest.fixture
def offloaded(folder):
    def load(changed):
        parts = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head")
        places = dict.fromkeys(parts, "cpu") | changed
        return AutoModelForCausalLM.from_pretrained(
            folder / "model", device_map=places, offload_folder=folder / "offload"
        )

    return load


LAYER = {"model.layers.1": "disk"}
MOST = LAYER | {"model.embed_tokens": "disk", "model.layers.0": "disk", "lm_head": "disk"}
ALL = MOST | {"model.norm": "disk"}


@pytest.mark.parametrize(
    ("places", "data"),
    [(LAYER, "builtin:prose"), (MOST, "self"), (ALL, "builtin:prose")],
    ids=["a layer", "most", "all"],
)
def test_an_offloaded_model_calibrates_to_the_same_bits(places, data, offloaded, tiny_llama, tokenizer, same_tensors):
    options = {"seq_len": 24, "max_tokens": 48}
    whole = calibrate(tiny_llama(), tokenizer, data, **options)
    model = offloaded(places)
    calibration = calibrate(model, tokenizer, data, **options)
    assert calibration.fingerprint == whole.fingerprint
    assert same_tensors(calibration, whole)
    assert model.model.layers[1].mlp.up_proj.weight.is_meta, "the weights stay where they were"


def test_an_offloaded_model_is_not_quantized(offloaded, tiny_llama, tokenizer):
    calibration = calibrate(tiny_llama(), tokenizer, "builtin:prose", seq_len=96, max_tokens=960)
    with pytest.raises(ModelError, match=r"layers.1.self_attn.q_proj: its weights are offloaded"):
        quantsink.quantize(offloaded(LAYER), calibration)


def test_weights_without_data_are_named(tiny_llama, tokenizer):
    model = tiny_llama()
    model.model.layers[1].mlp.up_proj.to("meta")
    with pytest.raises(ModelError, match=r"model.layers.1.mlp.up_proj.weight: on the meta device, without data"):
        calibrate(model, tokenizer, "builtin:prose", seq_len=96, max_tokens=960)
