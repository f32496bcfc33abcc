"""`quantsink lab`: the whole laboratory in small, and what a user can get wrong."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from quantsink.cli.main import main
from quantsink.eval.lab import experiments
from quantsink.eval.lab.output import FACTS, TABLES, Finding, is_laboratory
from quantsink.eval.lab.tables import Table


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["lab", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def small_trigger(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the trigger experiment, one that is done at once."""
    table = Table("Idle weight", ("variant", "weight"), (("softmax", "0.99"),), ("one seed",))
    finding = Finding("trigger", "The trigger task", {"runs": [1]}, (table,), {"bos.png": b"\x89PNG"}, 1.5)
    monkeypatch.setattr(experiments, "trigger", lambda *_: finding)


@pytest.mark.usefixtures("small_trigger")
def test_an_experiment_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "trigger"
    code, out, err = run(capsys, "trigger", "-o", target)
    assert code == 0, err
    assert all(text in out for text in ("The trigger task", "Idle weight", "0.99", "one seed"))
    assert str(target) in err.replace("\n", "")
    assert sorted(path.name for path in target.iterdir()) == ["bos.png", FACTS, TABLES]
    assert "![The trigger task](bos.png)" in (target / TABLES).read_text()
    assert is_laboratory(target)
    assert {path.name for path in tmp_path.iterdir()} == {"trigger"}, "nothing unfinished is left"


@pytest.mark.usefixtures("small_trigger")
def test_json_is_alone_on_stdout_and_what_the_folder_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "trigger", "-o", tmp_path / "trigger", "--json")
    assert code == 0
    facts = json.loads(out)
    assert facts["written"] == str(tmp_path / "trigger")
    assert facts["experiments"][0]["runs"] == [1]
    assert json.loads((tmp_path / "trigger" / FACTS).read_text())["experiments"] == facts["experiments"]


@pytest.mark.usefixtures("small_trigger")
def test_an_output_folder_is_replaced_only_with_force_and_only_if_nothing_else_lies_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "trigger"
    assert run(capsys, "trigger", "-o", target)[0] == 0
    code, out, err = run(capsys, "trigger", "-o", target)
    assert (code, out) == (2, "")
    assert "is not empty" in err
    assert run(capsys, "trigger", "-o", target, "--force")[0] == 0
    (target / "notes.txt").write_text("mine")
    code, _, err = run(capsys, "trigger", "-o", target, "--force")
    assert code == 2
    assert "holds files that quantsink did not write" in err
    assert (target / "notes.txt").read_text() == "mine"


@pytest.mark.real
@pytest.mark.slow
def test_the_whole_laboratory_in_small(smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every experiment, with every table and picture."""
    target = tmp_path / "laboratory"
    code, out, err = run(capsys, "all", smollm2, "-o", target, "--quick", "--json")
    assert code == 0, err
    facts = json.loads(out)
    assert [e["experiment"] for e in facts["experiments"]] == ["profile", "trigger", "language", "vision"]
    assert json.loads((target / FACTS).read_text())["experiments"] == facts["experiments"]
    tables = (target / TABLES).read_text()
    pictures = sorted(path.name for path in target.glob("*.png"))
    assert len(pictures) >= 6
    assert all(f"]({name})" in tables for name in pictures)
    assert all(path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" for path in target.glob("*.png"))
    assert not re.search(r"\| (nan|inf)\b", tables)
    assert is_laboratory(target)

    runs = {(r["name"], r["layers"], r["own"]): r for r in facts["experiments"][1]["runs"]}
    assert runs["softmax", 1, True]["heads"][0]["bos"] > 0.95
    assert runs["relu", 1, True]["heads"][0]["bos"] < 0.05


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["profile", "-o", "{tmp}/o"], "Missing argument 'MODEL"),
        (["profile", "{tmp}/none.gguf", "-o", "{tmp}/o"], "none.gguf: no such .gguf file"),
        (["all", "some/model", "other/model", "-o", "{tmp}/o"], "two models are called model"),
        (["profile", "some/model", "--data", "self", "-o", "{tmp}/o"], "--data self"),
        (["profile", "some/model", "--data", "builtin:verse", "-o", "{tmp}/o"], "no such built-in text"),
        (["trigger", "-o", "{tmp}/o", "--seeds", "0"], "--seeds"),
        (["trigger", "-o", "{tmp}/o", "--workers", "0"], "--workers"),
        (["trigger"], "--output"),
        (["trigge", "-o", "{tmp}/o"], "trigge"),
    ],
)
def test_a_wrong_command_line_is_refused_in_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *(argument.format(tmp=tmp_path) for argument in arguments))
    assert code in (1, 2)
    assert out == ""
    assert len(err.strip().splitlines()) == 1, err
    assert message in err
    assert not (tmp_path / "o").exists()


@pytest.mark.slow
def test_ctrl_c_stops_the_trainings_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """Workers in the middle of a training too."""
    command = [sys.executable, "-m", "quantsink", "lab", "trigger", "-o", str(tmp_path / "o"), "--workers", "2"]
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # CI may start us without one
    )
    workers: list[psutil.Process] = []
    while child.poll() is None and not (len(workers) == 2 and min(map(processor_seconds, workers)) > 8):
        workers = [p for p in psutil.Process(child.pid).children() if "spawn_main" in " ".join(p.cmdline())]
        time.sleep(0.2)
    os.killpg(child.pid, signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out) == (130, "")
    assert err.strip().splitlines()[-1].startswith("quantsink: stopped")
    assert "Traceback" not in err
    assert len(workers) == 2
    assert not any(worker.is_running() for worker in workers)
    assert list(tmp_path.iterdir()) == []


def processor_seconds(process: psutil.Process) -> float:
    """Imports take a few of them, so after some more a training runs."""
    return float(sum(process.cpu_times()[:2]))


@pytest.mark.parametrize("command", ["vision", "all"])
def test_without_scikit_learn_the_extra_is_named(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec

    def without(name: str, *rest: Any) -> Any:
        return None if name == "sklearn" else find_spec(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    code, _, err = run(capsys, command, "-o", tmp_path / "o", "--quick")
    assert code == 2
    assert "pip install 'quantsink[lab]'" in err


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_without_a_command_the_help_names_every_experiment(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, err) == (0, "")
    assert all(name in out for name in ("trigger", "language", "vision", "profile", "all"))
