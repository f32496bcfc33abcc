"""The tiny families are what they say: they run, sinks sit where they are planted, rows belong to their heads."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import families
import pytest
import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

FAMILIES, CAUSAL = families.FAMILIES, families.CAUSAL
INTERFACE = [name for name in FAMILIES if not name.startswith("falcon")]
LAYER = 1


@torch.no_grad()
def attentions(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """[layers, H, L, L]"""
    return torch.stack(model(**inputs, output_attentions=True).attentions)[:, 0]


def bos_mass(weights: torch.Tensor) -> torch.Tensor:
    return weights[:, :, 16:, 0].mean(-1)


def entropy(weights: torch.Tensor) -> torch.Tensor:
    visible = torch.arange(1, weights.shape[-1] + 1)[16:]
    return (torch.special.entr(weights).sum(-1)[:, :, 16:] / visible.log()).mean(-1)


@contextmanager
def changed(model: Any, module: str, rows: list[int]) -> Iterator[None]:
    """Other weights and biases in these output channels of one module."""
    target = model.get_submodule(module)
    saved = {name: parameter.clone() for name, parameter in target.named_parameters()}
    with torch.no_grad():
        families.weight(target)[rows] += torch.randn(families.weight(target)[rows].shape)
        if target.bias is not None:
            target.bias[rows] += 1
    try:
        yield
    finally:
        target.load_state_dict(saved)


def differing(before: torch.Tensor, after: torch.Tensor, axis: int) -> list[int]:
    """Indices along the axis at which anything differs."""
    difference = (after - before).abs().transpose(0, axis).flatten(1).amax(1)
    return (difference > 1e-4).nonzero().flatten().tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_runs_with_finite_and_seeded_outputs(name):
    family = FAMILIES[name]
    model, inputs = family.build(0, "eager"), family.inputs()
    weights = attentions(model, inputs)
    length = 65 if name == "vit" else 64
    assert weights.shape == (model.config.num_hidden_layers, 4, length, length)
    assert weights.isfinite().all()
    assert bos_mass(weights).max() < 0.3
    again = family.build(0)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))
    assert family.causal == (weights[:, :, 0, 1:] == 0).all()


@pytest.mark.parametrize("name", CAUSAL)
def test_generates(name):
    model, ids = FAMILIES[name].build(), FAMILIES[name].inputs()["input_ids"]
    out = model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert out.shape == (1, 68)


@pytest.mark.parametrize("name", CAUSAL)
def test_planted_heads_are_sinks_and_no_others(name):
    planted = {0: [2], 1: [1]}
    model = families.plant(FAMILIES[name].build(0, "eager"), planted)
    ids = FAMILIES[name].inputs()["input_ids"]
    weights = attentions(model, {"input_ids": ids})
    doubled = attentions(model, {"input_ids": torch.cat([ids[:, :1], ids], 1)})
    chosen = torch.zeros(weights.shape[:2], dtype=torch.bool)
    for layer, heads in planted.items():
        chosen[layer, heads] = True
    assert bos_mass(weights)[chosen].min() > 0.9
    assert bos_mass(weights)[~chosen].max() < 0.3
    assert entropy(weights)[chosen].max() < 0.1
    assert entropy(weights)[~chosen].min() > 0.3
    torch.testing.assert_close(bos_mass(doubled)[chosen], torch.full((2,), 0.5), atol=0.05, rtol=0)


@pytest.mark.parametrize("name", CAUSAL)
def test_every_head_of_a_group_can_be_planted(name):
    model = families.plant(FAMILIES[name].build(3, "eager"), {1: [0, 1, 2, 3]})
    mass = bos_mass(attentions(model, FAMILIES[name].inputs(256)))
    assert mass[1].min() > 0.9
    assert mass[0].max() < 0.3


@pytest.fixture
def calls(monkeypatch):
    """(query, key, value) of each layer as they reach an attention function `probe`; its head h returns h + 1."""
    seen = []

    def probe(module, query, key, value, attention_mask, **options):
        seen.append((query, key, value))
        heads = torch.arange(1.0, query.shape[1] + 1)[:, None]
        return heads.expand(query.shape[0], query.shape[2], -1, value.shape[-1]), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "probe", probe)
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS, "probe", eager_mask)
    return seen


@pytest.mark.parametrize("name", INTERFACE)
def test_rows_at_the_attention_interface(name, calls):
    family = FAMILIES[name]
    model, inputs = family.build(0, "probe"), family.inputs()
    where = family.rows(model, LAYER)

    def run() -> tuple[torch.Tensor, ...]:
        calls.clear()
        with torch.no_grad():
            model(**inputs)
        return calls[LAYER]

    before = run()
    assert [t.shape[1] for t in before] == [len(where.q_rows), len(where.k_rows), len(where.v_rows)]
    parts = ((where.q_module, where.q_rows), (where.k_module, where.k_rows), (where.v_module, where.v_rows))
    for part, (module, rows) in enumerate(parts):
        for head, head_rows in enumerate(rows):
            with changed(model, module, head_rows):
                after = run()
            reached = [differing(b, a, 1) for b, a in zip(before, after, strict=True)]
            assert reached == [[head] if i == part else [] for i in range(3)]

    fed = []
    with model.get_submodule(where.o_module).register_forward_pre_hook(lambda _, args: fed.append(args[0])):
        run()
    for head, columns in enumerate(where.o_columns):
        assert (fed[0][..., columns] == head + 1).all()


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_reach_only_their_heads_output(name):
    family = FAMILIES[name]
    model, inputs = family.build(0, "eager"), family.inputs()
    where = family.rows(model, LAYER)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        fed = []
        with model.get_submodule(where.o_module).register_forward_pre_hook(lambda _, args: fed.append(args[0])):
            weights = attentions(model, inputs)[LAYER]
        return weights, fed[0]

    before, fed = run()
    for head, head_rows in enumerate(where.q_rows):
        with changed(model, where.q_module, head_rows):
            after, now = run()
        assert differing(before, after, 0) == [head]
        assert differing(fed, now, 2) == where.o_columns[head]
    for group in range(len(where.k_rows)):
        heads = [head for head in range(len(where.q_rows)) if where.kv_head(head) == group]
        columns = [column for head in heads for column in where.o_columns[head]]
        with changed(model, where.k_module, where.k_rows[group]):
            after, now = run()
        assert differing(before, after, 0) == heads
        assert differing(fed, now, 2) == columns
        with changed(model, where.v_module, where.v_rows[group]):
            after, now = run()
        assert differing(before, after, 0) == []
        assert differing(fed, now, 2) == columns


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_of_fused_projections_are_a_partition(name):
    model = FAMILIES[name].build()
    where = FAMILIES[name].rows(model, LAYER)
    used: dict[str, list[int]] = {}
    for part in "qkv":
        rows = getattr(where, f"{part}_rows")
        used.setdefault(getattr(where, f"{part}_module"), []).extend(row for head_rows in rows for row in head_rows)
    for module, rows in used.items():
        assert sorted(rows) == list(range(families.weight(model.get_submodule(module)).shape[0]))
    columns = sorted(column for head_columns in where.o_columns for column in head_columns)
    assert columns == list(range(families.weight(model.get_submodule(where.o_module)).shape[1]))
