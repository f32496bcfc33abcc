"""`calibrate` counts what it reads and refuses options, text and models that it cannot use."""

import pytest

from quantsink.calibration import calibrate
from quantsink.errors import DataError, ModelError, UsageError

OPTIONS = {"seq_len": 64, "max_tokens": 1024}


def test_a_domain_counts_its_tokens_and_windows(tiny_llama, tokenizer, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("x" * 630)
    domain = calibrate(tiny_llama(), tokenizer, str(text), seq_len=64, max_tokens=10_000).domains[0]
    assert (domain.tokens, domain.windows, domain.complete) == (640, 10, True)


def test_a_calibration_without_bos_records_none(tiny_llama, tokenizer):
    assert calibrate(tiny_llama(), tokenizer, "builtin:prose", bos=False, **OPTIONS).bos is None


def test_self_text_follows_its_seed(tiny_llama, tokenizer, same_tensors):
    runs = [calibrate(tiny_llama(), tokenizer, "self", seed=seed, **OPTIONS) for seed in (3, 3, 4)]
    assert same_tensors(runs[0], runs[1])
    assert runs[0].domains[0].fingerprint != runs[2].domains[0].fingerprint


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sink_size": 0}, "--sink-size 0"),
        ({"sink_size": 64}, "--sink-size 64"),
        ({"query_rows": 0}, "--query-rows 0"),
        ({"max_tokens": 10}, "--max-tokens 10"),
        ({"data": ["builtin:prose", "builtin:prose"]}, "two texts are called builtin:prose"),
        ({"data": []}, "no text"),
    ],
)
def test_invalid_options_are_named(options, message, tiny_llama, tokenizer):
    with pytest.raises(UsageError, match=message):
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
