"""`quantsink lab`: the whole laboratory, small, and what a user can get wrong."""

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
from quantsink.eval.lab.output import FACTS, TABLES, is_laboratory


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["lab", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.real
def test_the_whole_laboratory_in_small(smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every experiment; `--json` alone on stdout; every table and picture. A wide limit: 70 to 90 s are usual."""
    target = tmp_path / "laboratory"
    started = time.monotonic()
    code, out, err = run(capsys, "all", smollm2, "-o", target, "--quick", "--json")
    seconds = time.monotonic() - started
    assert code == 0, err
    facts = json.loads(out)
    assert [e["experiment"] for e in facts["experiments"]] == ["profile", "trigger", "language", "vision"]
    assert seconds < 240
    assert sum(e["seconds"] for e in facts["experiments"]) == pytest.approx(seconds, rel=0.3)
    assert json.loads((target / FACTS).read_text())["experiments"] == facts["experiments"]
    tables = (target / TABLES).read_text()
    pictures = sorted(path.name for path in target.glob("*.png"))
    assert len(pictures) >= 6
    assert all(f"]({name})" in tables for name in pictures)
    assert all(path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" for path in target.glob("*.png"))
    assert not re.search(r"\| (nan|inf)\b", tables)
    assert is_laboratory(target)
    assert {path.name for path in tmp_path.iterdir()} == {"laboratory"}, "nothing unfinished is left"

    runs = {(r["name"], r["layers"], r["own"]): r for r in facts["experiments"][1]["runs"]}
    assert runs["softmax", 1, True]["heads"][0]["bos"] > 0.95
    assert runs["relu", 1, True]["heads"][0]["bos"] < 0.05
    check_second_run(target, capsys)


def check_second_run(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A taken output is refused before any work; with --force only where nothing else lies in it."""
    code, out, err = run(capsys, "trigger", "-o", target, "--quick")
    assert (code, out) == (2, "")
    assert "is not empty" in err
    (target / "mine.txt").write_text("mine")
    code, _, err = run(capsys, "trigger", "-o", target, "--quick", "--force")
    assert code == 2
    assert "holds more than quantsink wrote there" in err
    assert (target / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["profile", "-o", "{tmp}/o"], "Missing argument 'MODEL"),
        (["profile", "{tmp}/none.gguf", "-o", "{tmp}/o"], "none.gguf: no such .gguf file"),
        (["all", "some/model", "other/model", "-o", "{tmp}/o"], "two MODELs are called model"),
        (["profile", "some/model", "--data", "self", "-o", "{tmp}/o"], "--data self"),
        (["profile", "some/model", "--data", "builtin:verse", "-o", "{tmp}/o"], "no such built-in text"),
        (["trigger", "-o", "{tmp}/o", "--seeds", "0"], "--seeds"),
        (["trigger", "-o", "{tmp}/o", "--workers", "0"], "--workers"),
        (["trigger"], "--output"),
        (["trigge", "-o", "{tmp}/o"], "trigge"),
    ],
)
def test_what_cannot_be_meant_is_one_line(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *(argument.format(tmp=tmp_path) for argument in arguments))
    assert code in (1, 2)
    assert out == ""
    assert len(err.strip().splitlines()) == 1, err
    assert says in err
    assert not (tmp_path / "o").exists()


def test_ctrl_c_stops_all_of_it_at_once(tmp_path: Path) -> None:
    """Workers in the middle of a training too; one line, and nothing left behind."""
    command = [sys.executable, "-m", "quantsink", "lab", "trigger", "-o", str(tmp_path / "o"), "--workers", "2"]
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # CI may start us without one
    )
    deadline = time.monotonic() + 120
    workers: list[psutil.Process] = []
    while time.monotonic() < deadline and not (len(workers) == 2 and min(map(spent, workers)) > 8):
        workers = [p for p in psutil.Process(child.pid).children() if "spawn_main" in " ".join(p.cmdline())]
        time.sleep(0.2)
    assert len(workers) == 2
    stopped = time.monotonic()
    os.killpg(child.pid, signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert time.monotonic() - stopped < 20
    assert (child.returncode, out) == (130, "")
    assert err.strip().splitlines()[-1].startswith("quantsink: stopped")
    assert "Traceback" not in err
    assert not any(worker.is_running() for worker in workers)
    assert list(tmp_path.iterdir()) == []


def spent(process: psutil.Process) -> float:
    """Processor seconds; importing takes a few of them."""
    return float(sum(process.cpu_times()[:2]))


@pytest.mark.parametrize("command", ["vision", "all"])
def test_without_scikit_learn_the_extra_is_named(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec

    def without(name: str, *rest: Any) -> Any:
        return None if name == "sklearn" else found(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    code, _, err = run(capsys, command, "-o", tmp_path / "o", "--quick")
    assert code == 2
    assert "pip install 'quantsink[lab]'" in err


def test_help_names_every_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert all(name in out for name in ("trigger", "language", "vision", "profile", "all"))
