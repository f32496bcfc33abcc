"""The figures of docs/results.md on real models. Bounds come from theory and from prototypes, not from these runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import quantsink
from quantsink.calibration import Calibration, calibrate
from quantsink.calibration.calibration import head_means
from quantsink.calibration.collect import Collector, collecting
from quantsink.checkpoint.save_load import load, save
from quantsink.eval import PREFILL, cache_methods, measure, parse_methods, read
from quantsink.models.architecture import Architecture

pytestmark = [pytest.mark.real, pytest.mark.slow]


def load_reference(folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def model_and_tokenizer(smollm2):
    return load_reference(smollm2)


@pytest.fixture(scope="module")
def calibration(model_and_tokenizer, wikitext) -> Calibration:
    """Windows of 512 of the validation text; sampled query rows, as by default."""
    model, tokenizer = model_and_tokenizer
    return calibrate(model, tokenizer, str(wikitext[0]), seq_len=512, max_tokens=32 * 512)


@pytest.fixture(scope="module")
def rows(model_and_tokenizer, calibration, wikitext):
    """The report's rows on four windows of BOS + 1,023 tokens of the test text."""
    model, tokenizer = model_and_tokenizer
    report = measure(
        model,
        tokenizer,
        model_name="SmolLM2-135M",
        calibration=calibration,
        text=read(tokenizer, str(wikitext[1]), length=1024, max_windows=4),
        methods=parse_methods("all"),
    )
    print(report.to_dict())
    return {row.method: row for row in report.rows}


def test_sink_heads_of_smollm2(calibration):
    heads = {(head.layer, head.head): head for head in calibration.heads()}
    assert len(heads) == 270
    assert 125 <= sum(head.bos_mass > 0.3 for head in heads.values()) <= 143
    assert heads[18, 8].bos_mass >= 0.98
    assert heads[18, 8].entropy <= 0.02


@pytest.mark.parametrize(("bos", "low", "high"), [(True, 25, 72), (False, 0, 0)])
def test_sink_heads_of_gemma3_need_their_bos(bos, low, high, gemma3, wikitext):
    model, tokenizer = load_reference(gemma3)
    heads = calibrate(
        model, tokenizer, str(wikitext[0]), seq_len=512, max_tokens=4 * 512, bos=bos, error_windows=0
    ).heads()
    assert len(heads) == 72
    assert low <= sum(head.bos_mass > 0.3 for head in heads) <= high


def test_statistics_equal_a_full_eager_computation(smollm2, wikitext):
    model, tokenizer = load_reference(smollm2)
    ids = tokenizer(wikitext[0].read_text()[:8000], add_special_tokens=False).input_ids[:511]
    tokens = torch.tensor([[tokenizer.bos_token_id, *ids]])
    collector = Collector(model, Architecture.of(model), sink_size=1, query_rows=None, error_windows=0)
    with collecting(collector):
        collector.run(tokens)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        everything = model.model(tokens, output_attentions=True).attentions
    for layer, weights in zip(collector.architecture.attentions, everything, strict=True):
        rows = weights[0, :, 16:].double()
        visible = torch.arange(17, 513).double()
        entropy = -(rows * rows.clamp(min=1e-300).log()).sum(-1) / visible.log()
        means = head_means(collector.heads[layer.name])
        assert torch.allclose(means["bos_mass"], rows[..., 0].mean(-1), atol=1e-5), layer.name
        assert torch.allclose(means["entropy"], entropy.mean(-1), atol=1e-5), layer.name
        assert torch.allclose(means["rest_peak"], rows[..., 1:].amax(-1).mean(-1), atol=1e-5), layer.name


def test_int8_attention_costs_least_with_sinks_split_off(rows):
    assert rows["attention-sink"].kl <= 0.0010
    assert rows["attention-row"].kl >= 0.005
    assert rows["attention-sink"].kl < rows["attention-block"].kl < rows["attention-row"].kl
    assert rows["attention-all"].kl < rows["attention-sink"].kl


def test_one_fixed_scale_for_attention_weights_ruins_the_model(rows):
    assert rows["attention-fixed"].ppl_ratio > 1.3


def test_absolute_clips_cost_and_row_clips_do_not(rows):
    assert 0.02 <= rows["clip-absolute-10"].kl <= 0.1
    assert rows["clip-row-10"].kl < 0.0001


def test_w8a8_beats_its_peers(rows):
    assert rows["w8a8"].kl <= 0.010
    assert rows["w8a8"].ppl_ratio <= 1.010
    assert rows["w8a8"].kl < rows["bnb-llm-int8"].kl
    assert rows["w8a8"].kl < rows["w8a8-plain"].kl


def test_static_scales_need_a_table_for_sink_tokens(rows):
    assert rows["w8a8-static"].ppl_ratio <= 1.04
    assert rows["w8a8-static"].kl <= 0.05
    assert rows["w8a8-static-plain"].ppl_ratio > 1.5


RELOAD = """
import filecmp, sys, torch, quantsink
from pathlib import Path
from transformers import AutoModelForCausalLM
first, second, logits = map(Path, sys.argv[1:])
model = AutoModelForCausalLM.from_pretrained(first)
with torch.no_grad():
    again = model(torch.arange(100, 200)[None]).logits
assert torch.equal(again, torch.load(logits)), "other logits"
model.save_pretrained(second, max_shard_size="50MB")
names = [path.name for path in second.iterdir()]
assert sum(name.endswith(".safetensors") for name in names) > 1
_, different, missing = filecmp.cmpfiles(first, second, names, shallow=False)
assert not different and not missing, (different, missing)
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reload_in_a_fresh_process(dtype, smollm2, calibration, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=dtype)
    quantsink.quantize(model, calibration, "w8a8")
    save(model, tmp_path / "a", max_shard_size="50MB")
    with torch.no_grad():
        torch.save(model(torch.arange(100, 200)[None]).logits, tmp_path / "logits.pt")
    arguments = [sys.executable, "-c", RELOAD, tmp_path / "a", tmp_path / "b", tmp_path / "logits.pt"]
    subprocess.run(arguments, check=True, cwd=tmp_path)
    assert load(tmp_path / "a").dtype == getattr(torch, dtype)


PEAK = """
import sys, torch
from transformers import AutoModelForCausalLM
from quantsink.models.architecture import Architecture
from quantsink.calibration.collect import Collector, collecting
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
ids = torch.randint(3, 40000, (1, int(sys.argv[2])), generator=torch.Generator().manual_seed(0))
peak = lambda: int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 1024  # ru_maxrss is inherited
with torch.no_grad():
    model.model(ids, use_cache=False)
before = peak()
collector = Collector(model, Architecture.of(model), sink_size=1, error_windows=1)
with collecting(collector):
    collector.run(ids)
print(peak() - before)
"""


def test_extra_memory_grows_with_the_length_not_its_square(smollm2, tmp_path):
    """MiB above the model's own forward pass. One L x L map of a layer's heads takes 9 MiB at 512, 576 at 4,096."""
    extra = {}
    for length in (512, 4096):
        command = [sys.executable, "-c", PEAK, smollm2, str(length)]
        # Large blocks go back to the system at once: the peak is memory in use, not memory that the allocator keeps.
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1048576"}
        done = subprocess.run(command, check=True, capture_output=True, cwd=tmp_path, env=environment)
        extra[length] = float(done.stdout)
    print("extra MiB:", extra)
    assert extra[512] > 0, "nothing was measured"
    assert extra[4096] < 144, "a quarter of one map"


@pytest.fixture(scope="module")
def cache_rows(model_and_tokenizer, calibration, wikitext):
    """Rows measured through caches: a prompt of 128 tokens, then 32 at a time."""
    model, tokenizer = model_and_tokenizer
    names = {"kv8", "kv4", "kv4-no-sinks", "kv4-random", "kv3", "kv2", "kv2-no-sinks", "hqq-kv4"}
    report = measure(
        model,
        tokenizer,
        model_name="SmolLM2-135M",
        calibration=calibration,
        text=read(tokenizer, str(wikitext[1]), length=1024, max_windows=4, context=PREFILL),
        methods=[method for method in cache_methods((8, 4, 3, 2)) if method.name in names],
    )
    print(report.to_dict())
    return {row.method: row for row in report.rows}


def test_a_cache_of_8_bits_costs_next_to_nothing(cache_rows):
    assert 0 < cache_rows["kv8"].kl <= 0.0002
    assert cache_rows["kv8"].bits_kv == 8.5


def test_a_cache_of_4_bits_beside_hqqs(cache_rows):
    ours, peer = cache_rows["kv4"], cache_rows["hqq-kv4"]
    if not peer.ok:
        pytest.skip(peer.status)
    assert ours.bits_kv <= 4.6 < peer.bits_kv
    assert ours.kl <= 0.35 * peer.kl
    assert ours.kl < cache_rows["kv4-no-sinks"].kl
    assert ours.kl < cache_rows["kv4-random"].kl


def test_caches_of_3_and_2_bits(cache_rows):
    two, three = cache_rows["kv2"], cache_rows["kv3"]
    assert two.bits_kv <= 2.6
    assert two.ppl_ratio <= 1.16
    assert two.kl <= 0.12
    assert two.kl < cache_rows["kv2-no-sinks"].kl
    assert cache_rows["kv4"].kl < three.kl < two.kl
    assert three.bits_kv <= 3.5 * 1.02
