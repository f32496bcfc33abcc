"""Normalizers: each what its paper defines, right in its gradient, blind to what is masked, at scores of any size."""

import math
import warnings
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from quantsink.errors import UsageError
from quantsink.eval.lab.normalizers import NAMES, ClippedSoftmax, Entmax, Normalizer, Softmax, Sparsemax, normalizer

ALPHAS = (1.001, 1.25, 1.5, 1.75, 1.999, 2.0)
EVERY = [normalizer(name) for name in (*NAMES, "entmax-1", "entmax-1.01", "entmax-1.25", "entmax-1.75", "entmax-2")]
SUM_TO_ONE = [one for one in EVERY if one.name not in ("softmax1", "relu", "clipped-softmax")]
SHIFTABLE = [*SUM_TO_ONE, ClippedSoftmax()]
SIZES = (1, 2, 63, 65)
every = pytest.mark.parametrize("normalize", EVERY, ids=lambda one: one.name)
summing = pytest.mark.parametrize("normalize", SUM_TO_ONE, ids=lambda one: one.name)
alphas = pytest.mark.parametrize("alpha", ALPHAS)
sizes = pytest.mark.parametrize("size", SIZES)


def draw(*shape: int, scale: float = 1.0, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def seen(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bool)


def causal(size: int) -> Tensor:
    return seen(size, size).tril()


def masks() -> dict[str, Tensor]:
    """Masks `[7, 7]` or broadcastable to it; `ragged` has rows that see nothing, one key, some and all."""
    padded = torch.tensor([0, 0, 1, 1, 1, 1, 1], dtype=torch.bool)
    ragged = causal(7) & padded
    ragged[3] = True
    return {
        "all": seen(1, 1),
        "causal": causal(7),
        "padded": padded,
        "causal-and-padded": ragged,
        "one": torch.eye(7, dtype=torch.bool),
        "rows": torch.tensor([[1], [0], [1], [1], [0], [1], [1]], dtype=torch.bool),
        "none": ~seen(7, 7),
    }


masked = pytest.mark.parametrize("visible", masks().values(), ids=masks().keys())


def weights_and_gradient(normalize: Normalizer, scores: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    scores = scores.detach().requires_grad_()
    weights = normalize(scores, visible)
    cotangent = draw(*scores.shape, seed=1).to(scores.dtype)
    (gradient,) = torch.autograd.grad(weights, scores, cotangent)
    return weights.detach(), gradient


# The formulas, row by row in Python's floats.


def plain_softmax(row: Sequence[float]) -> list[float]:
    return [math.exp(x) / sum(math.exp(y) for y in row) for x in row]


FORMULAS: dict[str, Callable[[Sequence[float]], list[float]]] = {
    "softmax": plain_softmax,
    "softmax1": lambda row: [math.exp(x) / (1 + sum(math.exp(y) for y in row)) for x in row],
    "relu": lambda row: [max(x, 0) / max(len(row) - 1, 1) for x in row],
    "clipped-softmax": lambda row: [min(max(1.06 * p - 0.03, 0), 1) for p in plain_softmax(row)],
}


@masked
@pytest.mark.parametrize("name", FORMULAS)
def test_a_row_is_the_formula_over_the_keys_that_it_sees(name: str, visible: Tensor) -> None:
    scores = draw(7, 7, scale=2)
    expected = torch.zeros(7, 7, dtype=torch.float64)
    for i, row in enumerate(visible.broadcast_to(7, 7)):
        expected[i, row] = torch.tensor(FORMULAS[name](scores[i, row].tolist()), dtype=torch.float64)
    torch.testing.assert_close(normalizer(name)(scores, visible), expected, rtol=1e-14, atol=1e-15)


@alphas
@sizes
@pytest.mark.parametrize("scale", [0.01, 1, 10])
def test_entmax_meets_the_conditions_of_its_optimum(alpha: float, size: int, scale: float) -> None:
    """p^(α-1) = (α-1) x - τ with one τ on the support, and (α-1) x ≤ τ off it: sufficient, as the problem is convex."""
    scores = draw(20, size, scale=scale)
    for row, weights in zip(scores, Entmax(alpha)(scores, seen(size)), strict=True):
        assert weights.min() >= 0
        assert float(weights.sum()) == pytest.approx(1, abs=1e-14)
        taus = (alpha - 1) * row - weights.pow(alpha - 1)
        support = weights > 0
        # Weights that underflow near α = 1 have lost their digits.
        taus_seen = taus[weights > 1e-200]
        assert float(taus_seen.max() - taus_seen.min()) < 1e-13 * max(1, scale)
        assert (taus[~support] <= taus_seen.mean() + 1e-13).all()


def test_no_point_of_the_simplex_is_nearer_than_sparsemax() -> None:
    scores = draw(6)
    weights = Sparsemax()(scores, seen(6))
    sharpness = draw(20_000, 1, seed=1).exp()
    others = (draw(20_000, 6, seed=2) * sharpness).softmax(dim=-1)
    near = 0.999 * weights + 0.001 * others
    assert (torch.cat([others, near]) - scores).norm(dim=-1).min() >= (weights - scores).norm()
    assert 1 < (weights > 0).sum() < 6


def test_sparsemax_of_scores_in_the_simplex_is_the_scores() -> None:
    scores = draw(5, 9).softmax(dim=-1)
    torch.testing.assert_close(Sparsemax()(scores, seen(9)), scores, rtol=0, atol=1e-15)


@alphas
@sizes
def test_equal_scores_share_alike(alpha: float, size: int) -> None:
    weights = Entmax(alpha)(torch.full((3, size), -7.5), seen(size))
    torch.testing.assert_close(weights, torch.full((3, size), 1 / size), rtol=1e-6, atol=0)


@summing
@sizes
@pytest.mark.parametrize("scale", [1e-3, 1, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_visible_weights_sum_to_one(normalize: Normalizer, size: int, scale: float, dtype: torch.dtype) -> None:
    visible = causal(size)
    weights = normalize(draw(size, size, scale=scale, dtype=dtype), visible)
    assert (weights.sum(dim=-1) - 1).abs().max() < 8 * torch.finfo(dtype).eps


@every
@sizes
@pytest.mark.parametrize("scale", [0.1, 3, 1e3])
def test_float32_is_float64_rounded(normalize: Normalizer, size: int, scale: float) -> None:
    scores, visible = draw(4, size, size, scale=scale, dtype=torch.float32), causal(size)
    narrow, narrow_gradient = weights_and_gradient(normalize, scores, visible)
    wide, wide_gradient = weights_and_gradient(normalize, scores.double(), visible)
    largest = max(1.0, float(wide.max()))
    torch.testing.assert_close(narrow.double(), wide, rtol=0, atol=1e-6 * largest)
    # A key at the edge of the support may fall on its other side, where the slope is steep.
    near = (narrow_gradient - wide_gradient).abs() < 1e-5
    assert near.double().mean() > 0.99


# Gradients.


@every
def test_the_gradient_is_that_of_finite_differences_and_so_is_the_next(normalize: Normalizer) -> None:
    visible = masks()["causal-and-padded"]
    scores = draw(7, 7, seed=3).requires_grad_()

    def weigh(scores: Tensor) -> Tensor:
        return normalize(scores, visible)

    assert torch.autograd.gradcheck(weigh, (scores,), atol=1e-6, rtol=1e-4)
    assert torch.autograd.gradgradcheck(weigh, (scores,), atol=1e-5, rtol=1e-3)


def test_a_clipped_weight_has_no_gradient() -> None:
    _, gradient = weights_and_gradient(ClippedSoftmax(), torch.tensor([[9.0, 0.0, -1.0]]), seen(3))
    assert gradient.eq(0).all()


@alphas
def test_a_key_outside_the_support_has_no_gradient(alpha: float) -> None:
    weights, gradient = weights_and_gradient(Entmax(alpha), torch.tensor([[0.2, 0.0, -2000.0]]), seen(3))
    assert (weights[0] > 0).tolist() == [True, True, False]
    assert gradient[0, :2].ne(0).all()
    assert gradient[0, 2] == 0


# Masks.


@every
@masked
def test_what_is_invisible_has_no_weight_no_gradient_and_no_effect(normalize: Normalizer, visible: Tensor) -> None:
    values = torch.tensor([1e4, -1e30, 0.0, math.inf, -math.inf, math.nan], dtype=torch.float64)
    scores, whole, hidden = draw(6, 7, 7), visible.broadcast_to(6, 7, 7), values[:, None, None]
    weights, gradient = weights_and_gradient(normalize, torch.where(whole, scores, hidden), visible)
    assert weights[~whole].eq(0).all()
    assert gradient[~whole].eq(0).all()
    plain, plain_gradient = weights_and_gradient(normalize, scores, visible)
    assert torch.equal(weights, plain)
    assert torch.equal(gradient, plain_gradient)
    assert torch.isfinite(gradient).all()


@every
@masked
def test_a_row_weighs_its_visible_keys_as_if_there_were_no_others(normalize: Normalizer, visible: Tensor) -> None:
    scores = draw(7, 7)
    weights, gradient = weights_and_gradient(normalize, scores, visible)
    for i, row in enumerate(visible.broadcast_to(7, 7)):
        if row.any():
            alone = scores[i, row].requires_grad_()
            expected = normalize(alone, seen(len(alone)))
            torch.testing.assert_close(weights[i, row], expected, rtol=1e-13, atol=1e-15)
            (expected_gradient,) = torch.autograd.grad(expected, alone, draw(7, 7, seed=1)[i, row])
            torch.testing.assert_close(gradient[i, row], expected_gradient, rtol=1e-12, atol=1e-14)


@every
def test_a_row_that_sees_nothing_is_zero_without_a_nan_on_the_way_back(normalize: Normalizer) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Raises at the first NaN inside the backward, also at one that a mask would hide later.
        with torch.autograd.detect_anomaly():
            scores = draw(3, 5).requires_grad_()
            weights = normalize(scores, ~seen(3, 5))
            weights.sum().backward()
    assert weights.eq(0).all()
    assert scores.grad is not None
    assert scores.grad.eq(0).all()


@summing
def test_the_only_visible_key_takes_all(normalize: Normalizer) -> None:
    weights, gradient = weights_and_gradient(normalize, draw(7, 7), torch.eye(7, dtype=torch.bool))
    assert torch.equal(weights, torch.eye(7, dtype=torch.float64))
    assert gradient.eq(0).all()


@every
def test_a_visible_nan_shows(normalize: Normalizer) -> None:
    weights = normalize(torch.tensor([[0.0, math.nan, 1.0], [0.0, 1.0, 2.0]]), seen(3))
    assert weights[0].isnan().any()
    assert weights[1].isfinite().all()


@every
def test_a_mask_that_is_not_boolean_is_refused(normalize: Normalizer) -> None:
    with pytest.raises(RuntimeError, match="boolean"):
        normalize(draw(3, 3), torch.ones(3, 3))


# Size of the scores, and what moves them all.


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("row", [(1e4, -1e4, 0.0), (-1e4, -1e4, -1e4), (1e4, 1e4, -1e4), (1e4, 9999.0, 9998.5)])
def test_extreme_scores_give_finite_weights_and_gradients(
    normalize: Normalizer, row: tuple[float, ...], dtype: torch.dtype
) -> None:
    weights, gradient = weights_and_gradient(normalize, torch.tensor([row], dtype=dtype), seen(3))
    assert weights.isfinite().all()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("normalize", SHIFTABLE, ids=lambda one: one.name)
@pytest.mark.parametrize("shift", [-1e4, -3.0, 64.0, 1e4])
def test_a_shift_of_all_scores_changes_nothing(normalize: Normalizer, shift: float) -> None:
    scores = draw(7, 7)
    torch.testing.assert_close(
        normalize(scores + shift, causal(7)), normalize(scores, causal(7)), rtol=1e-8, atol=1e-11
    )


@pytest.mark.parametrize("name", ["softmax1", "relu"])
def test_a_shift_downwards_lets_go_of_every_key(name: str) -> None:
    scores, normalize = draw(7, 7), normalizer(name)
    assert (normalize(scores, causal(7)) - normalize(scores - 1, causal(7))).max() > 0.1
    assert normalize(scores - 1e4, causal(7)).eq(0).all()


def test_softmax1_is_softmax_with_a_sink_whose_logit_is_zero() -> None:
    scores = draw(7, 7, scale=3)
    extended = Softmax()(torch.cat([torch.zeros(7, 1, dtype=torch.float64), scores], dim=-1), seen(8))
    torch.testing.assert_close(normalizer("softmax1")(scores, seen(7)), extended[:, 1:])


def test_softmax1_without_a_score_above_minus_the_largest_is_softmax() -> None:
    scores = draw(7, 7) + 1e4
    torch.testing.assert_close(normalizer("softmax1")(scores, causal(7)), Softmax()(scores, causal(7)))


def test_relu_divides_by_the_visible_keys_but_one() -> None:
    weights = normalizer("relu")(torch.full((4, 4), 6.0), causal(4))
    assert weights.tolist() == [[6, 0, 0, 0], [6, 6, 0, 0], [3, 3, 3, 0], [2, 2, 2, 2]]


# The family.


def test_the_ends_of_entmax_are_softmax_and_sparsemax() -> None:
    scores = draw(9, 9)
    assert torch.equal(Entmax(1)(scores, causal(9)), Softmax()(scores, causal(9)))
    assert torch.equal(Entmax(2)(scores, causal(9)), Sparsemax()(scores, causal(9)))


@pytest.mark.parametrize(
    ("alpha", "neighbour"), [(1.0, 1 + 1e-9), (1.5, 1.5 - 1e-9), (1.5, 1.5 + 1e-9), (2.0, 2 - 1e-9)]
)
def test_entmax_goes_over_into_its_special_cases(alpha: float, neighbour: float) -> None:
    for size in SIZES:
        scores = draw(3, size, size, scale=2)
        special, special_gradient = weights_and_gradient(Entmax(alpha), scores, causal(size))
        weights, gradient = weights_and_gradient(Entmax(neighbour), scores, causal(size))
        torch.testing.assert_close(weights, special, rtol=0, atol=1e-7)
        torch.testing.assert_close(gradient, special_gradient, rtol=0, atol=1e-6)


def test_the_support_shrinks_as_alpha_grows() -> None:
    scores = draw(50, 65, scale=2)
    sizes = [int((Entmax(alpha)(scores, seen(65)) > 0).sum()) for alpha in (1, 1.25, 1.5, 1.75, 2)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == scores.numel()
    assert len(set(sizes)) == len(sizes)


def test_clipped_softmax_reaches_zero_and_one() -> None:
    assert ClippedSoftmax()(torch.tensor([[5.0, 0.0, 0.0]]), seen(3)).tolist() == [[1, 0, 0]]


def test_clipped_softmax_that_clips_nothing_is_softmax() -> None:
    scores = draw(7, 7)
    torch.testing.assert_close(ClippedSoftmax(0, 1)(scores, causal(7)), Softmax()(scores, causal(7)))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["sparsemax", "entmax-1.5", "entmax-1.25", "entmax-1.75", "entmax-1.01"])
def test_values_and_gradients_are_those_of_the_entmax_package(name: str, size: int) -> None:
    entmax = pytest.importorskip("entmax")
    peers = {"sparsemax": entmax.sparsemax, "entmax-1.5": entmax.entmax15}

    def bisect(scores: Tensor) -> Tensor:
        weights: Tensor = entmax.entmax_bisect(scores, float(name.removeprefix("entmax-")), n_iter=60)
        return weights

    scores, visible = draw(3, size, size, scale=2), causal(size)
    theirs_in = scores.masked_fill(~visible, -1e9).requires_grad_()
    theirs = peers.get(name, bisect)(theirs_in)
    (theirs_gradient,) = torch.autograd.grad(theirs, theirs_in, draw(3, size, size, seed=1))
    weights, gradient = weights_and_gradient(normalizer(name), scores, visible)
    torch.testing.assert_close(weights, theirs, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient, theirs_gradient, rtol=0, atol=1e-11)


# Shapes and types.


@every
@sizes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_float32_rounded_once(normalize: Normalizer, size: int, dtype: torch.dtype) -> None:
    scores = draw(size, size, dtype=dtype)
    weights, gradient = weights_and_gradient(normalize, scores, causal(size))
    assert weights.dtype == gradient.dtype == dtype
    wide = normalize(scores.float(), causal(size))
    assert torch.equal(weights, wide.to(dtype))
    assert gradient.isfinite().all()


@every
def test_rows_of_a_batch_do_not_meet(normalize: Normalizer) -> None:
    scores, visible = draw(2, 3, 4, 5), draw(2, 1, 4, 5, seed=1) > -0.5
    weights = normalize(scores, visible)
    assert weights.shape == scores.shape
    for index in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(4)).tolist():
        batch, head, query = index
        alone = normalize(scores[batch, head, query], visible[batch, 0, query])
        torch.testing.assert_close(weights[batch, head, query], alone, rtol=1e-13, atol=1e-15)


@every
def test_scores_that_do_not_lie_in_one_piece_are_read_right(normalize: Normalizer) -> None:
    scores = draw(5, 2, 5).transpose(0, 1)
    assert torch.equal(normalize(scores, causal(5)), normalize(scores.contiguous(), causal(5)))


# Names.


@every
def test_a_name_gives_its_normalizer(normalize: Normalizer) -> None:
    assert normalizer(normalize.name) == normalize


def test_names_are_the_six() -> None:
    assert NAMES == ("softmax", "softmax1", "relu", "clipped-softmax", "sparsemax", "entmax-1.5")
    assert Entmax(1.25).name == "entmax-1.25"
    assert Entmax(2).name == Entmax(2.0).name == "entmax-2"


@pytest.mark.parametrize("name", ["", "Softmax", "softmax2", "entmax", "entmax-", "entmax-nan", "entmax-1_5", "a\nb"])
def test_an_unknown_name_is_one_line_that_lists_the_names(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        normalizer(name)
    message = str(caught.value)
    assert "\n" not in message
    assert all(known in message for known in NAMES)


@pytest.mark.parametrize("alpha", [0.0, 0.999, 2.001, -1.5, math.nan, math.inf])
def test_an_alpha_out_of_range_is_refused(alpha: float) -> None:
    with pytest.raises(UsageError, match=r"alpha goes from 1 .* to 2"):
        Entmax(alpha)


def test_an_alpha_out_of_range_is_refused_by_name_too() -> None:
    with pytest.raises(UsageError, match="entmax-3"):
        normalizer("entmax-3")


@pytest.mark.parametrize(("low", "high"), [(0.1, 1.0), (0.0, 0.9), (math.nan, 1.0)])
def test_clip_bounds_inside_the_unit_interval_are_refused(low: float, high: float) -> None:
    with pytest.raises(UsageError, match="low is at most 0 and high at least 1"):
        ClippedSoftmax(low, high)
