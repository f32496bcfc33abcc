"""A calibration on the terminal and as `--json`: counts at each level, strongest heads, heads that differ by text."""

import io

import pytest
from rich.console import Console

from quantsink.calibration import calibrate
from quantsink.calibration.summary import as_dict, counts, differing, render


@pytest.fixture(scope="module")
def calibration(tiny_llama, tokenizer):
    """Head 0 of each layer is a dormant sink head on both texts, head 1 a sink head on code alone."""
    calibration = calibrate(tiny_llama(), tokenizer, ["builtin:prose", "builtin:code"], seq_len=64, max_tokens=512)
    for domain, statistics in calibration.statistics.items():
        for fields in statistics.heads.values():
            masses = [0.99, 0.7 if domain == "builtin:code" else 0.0, 0.0, 0.0]
            for head, mass in enumerate(masses):
                fields["bos_mass"][head] = mass * fields["rows"][head]
    return calibration


def output(calibration):
    console = Console(width=200, file=io.StringIO())
    console.print(render(calibration))
    return console.file.getvalue()


def test_heads_are_counted_by_level(calibration):
    assert counts(calibration) == {"sink": 4, "strong": 2, "dormant": 2}
    summary = as_dict(calibration, "folder")
    assert (summary["calibration"], summary["heads"], summary["sink_heads"]["strong"]) == ("folder", 8, 2)
    assert summary["kv_heads"] == {"all": 4, "sink": 2, "local": None}


def test_heads_that_differ_between_texts_are_listed(calibration):
    assert [(head.layer, head.head) for head in differing(calibration)] == [(0, 1), (1, 1)]
    assert as_dict(calibration, "folder")["differing_heads"] == [[0, 1], [1, 1]]
    assert "Heads that are sink heads on some texts only: 2" in output(calibration)


def test_the_terminal_shows_texts_levels_and_the_strongest_heads(calibration):
    text = output(calibration)
    assert "builtin:prose: 256 tokens in" in text
    assert "--max-tokens reached before the end of the text" in text
    assert "not measured: windows too short" in text
    strongest = text.partition("strongest")[2]
    assert strongest.index("0.990") < strongest.index("0.3")


def test_one_text_has_no_table_of_differences(tiny_llama, tokenizer):
    calibration = calibrate(tiny_llama(), tokenizer, "builtin:prose", seq_len=64, max_tokens=128, bos=False)
    text = output(calibration)
    assert "sink heads on some texts" not in text
    assert "No BOS token: the first token of each window is the sink candidate." in text
