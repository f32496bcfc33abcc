"""A plan: what will be done to each head and each linear layer. Plain data, no model; all that reaches the core."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from quantsink.kernels import Route
from quantsink.recipe import Recipe

__all__ = ["AttentionPlan", "LinearPlan", "Plan", "Route", "head_plan"]


@dataclass(frozen=True)
class LinearPlan:
    """One linear layer `[N, K]`."""

    activations: Literal["native", "per_token", "static"] = "per_token"
    sink_rows: Literal["native", "table", "plain"] = "native"
    native_rows: tuple[int, ...] = ()
    """Output channels that stay native (the heads' slices of q, k, v)."""
    native_columns: tuple[int, ...] = ()
    """Input channels that stay native (named by calibration; the heads' slices of o)."""
    input_scale: float = 1.0
    """Static scale of ordinary rows."""
    sink_scale: float = 1.0
    """Static scale of the sink tokens' rows."""


def head_plan(recipe: Recipe) -> LinearPlan:
    """The output head's: no calibration watches its inputs, and it need not see every token of a pass."""
    return LinearPlan("native" if recipe.activations.kind == "native" else "per_token", "plain")


@dataclass(frozen=True)
class AttentionPlan:
    """One attention layer of H query heads on KVH key/value heads of size D."""

    routes: tuple[Route, ...]
    key_mean: tuple[tuple[float, ...], ...]
    """`[KVH][D]`, the mean key without sink tokens."""
    clip: tuple[float, ...] | None = None
    """`[H]` score bound of each head, inf = not clipped; None where the recipe clips nothing."""


@dataclass(frozen=True)
class Plan:
    """Everything `apply` needs, by module name."""

    recipe: Recipe
    sink_size: int
    linears: Mapping[str, LinearPlan] = field(default_factory=dict)
    attentions: Mapping[str, AttentionPlan] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """What the user should know: heads that were not clipped, layers left native, ..."""

    def count(self, route: Route) -> int:
        """Heads on one route."""
        return sum(plan.routes.count(route) for plan in self.attentions.values())
