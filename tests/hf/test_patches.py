"""Changes to a user's model: none by reading it, all of them listed, and none left where one fails."""

import copy
from typing import Any

import pytest
import torch
from families import FAMILIES
from tiny import logits, quantized
from torch import nn

import quantsink
from quantsink.calibration.routing import plan
from quantsink.hf.patches import Change, Changes, changing, listed
from quantsink.hf.quantizer import quantize
from quantsink.recipe import KVCache, Recipe

IDS = torch.arange(2, 40)[None]
RECIPE = Recipe(output_head="int8", kv_cache=KVCache(bits=4))


SEEN = ("falcon", "gpt_oss", "mixtral", "bert", "gpt2", "gemma3")


def tree(model: nn.Module) -> dict[str, Any]:
    """Every attribute of every module, its class and its config by place: identities, and values of plain data."""
    places: dict[str, Any] = {}

    def look(place: str, value: Any) -> None:
        if isinstance(value, dict):
            places[place] = list(value)
            for key, item in value.items():
                look(f"{place}[{key!r}]", item)
        elif isinstance(value, (list, tuple)):
            places[place] = len(value)
            for index, item in enumerate(value):
                look(f"{place}[{index}]", item)
        elif isinstance(value, (str, int, float, bool, type(None), torch.dtype)):
            places[place] = value
        elif isinstance(value, torch.Tensor):
            places[place] = (id(value), value.requires_grad)
        else:
            places[place] = id(value)

    for name, module in model.named_modules():
        look(name, vars(module))
        look(f"class of {name}", id(type(module)))
        if hasattr(module, "config"):
            look(f"{name}.config", vars(module.config))
    return places


@pytest.fixture
def calibrated(tiny_llama, tokenizer):
    model = tiny_llama()
    return model, quantsink.calibrate(model, tokenizer, "builtin:prose", seq_len=320, max_tokens=960)


@pytest.mark.parametrize("name", SEEN)
def test_calibrating_leaves_the_model_as_it_was(name, tokenizer):
    name = next(family for family in FAMILIES if family.startswith(name))
    model = FAMILIES[name].build()
    before = tree(model)
    quantsink.calibrate(model, tokenizer, "builtin:code", seq_len=64, max_tokens=128, error_windows=1)
    assert tree(model) == before
    assert listed(model) == ()


def test_an_exception_in_calibration_leaves_the_model_as_it_was(tiny_llama, tokenizer):
    def stop(*_):
        raise KeyboardInterrupt

    model = tiny_llama().train()
    before = tree(model)
    with pytest.raises(KeyboardInterrupt):
        quantsink.calibrate(
            model, tokenizer, "builtin:prose", seq_len=64, max_tokens=256, error_windows=1, progress=stop
        )
    assert tree(model) == before


def test_an_exception_in_any_change_leaves_the_original_model(calibrated, monkeypatch):
    """The first, the second, ... until one run makes them all."""
    model, calibration = calibrated
    decided = plan(calibration, RECIPE)
    before, expected = tree(model), logits(model, IDS)
    made = []

    def failing(limit: int, method: str) -> Any:
        original = getattr(Changes, method)

        def change(self: Changes, *arguments: Any) -> None:
            if len(made) == limit:
                raise RuntimeError("stopped")
            made.append(method)
            original(self, *arguments)

        return change

    methods = ("put", "set", "hook", "configure", "freeze")
    for limit in range(1000):
        made.clear()
        with monkeypatch.context() as patch:
            for method in methods:
                patch.setattr(Changes, method, failing(limit, method))
            trial = model if limit < 60 else copy.deepcopy(model)
            try:
                quantize(model, decided)
            except RuntimeError:
                assert tree(trial) == before, f"after change {limit}"
                continue
        break
    assert limit == len(made) > 30
    assert {"put", "set", "hook", "freeze"} <= set(made)
    assert not torch.equal(logits(model, IDS), expected)


def test_an_exception_in_the_making_of_a_module_leaves_the_original_model(calibrated, monkeypatch):
    from quantsink.layers.linear import QuantizedLinear

    model, calibration = calibrated
    before, expected = tree(model), logits(model, IDS)
    original = QuantizedLinear.of
    for limit in (0, 3, 14):
        sites = []

        def of(site: Any, specification: Any, sites: list[Any] = sites, limit: int = limit) -> Any:
            if len(sites) == limit:
                raise MemoryError
            sites.append(site)
            return original(site, specification)

        with monkeypatch.context() as patch:
            patch.setattr(QuantizedLinear, "of", of)
            with pytest.raises(MemoryError):
                quantsink.quantize(model, calibration, RECIPE)
        assert tree(model) == before
        assert torch.equal(logits(model, IDS), expected)


def test_all_changes_are_listed(calibrated):
    model, calibration = calibrated
    quantsink.quantize(model, calibration, RECIPE)
    changes = listed(model)
    assert Change("model.layers.0.mlp.up_proj", "QuantizedLinear replaces Linear") in changes
    assert Change("model.layers.1.self_attn.quantsink_table", "AttentionTable added") in changes
    assert Change("", "attribute _prepare_cache_for_generation") in changes
    assert Change("", "config attribute tie_word_embeddings") in changes
    assert Change("model", "hook: which rows are sink tokens") in changes
    assert sum("replaces" in change.what for change in changes) == 15
    assert listed(copy.deepcopy(model)) == changes


def test_a_cache_for_an_unquantized_model_is_listed_too(calibrated):
    model, calibration = calibrated
    quantsink.SinkCache.from_calibration(model, calibration)
    assert {change.what for change in listed(model)} == {"config attribute _attn_implementation_internal"}


def test_parameters_and_modules_come_back_in_their_order():
    model = nn.Module()
    model.first, model.second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.ones(1))
    model.layers = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    before = tree(model)

    def fail() -> None:
        with changing(model) as changes:
            changes.put("first", nn.Linear(1, 1))
            changes.put("layers.0", nn.ReLU())
            changes.put("layers.new", nn.ReLU())
            changes.set(model, "", "name", 1)
            changes.set(model, "", "training", False)
            assert tree(model) != before
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert tree(model) == before


def test_the_last_row_of_a_prompt_keeps_no_strides_of_it(tiny_llama, tokenizer):
    """Or `torch.matmul` copies the head's weights at every prompt."""
    seen = []
    model = quantized(tiny_llama(), tokenizer)
    model.lm_head.register_forward_pre_hook(lambda _, args: seen.append(args[0].stride()))
    logits(model, logits_to_keep=1)
    assert seen == [(48, 48, 1)]
