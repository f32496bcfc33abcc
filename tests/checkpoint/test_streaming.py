"""Export tensor by tensor: the files that saving the model in memory writes, in the memory of a few tensors."""

import dataclasses
import filecmp
import json
import os
import shutil
import sys

import big_checkpoint
import pytest
import torch
from families import FAMILIES
from safetensors.torch import load_file, save_file

import quantsink
from quantsink.checkpoint.save_load import save
from quantsink.checkpoint.streaming import NotStreamableError, stream
from quantsink.cli.main import main
from quantsink.errors import CalibrationError, CheckpointError, ModelError
from quantsink.export.export import export
from quantsink.models.fingerprint import model_fingerprint
from quantsink.models.source import Source, find
from quantsink.recipe import Activations, Attention, Clip, Recipe

NATIVE_PARTS = Recipe(
    activations=Activations(native_columns=0.1), attention=Attention(native_heads=3, clip=Clip("row", 8.0))
)


@pytest.fixture
def laid(tokenizer, tmp_path):
    """Saves a model in several shards and calibrates it; gives the folder of both."""

    def lay(model, name="work", shard="20KB", **options):
        folder = tmp_path / name
        model.save_pretrained(folder / "model", max_shard_size=shard)
        tokenizer.save_pretrained(folder / "model")
        options = {"seq_len": 64, "max_tokens": 512, **options}
        quantsink.calibrate(model, tokenizer, "builtin:prose", **options).save(folder / "calibration")
        return folder

    return lay


def streamed(folder, target, recipe="w8a8", **options):
    return export(
        str(folder / "model"), folder / "calibration", target, recipe, **{"measure": False, "force": True, **options}
    )


def whole(folder, target, recipe="w8a8", dtype="auto", shard="30KB"):
    model = find(str(folder / "model")).model(dtype)
    save(quantsink.quantize(model, folder / "calibration", recipe), target, max_shard_size=shard)


def assert_same(folder, expected):
    names = sorted(path.name for path in expected.iterdir())
    assert "config.json" in names
    _, different, missing = filecmp.cmpfiles(expected, folder, names, shallow=False)
    assert (different, missing) == ([], [])
    weights = {path.name for path in folder.iterdir() if "safetensors" in path.name}
    assert weights == {name for name in names if "safetensors" in name}


@pytest.fixture
def never_loaded(monkeypatch):
    def refuse(*_, **__):
        pytest.fail("the model was loaded whole")

    monkeypatch.setattr(Source, "model", refuse)


@pytest.mark.parametrize(
    "recipe",
    [
        "w8a16",
        "w8a8",
        "w8a8-static",
        NATIVE_PARTS,
        Recipe(output_head="int8"),
        dataclasses.replace(Recipe.load("w8a8"), kv_cache=dataclasses.replace(Recipe().kv_cache, bits=4)),
        Recipe(exclude=("*down_proj*", "model.layers.1.self_attn*")),
    ],
    ids=["w8a16", "w8a8", "static", "native-parts", "head", "kv4", "exclude"],
)
@pytest.mark.parametrize("tied", [True, False])
def test_the_files_are_those_of_the_model_in_memory(recipe, tied, tiny_llama, laid, tmp_path):
    options = {"seq_len": 320, "max_tokens": 960} if getattr(recipe, "kv_cache", Recipe().kv_cache).bits else {}
    folder = laid(tiny_llama(tie_word_embeddings=tied), **options)
    assert len(list((folder / "model").glob("*.safetensors"))) > 2
    whole(folder, tmp_path / "whole", recipe)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Source, "model", None)
        streamed(folder, tmp_path / "streamed", recipe, max_shard_size="30KB")
    assert_same(tmp_path / "streamed", tmp_path / "whole")
    assert len(list((tmp_path / "streamed").glob("*.safetensors"))) > 2
    again = quantsink.load(tmp_path / "streamed")
    assert bool(again(torch.arange(2, 40)[None]).logits.isfinite().all())


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "float16"])
def test_types(stored, dtype, tiny_llama, laid, tmp_path):
    folder = laid(tiny_llama().to(stored))
    if (stored, dtype) == (torch.float32, "float16"):
        # What float16 rounds first is still told apart from other weights.
        assert stream(find(str(folder / "model")), dtype).fingerprint()[1] in read_fingerprint(folder)
    whole(folder, tmp_path / "whole", dtype=dtype, shard="5GB")
    streamed(folder, tmp_path / "streamed", dtype=dtype)
    assert_same(tmp_path / "streamed", tmp_path / "whole")


def read_fingerprint(folder):
    return json.loads((folder / "calibration" / "calibration.json").read_text())["fingerprint"]["model"]


STREAMED = ("gemma3", "qwen2", "phi3", "gpt2", "opt", "falcon_new", "gpt_bigcode", "gpt_oss", "bert")
CONVERTED = ("mixtral", "gpt_neox", "vit")


@pytest.mark.parametrize("name", [*STREAMED, *CONVERTED])
def test_other_families(name, tmp_path):
    """Whatever a family keeps beside its linear layers; where transformers converts, the model is loaded instead."""
    model = FAMILIES[name].build()
    model.save_pretrained(tmp_path / "model", max_shard_size="40KB")
    source = find(str(tmp_path / "model"))
    if name in CONVERTED:
        with pytest.raises(NotStreamableError, match="conversion"):
            stream(source)
        return
    streamed_model, loaded = stream(source), source.model()
    assert streamed_model.fingerprint() == model_fingerprint(loaded)
    expected = loaded.state_dict()
    assert streamed_model.model.state_dict().keys() == expected.keys()
    for tensor, name in ((tensor, name) for name, tensor in expected.items()):
        assert torch.equal(streamed_model.read(name), tensor)
        assert streamed_model.read(name).dtype == tensor.dtype


@pytest.mark.parametrize("name", ["gpt2", "gpt_oss", "phi3"])
def test_other_families_are_exported_alike(name, laid, tmp_path):
    folder = laid(FAMILIES[name].build())
    whole(folder, tmp_path / "whole", "w8a8")
    streamed(folder, tmp_path / "streamed", "w8a8", max_shard_size="30KB")
    assert_same(tmp_path / "streamed", tmp_path / "whole")


def test_a_model_that_transformers_converts_is_loaded_whole_and_that_is_said(laid, tmp_path):
    folder, lines = laid(FAMILIES["mixtral"].build()), []
    streamed(folder, tmp_path / "streamed", "w8a8", max_shard_size="30KB", say=lines.append)
    whole(folder, tmp_path / "whole", "w8a8")
    assert_same(tmp_path / "streamed", tmp_path / "whole")
    assert lines[0] == f"{folder / 'model'}: its tensors need conversion; loading it whole"


def test_measuring_changes_no_file(tiny_llama, laid, tmp_path):
    folder = laid(tiny_llama())
    done = streamed(folder, tmp_path / "measured", measure=True)
    assert done.measured.kl > 0
    streamed(folder, tmp_path / "not")
    (tmp_path / "not" / "README.md").unlink()
    assert_same(tmp_path / "measured", tmp_path / "not")


def change_shard(folder, number, change):
    path = sorted((folder / "model").glob("*.safetensors"))[number]
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})
    return path


@pytest.mark.parametrize(
    ("change", "error_type", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), ModelError, "model.norm.weight is missing from its weight files"),
        (lambda t: t.update({"model.layers.0.mlp.up_proj.weight": torch.zeros(96, 48)}), ModelError, "two tensors of"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(47)}),
            ModelError,
            "model.norm.weight is [47] where [48] belongs",
        ),
        (lambda t: t["model.norm.weight"].fill_(torch.nan), ModelError, "model.norm.weight: holds NaN"),
        (lambda t: t["model.norm.weight"].fill_(2), CalibrationError, "not those of the calibrated"),
    ],
    ids=["missing", "twice", "shape", "nan", "other"],
)
def test_wrong_tensors_are_named_before_anything_is_written(
    change, error_type, message, tiny_llama, laid, tmp_path, never_loaded
):
    folder = laid(tiny_llama(), shard="30KB")
    change_shard(folder, -1, change)
    with pytest.raises(error_type) as error:
        streamed(folder, tmp_path / "out")
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["work"]


def test_a_surplus_tensor_is_no_part_of_the_model(tiny_llama, laid, tmp_path, never_loaded):
    """Old checkpoints hold rotary frequencies; transformers leaves them where they are, and so does export."""
    folder = laid(tiny_llama())
    streamed(folder, tmp_path / "before")
    change_shard(folder, -1, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    streamed(folder, tmp_path / "after")
    assert_same(tmp_path / "after", tmp_path / "before")


@pytest.mark.parametrize("equal", [True, False])
def test_a_tied_weight_that_is_stored_twice(equal, tiny_llama, laid, tmp_path):
    folder = laid(tiny_llama())
    embedding = find(str(folder / "model")).model().get_input_embeddings().weight.detach()
    change_shard(folder, -1, lambda t: t.update({"lm_head.weight": embedding if equal else embedding * 2}))
    if equal:
        whole(folder, tmp_path / "whole")
        streamed(folder, tmp_path / "streamed", max_shard_size="30KB")
        assert_same(tmp_path / "streamed", tmp_path / "whole")
        assert "lm_head.weight" not in load_all(tmp_path / "streamed")
    else:
        with pytest.raises(NotStreamableError, match="tied and differ"):
            stream(find(str(folder / "model")))


def load_all(folder):
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def test_a_tied_weight_under_its_other_name(tiny_llama, laid, tmp_path, never_loaded):
    folder = laid(tiny_llama())
    streamed(folder, tmp_path / "before")
    path = next(p for p in (folder / "model").glob("*.safetensors") if "model.embed_tokens.weight" in load_file(p))
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, path, {"format": "pt"})
    streamed(folder, tmp_path / "after")
    assert_same(tmp_path / "after", tmp_path / "before")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-64], "where its header says"),
        (lambda data: data + b"\0" * 8, "where its header says"),
        (lambda data: (2**40).to_bytes(8, "little") + data[8:], "longer than the file"),
        (lambda data: data.replace(b'"shape":[48]', b'"shape":[-8]'), "shape"),
        (lambda data: data.replace(b'"shape":[48]', b'"shape":[47]'), "does not lie where"),
        (lambda data: data.replace(b'"dtype"', b'"dtypf"'), "dtype"),
        (lambda data: data[:8] + b"[" * 100 + data[108:], "damaged"),
    ],
)
def test_a_damaged_file_is_named(damage, message, tiny_llama, laid, tmp_path, never_loaded):
    folder = laid(tiny_llama())
    path = sorted((folder / "model").glob("*.safetensors"))[-1]
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ModelError, match=path.name) as error:
        streamed(folder, tmp_path / "out")
    assert message in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["../../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", 7])
def test_an_index_speaks_of_files_beside_it(name, tiny_llama, laid, tmp_path, tokenizer):
    folder = laid(tiny_llama())
    shutil.copytree(folder / "model", tmp_path / "checkpoint")
    streamed(folder, tmp_path / "checkpoint2", max_shard_size="30KB")
    for place, read in (
        (folder / "model", lambda: streamed(folder, tmp_path / "out")),
        (folder / "model", lambda: find(str(folder / "model")).model()),
        (tmp_path / "checkpoint2", lambda: quantsink.load(tmp_path / "checkpoint2")),
    ):
        index = place / "model.safetensors.index.json"
        entries = json.loads(index.read_text())
        entries["weight_map"]["model.norm.weight"] = name
        index.write_text(json.dumps(entries))
        with pytest.raises((ModelError, CheckpointError), match=r"no file beside it|cannot be read"):
            read()
    assert not (tmp_path / "out").exists()


def test_a_shard_that_is_not_there_is_named(tiny_llama, laid, tmp_path):
    folder = laid(tiny_llama())
    path = sorted((folder / "model").glob("*.safetensors"))[1]
    path.unlink()
    with pytest.raises(ModelError, match=f"{path.name} is not there"):
        streamed(folder, tmp_path / "out")


def test_a_snapshot_of_the_hub(tiny_llama, laid, tmp_path, monkeypatch, never_loaded):
    folder = laid(tiny_llama())
    streamed(folder, tmp_path / "before")
    cache = tmp_path / "hub" / "models--someone--llama"
    shutil.copytree(folder / "model", cache / "snapshots" / ("a" * 40))
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("transformers.utils.hub.TRANSFORMERS_CACHE", str(tmp_path / "hub"), raising=False)
    export("someone/llama", folder / "calibration", tmp_path / "after", "w8a8", measure=False)
    assert_same_weights(tmp_path / "after", tmp_path / "before")


def assert_same_weights(folder, expected):
    one, other = load_all(folder), load_all(expected)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_json_is_clean_and_progress_goes_to_stderr(tiny_llama, laid, tmp_path, capsys):
    folder = laid(tiny_llama())
    arguments = ["export", folder / "model", "--calibration", folder / "calibration", "-o", tmp_path / "out"]
    assert main([str(a) for a in [*arguments, "--no-measure", "--json"]]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["payload_bytes"] > 0
    assert "checking" in output.err
    assert "writing" in output.err


MODELING = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({marker!r}).write_text("executed")
class OwnConfig(LlamaConfig):
    model_type = "own_llama"
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def with_own_code(folder, marker):
    (folder / "modeling_own.py").write_text(MODELING.format(marker=str(marker)))
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "own_llama"
    config["auto_map"] = {
        "AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
    }  # fmt: skip
    config["architectures"] = ["OwnForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))


def with_own_tokenizer(folder, marker):
    code = f"from pathlib import Path\nPath({str(marker)!r}).write_text('executed')\n"
    code += "from transformers import PreTrainedTokenizerFast\nclass OwnTokenizer(PreTrainedTokenizerFast): pass\n"
    (folder / "tokenization_own.py").write_text(code)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config |= {
        "tokenizer_class": "OwnTokenizer",
        "auto_map": {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]},
    }
    path.write_text(json.dumps(config))


def test_code_of_a_repository_runs_only_when_asked_for(tiny_llama, laid, tmp_path, capsys, monkeypatch):
    """Nor is anybody asked on a terminal: `y` on standard input is no consent."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder, marker = laid(tiny_llama()), tmp_path / "marker"
    checkpoint = tmp_path / "checkpoint"
    streamed(folder, checkpoint)
    for place in (folder / "model", checkpoint):
        with_own_code(place, marker)
    exporting = ["export", folder / "model", "--calibration", folder / "calibration", "-o", tmp_path / "x"]
    exporting += ["--no-measure"]
    for command in (
        ["calibrate", folder / "model", "-o", tmp_path / "c"],
        exporting,
        ["report", folder / "model", "-o", tmp_path / "r"],
    ):
        assert main([str(part) for part in command]) == 1
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert "--trust-remote-code" in error
    with pytest.raises(CheckpointError, match="trust_remote_code=True"):
        quantsink.load(checkpoint)
    for load in (Source.model, stream):
        with pytest.raises(ModelError, match="--trust-remote-code"):
            load(find(str(folder / "model")))
    with_own_tokenizer(folder / "model", marker)
    with pytest.raises(ModelError, match="its tokenizer needs custom code from its repository"):
        find(str(folder / "model")).tokenizer()
    assert not marker.exists()

    facts = folder / "calibration" / "calibration.json"
    facts.write_text(facts.read_text().replace('"model_type": "llama"', '"model_type": "own_llama"'))
    assert main([str(part) for part in [*exporting, "--trust-remote-code"]]) == 0, capsys.readouterr().err
    assert marker.exists()
    again = quantsink.load(tmp_path / "x", trust_remote_code=True)
    assert type(again).__name__ == "OwnForCausalLM"
    assert_same_weights(tmp_path / "x", checkpoint)


def test_code_beside_a_model_that_transformers_knows_is_not_run(tiny_llama, laid, tmp_path):
    folder, marker = laid(tiny_llama()), tmp_path / "marker"
    streamed(folder, tmp_path / "before")
    with_own_code(folder / "model", marker)
    config = json.loads((folder / "model" / "config.json").read_text())
    config["model_type"] = "llama"
    (folder / "model" / "config.json").write_text(json.dumps(config))
    streamed(folder, tmp_path / "after")
    assert_same_weights(tmp_path / "after", tmp_path / "before")
    assert not marker.exists()


@pytest.mark.alone
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mapped memory on Linux alone")
def test_memory_is_that_of_a_few_tensors(tmp_path):
    """344 MB of weights into one shard of 181 MB; the largest tensor is one of 4 MB. The kernel refuses more than 170
    MB beside the imports; 120 MB suffice, most of it for threads' stacks and allocator arenas. Small tensors, many
    layers: what the export holds is then well below what differs between machines."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 40, "vocab_size": 4000}
    big_checkpoint.make(tmp_path / "model", 60_000_000, **sizes)
    big_checkpoint.calibration(tmp_path / "model").save(tmp_path / "calibration")
    facts = big_checkpoint.export(tmp_path, growth=170_000_000)
    assert facts["growth"] < facts["bytes_out"] < facts["bytes_in"]
    assert os.path.getsize(tmp_path / "out" / "model.safetensors") == facts["bytes_out"]
