"""`import quantsink` registers the format with transformers, whatever was imported before it and whatever is after."""

import importlib.util
import subprocess
import sys

import pytest

import quantsink

ORDERS = {
    "quantsink, then an auto class": "import quantsink; from transformers import AutoModelForCausalLM as Model",
    "quantsink, then a model class": "import quantsink; from transformers import LlamaForCausalLM as Model",
    "quantsink, then a model's module": (
        "import quantsink; from transformers.models.llama.modeling_llama import LlamaForCausalLM as Model"
    ),
    "quantsink, then a registry": (
        "import quantsink; import transformers.quantizers.auto; from transformers import AutoModelForCausalLM as Model"
    ),
    "transformers, then quantsink": "from transformers import AutoModelForCausalLM as Model; import quantsink",
    "transformers' name only, then quantsink": (
        "import transformers, quantsink; Model = transformers.AutoModelForCausalLM"
    ),
    "a registry, then quantsink": (
        "import transformers.quantizers.auto, quantsink; from transformers import AutoModelForCausalLM as Model"
    ),
    "torch and the operators first": (
        "import torch, quantsink.kernels; assert 'transformers' not in sys.modules;"
        "from transformers import AutoModelForCausalLM as Model"
    ),
    "quantsink twice": (
        "import quantsink, transformers.modeling_utils\n"
        "for name in [name for name in sys.modules if name.startswith('quantsink') and 'kernels' not in name]:"
        " del sys.modules[name]\n"
        "import quantsink; from transformers import AutoModelForCausalLM as Model"
    ),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, tokenizer):
    """A checkpoint with INT8 attention, and what it computes in this process."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "head_dim": 16}
    config = LlamaConfig(vocab_size=258, num_hidden_layers=1, bos_token_id=0, eos_token_id=1, pad_token_id=1, **shape)
    model = LlamaForCausalLM(config).eval()
    quantsink.quantize(model, quantsink.calibrate(model, tokenizer, seq_len=32, max_tokens=64))
    folder = tmp_path_factory.mktemp("register") / "checkpoint"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with torch.no_grad():
        return folder, model(torch.arange(20)[None]).logits.sum().item()


LOAD = """
import torch
model = Model.from_pretrained(sys.argv[1])
with torch.no_grad():
    assert model(torch.arange(20)[None]).logits.sum().item() == float(sys.argv[2])
assert model.config._attn_implementation == "quantsink"
assert type(model.model.layers[0].mlp.down_proj).__name__ == "QuantizedLinear"
assert torch.ops.quantsink.sink_attention
assert not [finder for finder in sys.meta_path if "quantsink.hf" in type(finder).__module__], "left behind"
assert "quantsink" not in type(sys.modules["transformers.modeling_utils"].__spec__.loader).__module__
"""


QUICK = ("quantsink, then a model class", "transformers, then quantsink")


@pytest.mark.parametrize("order", [o if o in QUICK else pytest.param(o, marks=pytest.mark.slow) for o in ORDERS])
def test_a_checkpoint_loads_in_every_order_of_imports(order, checkpoint):
    folder, logits = checkpoint
    code = f"import sys\n{ORDERS[order]}\n{LOAD}"
    child = subprocess.run([sys.executable, "-c", code, folder, repr(logits)], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr


@pytest.mark.slow
def test_a_pipeline_loads_a_checkpoint(checkpoint):
    code = (
        "import sys, quantsink; from transformers import pipeline\n"
        "made = pipeline('text-generation', sys.argv[1])('a', max_new_tokens=2, do_sample=False)\n"
        "assert len(made[0]['generated_text']) > 1"
    )
    child = subprocess.run([sys.executable, "-c", code, checkpoint[0]], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr


def test_attention_by_name_needs_no_checkpoint(tmp_path, tiny_llama):
    tiny_llama().save_pretrained(tmp_path)
    code = (
        "import sys, torch, quantsink; from transformers import AutoModelForCausalLM\n"
        "def logits(name):\n"
        "    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], attn_implementation=name)\n"
        "    with torch.no_grad(): return model(torch.arange(20)[None]).logits\n"
        "assert torch.equal(logits('quantsink'), logits('sdpa'))"
    )
    child = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr


def test_importing_quantsink_imports_neither_torch_nor_transformers():
    code = "import sys, quantsink; print(sorted({'torch', 'transformers', 'numpy'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


@pytest.fixture
def finder(tmp_path, monkeypatch):
    """A finder with one hook on a module of its own, and what the hook was called with."""
    from quantsink.hf.register import _Finder

    (tmp_path / "hooked.py").write_text("import sys\nif FAIL := sys.argv[-1] == 'fail': raise ImportError('failed')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "hooked", raising=False)
    seen = []
    finder = _Finder({"hooked": seen.append})
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    yield finder, seen
    sys.modules.pop("hooked", None)


def test_looking_a_module_up_does_not_run_its_hook(finder):
    assert importlib.util.find_spec("hooked") is not None
    assert finder[1] == []
    assert finder[0] in sys.meta_path


def test_a_hook_runs_once_after_its_module(finder):
    module = importlib.import_module("hooked")
    assert module.FAIL is False
    assert finder[1] == [module]
    assert finder[0] not in sys.meta_path
    assert module.__loader__ is module.__spec__.loader
    assert importlib.reload(module) is module
    assert finder[1] == [module]


def test_a_hook_waits_for_an_import_that_succeeds(finder, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["fail"])
    with pytest.raises(ImportError, match="failed"):
        importlib.import_module("hooked")
    assert finder[1] == []
    monkeypatch.setattr(sys, "argv", [""])
    importlib.import_module("hooked")
    assert len(finder[1]) == 1
