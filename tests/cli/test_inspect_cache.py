"""`quantsink inspect --cache`: the size of a cache, worked out without a model."""

import json

from quantsink.cli.main import main


def run(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_the_cache_is_sized_alike_from_a_calibration_and_from_a_checkpoint(work, capsys, tmp_path):
    code, out, _ = run(capsys, "inspect", work / "calibration", "--cache", "--kv-bits", 8, "--length", 4096, "--json")
    assert code == 0
    (row,) = json.loads(out)["sequences"]
    # Two layers of two KV heads of 16, keys and values: bfloat16's bytes; codes with their scales take 9.25 bits here.
    assert row["bytes_token_bf16"] == 2 * 2 * 2 * 16 * 2
    assert row["bytes"] == row["bytes_codes"] + row["bytes_exact"]
    blocks = (4096 - 4 - 64) // 64
    assert row["bytes_codes"] == blocks * 64 * 2 * 2 * 2 * 16 * 9.25 / 8
    assert row["bytes_exact"] == (4096 - 64 * blocks) * 2 * 2 * 2 * 16 * 2
    export = ["export", work / "model", "--calibration", work / "calibration", "--no-measure", "--kv-bits", 8]
    code, _, err = run(capsys, *export, "-o", tmp_path / "x")
    assert code == 0, err
    assert "KV cache | codes of 8.0 bits" in (tmp_path / "x" / "README.md").read_text()
    code, out, _ = run(capsys, "inspect", tmp_path / "x", "--cache", "--length", 4096, "--json")
    assert code == 0
    assert json.loads(out)["sequences"] == [row]
    code, out, _ = run(capsys, "inspect", tmp_path / "x", "--cache")
    assert code == 0
    assert "8 8" in out
    assert "32,768" in out
