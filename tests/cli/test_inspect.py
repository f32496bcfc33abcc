"""`quantsink inspect`: calibrations, checkpoints and the sizes of their caches."""

import json

import pytest

from quantsink.cli.main import main


def run(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    out = capsys.readouterr()
    return code, out.out, out.err


def last(text):
    return text.strip().splitlines()[-1]


@pytest.mark.parametrize("what", ["calibration", "checkpoint"])
def test_a_folder_is_described_as_a_table_and_as_json(what, work, capsys):
    code, out, _ = run(capsys, "inspect", work / what)
    assert code == 0
    assert len(out.splitlines()) > 5
    code, out, _ = run(capsys, "inspect", work / what, "--json")
    assert json.loads(out)["kind"] == what


@pytest.mark.parametrize(
    ("what", "options", "message"),
    [
        ("checkpoint", ["--cache"], "no kv_cache"),
        ("model", ["--cache"], "not a quantsink checkpoint"),
        ("calibration", ["--cache", "--length", "0"], "1 or more"),
        ("calibration", ["--cache", "--kv-bits", "9"], "from 2 to 8"),
        ("calibration", ["--kv-bits", "4"], "need --cache"),
        ("calibration", ["--cache", "--kv-bits", "4"], "--error-windows"),
    ],
)
def test_errors_name_what_is_wrong(what, options, message, work, capsys):
    code, _, err = run(capsys, "inspect", work / what, *options)
    assert code in (1, 2)
    assert message in last(err)
