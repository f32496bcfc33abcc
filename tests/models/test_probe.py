"""Where a model's heads are is seen by running it."""

import pytest
import torch
from transformers.models.llama import modeling_llama

from quantsink.errors import ArchitectureError
from quantsink.models.architecture import Architecture


def test_heads_in_another_order_than_their_sizes_say(tiny_llama, monkeypatch):
    """A model of its own code whose query heads stand in reverse: cut as usual, its rows would be other heads'."""
    turn = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, *rest: turn(q.flip(1), *rest))
    with pytest.raises(ArchitectureError, match=r"layers\.0\.self_attn: its heads do not lie"):
        Architecture.of(tiny_llama())


def test_heads_that_something_mixes_after_attention(tiny_llama):
    model = tiny_llama()
    output = model.model.layers[0].self_attn.o_proj
    output.register_forward_pre_hook(lambda _, args: (args[0] + args[0].roll(16, -1),))
    with pytest.raises(ArchitectureError, match=r"layers\.0\.self_attn: its heads do not lie"):
        Architecture.of(model)


def test_a_norm_over_all_heads_mixes_none(tiny_llama):
    model = tiny_llama()
    norm = torch.nn.RMSNorm(64)
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda _, args, y: norm(y))
    assert Architecture.of(model).attentions[0].q.starts == (0, 16, 32, 48)


def test_looking_leaves_no_trace(tiny_llama):
    model = tiny_llama().train()
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    Architecture.of(model)
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) == hooks
    assert model.config._attn_implementation == "sdpa"
    assert all(module.training for module in model.modules())
