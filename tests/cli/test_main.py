"""The command line: exit codes, one-line errors, clean --json, outputs whole or not at all."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from quantsink.cli.main import main

SMALL = ["--seq-len", "64", "--max-tokens", "512"]


def run(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    out = capsys.readouterr()
    return code, out.out, out.err


def last(text):
    return text.strip().splitlines()[-1]


def test_calibrate_writes_tables_and_pictures(work):
    names = {path.name for path in (work / "calibration").iterdir()}
    assert names == {"calibration.json", "calibration.safetensors", "bos_mass.png", "entropy.png"}


def test_export_writes_a_checkpoint_with_a_card(work):
    names = {path.name for path in (work / "checkpoint").iterdir()}
    assert {"config.json", "model.safetensors", "README.md", "tokenizer.json"} <= names
    card = (work / "checkpoint" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "import quantsink" in card
    assert "| perplexity |" in card


def test_json_is_one_object_and_nothing_else(work, capsys, tmp_path):
    code, out, _ = run(capsys, "calibrate", work / "model", "-o", tmp_path / "c", *SMALL, "--json")
    assert code == 0
    assert json.loads(out)["domains"][0]["name"] == "builtin:prose"
    code, out, _ = run(
        capsys, "export", work / "model", "--calibration", work / "calibration", "-o", tmp_path / "x", "--json"
    )
    assert code == 0
    assert json.loads(out)["payload_bytes"] == (tmp_path / "x" / "model.safetensors").stat().st_size


def test_report(work, capsys, tmp_path):
    code, out, _ = run(
        capsys, "report", work / "model", work / "checkpoint", "-o", tmp_path / "r", "--calibration",
        work / "calibration", "--length", 64, "--max-windows", 2, "--methods", "reference,w8a8", "--json",
    )  # fmt: skip
    assert code == 0
    rows = json.loads(out)["rows"]
    assert len(rows) == 3
    assert {"report.json", "report.html", "kl_vs_bits.png"} <= {path.name for path in (tmp_path / "r").iterdir()}
    in_memory, checkpoint = rows[1], rows[2]
    assert in_memory["kl"] == checkpoint["kl"], "a reloaded checkpoint computes the same bits"


def test_report_of_caches(work, capsys, tmp_path):
    calibrate = [
        "calibrate",
        str(work / "model"),
        "-o",
        str(tmp_path / "c"),
        "--seq-len",
        "200",
        "--max-tokens",
        "1600",
    ]
    assert main(calibrate) == 0
    capsys.readouterr()
    code, out, err = run(
        capsys, "report", work / "model", "-o", tmp_path / "r", "--calibration", tmp_path / "c", "--length", 230,
        "--max-windows", 2, "--kv-bits", "4", "--json",
    )  # fmt: skip
    assert code == 0, err
    result = json.loads(out)
    rows = {row["method"]: row for row in result["rows"]}
    assert list(rows) == ["reference", "kv4", "kv4-no-sinks", "kv4-nearest", "kv4-uniform", "kv4-random", "hqq-kv4"]
    assert (result["conditions"]["context"], result["conditions"]["scored"]) == (128, 2 * 102)
    assert 4 < rows["kv4"]["bits_kv"] < 8
    assert 0 < rows["kv4"]["kv_bytes"] < 230 * 2 * 2 * 2 * 16 * 4
    assert {path.name for path in (tmp_path / "r").iterdir()} == {"report.json", "report.html", "kl_vs_kv_bits.png"}


def rolling(work, target, *more):
    return ["report", work / "model", "-o", target, "--calibration", work / "calibration", "--length", 64, *more]


def test_report_of_a_rolling_cache(work, capsys, tmp_path):
    (tmp_path / "long.txt").write_text("a long text, line by line.\n" * 320)
    code, out, err = run(
        capsys, *rolling(work, tmp_path / "r", "--data", tmp_path / "long.txt", "--rolling", 8192),
        "--rolling-length", 512, "--max-windows", 2, "--json",
    )  # fmt: skip
    assert code == 0, err
    result = json.loads(out)
    assert [row["method"] for row in result["rows"]] == ["reference"]
    assert [(c["method"], c["sinks"], c["max_length"]) for c in result["rolling"]] == [
        ("sinks kept", 4, 512), ("sinks dropped", 0, 512),
    ]  # fmt: skip
    assert [curve["points"][-1]["tokens"] for curve in result["rolling"]] == [8192, 8192]
    assert {path.name for path in (tmp_path / "r").iterdir()} == {"report.json", "report.html", "rolling.png"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rolling", "8192"], "--rolling 8192: short.txt has 500 tokens; give fewer, or a longer text with --data"),
        (["--rolling", "5000"], "--rolling 5000: a multiple of 4096, 8192 or more"),
        (["--rolling-length", "512"], "--rolling-length needs --rolling"),
        (["--rolling", "8192", "--data", "{tmp}/long.txt"], "--rolling-length 2048: the model takes at most 512"),
        (
            ["--rolling", "8192", "--data", "{tmp}/long.txt", "--rolling-length", "300"],
            "--rolling-length 300: at least 387",
        ),
    ],
)
def test_rolling_errors_come_before_any_work(options, message, work, capsys, tmp_path):
    (tmp_path / "short.txt").write_text("x" * 500)
    (tmp_path / "long.txt").write_text("x" * 8192)
    options = [option.format(tmp=tmp_path) for option in options]
    code, out, err = run(capsys, *rolling(work, tmp_path / "r", "--data", tmp_path / "short.txt", *options))
    assert (code, out) == (2, "")
    assert message in last(err)
    assert "reference" not in err
    assert not (tmp_path / "r").exists()


def test_native_heads(work, capsys, tmp_path):
    code, out, _ = run(
        capsys, "export", work / "model", "--calibration", work / "calibration", "-o", tmp_path / "x",
        "--native-heads", 3, "--no-measure", "--json",
    )  # fmt: skip
    assert code == 0
    assert json.loads(out)["heads"]["native"] == 3


def test_recipe_prints_what_export_reads(work, capsys, tmp_path):
    code, out, _ = run(capsys, "recipe", "w8a8-static")
    assert code == 0
    (tmp_path / "mine.json").write_text(out)
    code, again, _ = run(capsys, "recipe", tmp_path / "mine.json")
    assert (code, again) == (0, out)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["calibrate", "{tmp}/none", "-o", "{tmp}/o"], 1, "neither a folder, a .gguf file nor a hub id"),
        (["calibrate", "{tmp}/none.gguf", "-o", "{tmp}/o"], 1, "no such .gguf file"),
        (["calibrate", "{tmp}", "-o", "{tmp}/o"], 1, "has no config.json"),
        (["calibrate", "{work}/model", "-o", "{tmp}/o", "--data", "{tmp}/empty.txt"], 1, "holds no text"),
        (["calibrate", "{tmp}/none", "-o", "{tmp}/o", "--data", "{tmp}/empty.txt"], 1, "holds no text"),
        (["calibrate", "{work}/model", "-o", "{tmp}/o", "--data", "builtin:poems"], 2, "no such built-in text"),
        (["calibrate", "{work}/model", "-o", "{tmp}/full"], 2, "not empty"),
        (["calibrate", "{work}/model", "-o", "{tmp}/empty.txt"], 2, "is a file, not a folder"),
        (["calibrate", "{work}/model", "-o", "{tmp}/o", "--dtype", "int3"], 2, "--dtype int3"),
        (["calibrate", "{work}/model", "-o", "{tmp}/o", "--device", "cuda:9"], 2, "--device cuda:9"),
        (["calibrate", "{work}/checkpoint", "-o", "{tmp}/o"], 1, "already quantized"),
        (["export", "{work}/model", "--calibration", "{tmp}", "-o", "{tmp}/o"], 1, "no calibration.json"),
        (["export", "{work}/model", "--calibration", "{work}/calibration", "-o", "{tmp}/full"], 2, "not empty"),
        (
            ["export", "{work}/model", "--calibration", "{work}/calibration", "-o", "{tmp}/o", "--recipe",
             "{tmp}/r.json"],
            2,
            "unknown key 'wieghts'",
        ),
        (
            ["export", "{work}/model", "--calibration", "{work}/calibration", "-o", "{tmp}/o", "--recipe", "w9"],
            2,
            "neither a preset",
        ),
        (
            ["export", "{tmp}/other", "--calibration", "{work}/calibration", "-o", "{tmp}/o"],
            1,
            "not those of the calibrated",
        ),
        (["export", "{tmp}/broken", "--calibration", "{work}/calibration", "-o", "{tmp}/o"], 1, "cannot be loaded"),
        (["report", "{work}/model", "-o", "{tmp}/o", "--methods", "magic"], 2, "magic"),
        (["report", "{work}/model", "-o", "{tmp}/o", "--length", "700"], 2, "at most 512"),
        (["report", "{work}/model", "-o", "{tmp}/o", "--kv-bits", "5"], 2, "--kv-bits '5'"),
        (["report", "{work}/model", "-o", "{tmp}/o", "--kv-bits", "4,3;2"], 2, "8, 4, 3, 2, separated by commas"),
        (["report", "{work}/model", "-o", "{tmp}/o", "--kv-bits", "4", "--length", "128"], 2, "--length 128"),
        (["calibrate", "{work}/model", "-o", "{tmp}/o", "--seq-len", "5000"], 2, "at most 512"),
        (["calibrate", "{work}/model", "-o", "{tmp}/o", "--seq-len", "12"], 2, "--seq-len 12"),
        (["calibrate", "{work}/model", "-o", "{tmp}/empty.txt/x"], 2, "is not a writable folder"),
        (["calibrate", "{work}/model", "-o", "{tmp}/o", "--seq-len", "abc"], 2, "--seq-len"),
        (["calibrate", "-o", "{tmp}/o"], 2, "MODEL"),
        (
            ["export", "{work}/model", "--calibration", "{work}/calibration", "-o", "{tmp}/o", "--max-shard-size", "x"],
            2,
            "--max-shard-size x",
        ),
        (["inspect", "{tmp}"], 2, "neither a calibration"),
        (["inspect", "{tmp}/damaged"], 1, "damaged"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_with_the_right_code(
    arguments, code, message, work, capsys, tmp_path, tiny_llama, tokenizer
):
    (tmp_path / "empty.txt").write_text("  \n\n ")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    (tmp_path / "r.json").write_text('{"wieghts": "int8"}')
    if "{tmp}/other" in arguments:
        tiny_llama(seed=9).save_pretrained(tmp_path / "other")
        tokenizer.save_pretrained(tmp_path / "other")
    if "{tmp}/broken" in arguments:
        shutil.copytree(work / "model", tmp_path / "broken")
        path = tmp_path / "broken" / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-64])
    if "{tmp}/damaged" in arguments:
        shutil.copytree(work / "checkpoint", tmp_path / "damaged")
        path = tmp_path / "damaged" / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-64])
    before = {path: path.stat().st_size for path in tmp_path.rglob("*")}
    exit_code, out, err = run(capsys, *(argument.format(tmp=tmp_path, work=work) for argument in arguments))
    assert exit_code == code, err
    assert message in last(err)
    assert last(err).startswith("quantsink: ")
    assert "Traceback" not in err
    assert out == ""
    assert {path: path.stat().st_size for path in tmp_path.rglob("*")} == before, "something was left or lost"


def export_to(work, target, *more):
    return ["export", work / "model", "--calibration", work / "calibration", "-o", target, "--no-measure", *more]


def test_force_replaces_a_checkpoint_and_nothing_else(work, capsys, tmp_path):
    shutil.copytree(work / "checkpoint", tmp_path / "old")
    assert run(capsys, *export_to(work, tmp_path / "old", "--force"))[0] == 0
    shutil.copytree(work / "model", tmp_path / "foreign")
    code, _, err = run(capsys, *export_to(work, tmp_path / "foreign", "--force"))
    assert (code, "--force does not replace it" in err) == (2, True)
    assert (tmp_path / "foreign" / "model.safetensors").is_file()


def test_a_model_is_never_exported_onto_itself(work, capsys, tmp_path, monkeypatch):
    code, _, err = run(capsys, *export_to(work, work / "model", "--force"))
    assert (code, "which is read" in err) == (2, True)
    assert run(capsys, *export_to(work, work, "--force"))[0] == 2
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, *export_to(work, "."))
    assert (code, "current folder" in err) == (2, True)


def test_a_link_is_followed(work, capsys, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert run(capsys, *export_to(work, tmp_path / "link"))[0] == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "config.json").is_file()
    assert {path.name for path in tmp_path.iterdir()} == {"real", "link"}


def test_resume_keeps_files_that_quantsink_did_not_write(work, capsys, tmp_path):
    shutil.copytree(work / "calibration", tmp_path / "c")
    before = (tmp_path / "c" / "calibration.safetensors").stat().st_mtime_ns
    arguments = ["calibrate", work / "model", "-o", tmp_path / "c", *SMALL, "--resume"]
    assert run(capsys, *arguments)[0] == 0
    assert (tmp_path / "c" / "calibration.safetensors").stat().st_mtime_ns == before
    (tmp_path / "c" / "mine.txt").write_text("mine")
    code, _, err = run(capsys, *arguments)
    assert (code, "did not write" in err) == (2, True)
    assert (tmp_path / "c" / "mine.txt").read_text() == "mine"


def test_leftovers_of_a_killed_run_are_removed(work, capsys, tmp_path):
    stale = tmp_path / ".out.999999999.abc.part"
    stale.mkdir()
    (stale / "config.json").write_text("{}")
    assert run(capsys, *export_to(work, tmp_path / "out"))[0] == 0
    assert not stale.exists()


def test_wrong_usage_exits_with_2(capsys):
    assert run(capsys, "calibrate")[0] == 2
    assert run(capsys, "bogus")[0] == 2


def test_debug_shows_the_traceback(tmp_path):
    command = [sys.executable, "-m", "quantsink", "inspect", tmp_path, "--debug"]
    child = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert child.returncode != 0
    assert "Traceback" in child.stderr


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a small tmpfs")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("command", ["calibrate", "export"])
def test_a_full_disk_loses_nothing(command, small_disk, work, capsys):
    (small_disk / "mine").write_bytes(os.urandom(4000))
    if command == "calibrate":
        arguments = ["calibrate", work / "model", "-o", small_disk / "o", *SMALL]
    else:
        arguments = ["export", work / "model", "--calibration", work / "calibration", "-o", small_disk / "o"]
    code, out, err = run(capsys, *arguments)
    assert code == 1, err
    assert "cannot be written" in last(err)
    assert "Traceback" not in err
    assert out == ""
    left = [path for path in small_disk.rglob("*") if path.is_file()]
    assert [path.name for path in left] == ["mine"], "nothing half-written"


@pytest.mark.parametrize(
    "command",
    ["--help", "--version", "-h", "export --bogus", "report --length abc", "lab -h", "lab profile", "recipe w8a8"],
)
def test_help_and_refusals_import_no_library_that_computes(command):
    code = (
        "import sys; from quantsink.cli.main import main; main(sys.argv[1:])\n"
        "heavy = {'torch', 'transformers', 'matplotlib', 'numpy', 'accelerate', 'quantsink.calibration'}\n"
        "assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()"
    )
    child = subprocess.run([sys.executable, "-c", code, *command.split()], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr


def test_the_version_is_the_packages(capsys):
    assert run(capsys, "--version") == (0, f"quantsink {importlib.metadata.version('quantsink')}\n", "")


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["--bogus"], "quantsink"),
        (["bogus"], "quantsink"),
        (["calibrate"], "quantsink calibrate"),
        (["export", "--bogus"], "quantsink export"),
        (["report", "m", "-o", "r", "--length", "abc"], "quantsink report"),
        (["lab", "bogus"], "quantsink lab"),
        (["lab", "trigger"], "quantsink lab trigger"),
    ],
)
def test_an_error_points_to_the_help_of_its_own_command(arguments, command, capsys):
    code, out, err = run(capsys, *arguments)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert err.endswith(f" See {command} --help.\n")


@pytest.mark.parametrize(
    ("arguments", "code", "type_", "message"),
    [
        (["export", "--bogus"], 2, "UsageError", "No such option: --bogus"),
        (["inspect", "{tmp}"], 2, "UsageError", "neither a calibration"),
        (["recipe", "w9"], 2, "RecipeError", "neither a preset"),
        (["calibrate", "{tmp}/none", "-o", "{tmp}/o"], 1, "ModelError", "neither a folder"),
    ],
)
def test_with_json_an_error_is_one_object_on_stdout(arguments, code, type_, message, capsys, tmp_path):
    arguments = [argument.format(tmp=tmp_path) for argument in arguments]
    exit_code, out, err = run(capsys, *arguments, "--json")
    error = json.loads(out)["error"]
    assert (exit_code, error["exit_code"], error["type"]) == (code, code, type_)
    assert message in error["message"]
    assert last(err) == f"quantsink: {error['message']}"


def test_with_json_an_unexpected_exception_is_one_object_on_stdout(capsys, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError("first line\nsecond line")

    monkeypatch.setattr("quantsink.recipe.Recipe.load", fail)
    code, out, _ = run(capsys, "recipe", "w8a8", "--json")
    message = "ZeroDivisionError: first line second line; --debug shows the traceback"
    assert code == 1
    assert json.loads(out) == {"error": {"type": "ZeroDivisionError", "message": message, "exit_code": 1}}


def test_with_json_ctrl_c_is_one_object_on_stdout(capsys, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("quantsink.recipe.Recipe.load", stop)
    code, out, _ = run(capsys, "recipe", "w8a8", "--json")
    assert (code, json.loads(out)["error"]["type"]) == (130, "KeyboardInterrupt")


@pytest.mark.parametrize("command", ["export", "report"])
def test_a_calibration_of_another_model_type_is_refused_before_the_model_loads(
    command, work, capsys, tmp_path, monkeypatch
):
    def refuse(*_, **__):
        pytest.fail("the weights were read")

    shutil.copytree(work / "model", tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps({**config, "model_type": "mistral"}))
    monkeypatch.setattr("quantsink.models.source.Source.model", refuse)
    monkeypatch.setattr("quantsink.models.source.Source.weight_files", refuse)
    code, out, err = run(
        capsys, command, tmp_path / "other", "--calibration", work / "calibration", "-o", tmp_path / "o"
    )
    assert (code, out) == (1, "")
    assert "its model type is mistral" in last(err)
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("command", [[], ["export"], ["lab"], ["lab", "trigger"]])
def test_h_is_short_for_help(command, capsys):
    assert run(capsys, *command, "-h") == run(capsys, *command, "--help")


def test_help_names_every_command_with_an_example(capsys):
    for name in ("calibrate", "export", "report", "inspect", "recipe", "demo"):
        code, out, _ = run(capsys, name, "--help")
        assert code == 0
        assert "Example: quantsink" in out
        assert "--json" in out


def test_import_is_quiet_and_starts_no_device(tmp_path):
    code = (
        "import torch, quantsink; assert not torch.cuda.is_initialized(); assert quantsink.calibrate and quantsink.load"
    )
    child = subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", code], capture_output=True, cwd=tmp_path)
    assert (child.returncode, child.stdout, child.stderr) == (0, b"", b"")
    assert Path(tmp_path).is_dir()
