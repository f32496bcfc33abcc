"""A module type registered in one place is quantized, saved, loaded, checked and exported tensor by tensor."""

import filecmp

import pytest
import torch
from torch import nn

import quantsink
from quantsink.checkpoint.save_load import save
from quantsink.errors import CheckpointError
from quantsink.export.export import export
from quantsink.layers import replacement
from quantsink.layers.replacement import Replacement, Site, locate, site_of
from quantsink.layers.token_context import TokenContext

IDS = torch.arange(2, 40)[None]


class RoundedNorm(Replacement):
    """A norm whose weight is a number of eighths."""

    FLOAT32 = ("scale",)

    def __init__(self, size, eps):
        super().__init__()
        self.eps = eps
        self.register_buffer("eighths", torch.empty(size, dtype=torch.int8))
        self.register_buffer("scale", torch.empty(1))

    @classmethod
    def planned(cls, plan, read):
        return {name: None for name, module in read.modules.items() if name.endswith("layernorm")}

    @classmethod
    def stored(cls, outline, read):
        return cls.planned(outline, read)

    @classmethod
    def empty(cls, site, specification):
        with site.device:
            return cls(len(site.original.weight), site.original.variance_epsilon)

    @classmethod
    def of(cls, site, specification):
        new = cls.empty(site, specification)
        new.eighths = (8 * site.original.weight.detach()).round().to(torch.int8)
        new.scale = torch.full((1,), 1 / 8, device=site.device)
        return new

    def check(self, name, tensor):
        return name != "scale" or bool((tensor > 0).all())

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (self.eighths * self.scale)).to(x.dtype)


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setattr(replacement, "REPLACEMENTS", [*replacement.REPLACEMENTS])
    monkeypatch.setattr("quantsink.hf.convert.REPLACEMENTS", replacement.REPLACEMENTS)
    return replacement.register(RoundedNorm)


@pytest.fixture
def model(tiny_llama):
    model = tiny_llama()
    for name, module in model.named_modules():
        if name.endswith("layernorm"):
            nn.init.uniform_(module.weight, 0.5, 1.5)
    return model


@torch.no_grad()
def test_a_toy_type_is_quantized_saved_loaded_and_streamed(toy, model, tokenizer, tmp_path):
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    calibration = quantsink.calibrate(model, tokenizer, "builtin:prose", seq_len=64, max_tokens=512)
    calibration.save(tmp_path / "calibration")
    original = model(IDS).logits

    quantsink.quantize(model, calibration)
    norms = [module for module in model.modules() if isinstance(module, toy)]
    assert len(norms) == 4
    logits = model(IDS).logits
    assert not torch.equal(logits, original)

    save(model, tmp_path / "saved")
    loaded = quantsink.load(tmp_path / "saved")
    assert sum(isinstance(module, toy) for module in loaded.modules()) == 4
    assert torch.equal(loaded(IDS).logits, logits)
    assert loaded.to(torch.bfloat16).model.layers[0].input_layernorm.scale.dtype == torch.float32

    export(str(tmp_path / "model"), tmp_path / "calibration", tmp_path / "streamed", measure=False)
    for name in ("model.safetensors", "config.json"):
        assert filecmp.cmp(tmp_path / "saved" / name, tmp_path / "streamed" / name, shallow=False), name

    norms[0].scale.neg_()
    save(model, tmp_path / "damaged")
    with pytest.raises(CheckpointError, match=r"layernorm\.scale holds values that cannot be right"):
        quantsink.load(tmp_path / "damaged")


def test_every_type_has_of_empty_and_check():
    assert len(replacement.REPLACEMENTS) == 4
    for kind in replacement.REPLACEMENTS:
        assert {"planned", "stored", "of", "empty"} <= vars(kind).keys(), kind


def test_a_site_is_a_module_a_parameter_or_nothing(tiny_llama):
    model = tiny_llama()
    context = TokenContext(1)
    layer = model.model.layers[0].self_attn
    assert site_of(model, "model.layers.0.self_attn.q_proj", context).original is layer.q_proj
    assert site_of(model, "model.layers.0.self_attn.q_proj.weight", context).original is layer.q_proj.weight
    empty = site_of(model, "model.layers.0.self_attn.table", context)
    assert empty == Site("model.layers.0.self_attn.table", None, torch.device("cpu"), context)
    assert locate(model, "model.layers.0.self_attn.table") == (layer, "table", None)
