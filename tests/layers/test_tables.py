"""Tables of attention modules: made from a plan, empty for a checkpoint, and checked when they were loaded."""

import math

import pytest
import torch

from quantsink.kernels import Route
from quantsink.layers.replacement import Site
from quantsink.layers.tables import AttentionTable, CacheTable, GramSpecification, TableSpecification
from quantsink.layers.token_context import TokenContext
from quantsink.plan import AttentionPlan, AttentionShape
from quantsink.recipe import Attention, Clip

SITE = Site("layer.quantsink_table", None, torch.device("cpu"), TokenContext(1))
PLAN = AttentionPlan(
    (Route.INT8, Route.SINK, Route.NATIVE, Route.INT8), ((0.5, 1.0), (0.0, -1.0)), (8.0,) * 3 + (math.inf,)
)


@pytest.mark.parametrize("clip", ["none", "row"])
def test_a_table_holds_the_plan_and_an_empty_one_has_its_tensors(clip):
    rule = Attention(clip=Clip(clip))
    plan = PLAN if clip == "row" else AttentionPlan(PLAN.routes, PLAN.key_mean)
    table = AttentionTable.of(SITE, TableSpecification(plan.shape, rule, plan))
    assert plan.shape == AttentionShape(4, 2, 2)
    assert table.routes.tolist() == [0, 1, 2, 0]
    assert table.key_mean.tolist() == [[0.5, 1.0], [0.0, -1.0]]
    assert (table.clip is None) == (clip == "none")
    empty = AttentionTable.empty(SITE, TableSpecification(plan.shape, rule))
    kinds = [{name: (t.shape, t.dtype) for name, t in made.state_dict().items()} for made in (table, empty)]
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize(
    ("name", "value"),
    [("routes", 3), ("key_mean", torch.nan), ("key_mean", torch.inf), ("clip", 0.0), ("clip", torch.nan)],
)
def test_values_that_cannot_be_right_are_seen(name, value):
    table = AttentionTable.of(SITE, TableSpecification(PLAN.shape, Attention(clip=Clip("row")), PLAN))
    tensors = dict(table.named_buffers())
    assert all(table.check(name, tensor) for name, tensor in tensors.items())
    tensors[name].view(-1)[1] = value
    assert not table.check(name, tensors[name])


def test_tables_stay_in_float32():
    table = AttentionTable.of(SITE, TableSpecification(PLAN.shape, Attention(clip=Clip("row")), PLAN)).half()
    assert (table.key_mean.dtype, table.clip.dtype) == (torch.float32, torch.float32)


def test_a_cache_table_gives_its_metric_once():
    gram = torch.eye(4).expand(2, 4, 4).clone()
    table = CacheTable.of(SITE, GramSpecification(2, 4, gram))
    assert torch.equal(table.query_gram, gram)
    assert table.metric is table.metric
    assert CacheTable.empty(SITE, GramSpecification(2, 4)).query_gram.shape == (2, 4, 4)
    assert not table.check("query_gram", torch.full((2, 4, 4), torch.nan))
