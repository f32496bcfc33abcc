"""What the trigger experiments found, as tables and pictures."""

from collections.abc import Sequence
from typing import Any

from quantsink.eval.lab.quantize import BLOCK, FIXED
from quantsink.eval.lab.tables import Spread, Table, canvas, percent, png
from quantsink.eval.lab.trigger import TOLERANCE
from quantsink.eval.lab.trigger_runs import LONG, METHODS, RANDOM, SINK, STRONG, TriggerRun, alone

Group = list[TriggerRun]
"""The runs of one variant, a seed each."""
DARK, PALE = "#1f6f8b", "#c8553d"


def groups(runs: Sequence[TriggerRun], deep: bool, own: bool = True) -> list[tuple[str, Group]]:
    """(variant, its runs), in the order of the experiment."""
    found: dict[str, Group] = {}
    for run in runs:
        if (run.layers > 1) == deep and run.own == own:
            found.setdefault(run.name, []).append(run)
    return list(found.items())


def seeds(group: Group) -> str:
    return f"{len(group)} seed" + ("s" if len(group) != 1 else "")


def trigger_tables(runs: Sequence[TriggerRun]) -> list[Table]:
    return [one_layer(runs), deep_layers(runs), eight_bits(runs), where_from(runs), calibrated(runs)]


def one_layer(runs: Sequence[TriggerRun]) -> Table:
    rows = []
    for own in (True, False):
        for name, group in groups(runs, deep=False, own=own):
            head = [run.heads[0] for run in group]
            entropies = [h.entropy for h in head if h.entropy is not None]
            rows.append(
                (
                    f"`{name}`" + ("" if own else ", own content left out"),
                    Spread.of(h.bos for h in head).text(4),
                    Spread.of(h.learned for h in head).text(4) if any(h.learned for h in head) else "",
                    Spread.of(h.total for h in head).text(),
                    Spread.of(entropies).text() if entropies else "no weight",
                    Spread.of(h.largest for h in head).text(),
                    Spread.of(h.smallest for h in head).short(),
                    _solved(group),
                    Spread.of(run.solved.error_trigger for run in group).short(),
                )
            )
    some = groups(runs, deep=False)[0][1]
    return Table(
        "One layer, one head",
        ("variant", "weight on BOS", "on a learnable sink", "row's sum", "entropy", "largest", "smallest",
         "solved (worst seed)", "error at the trigger"),
        tuple(rows),
        (
            f"L = {some[0].length}, {some[0].steps} steps, {seeds(some)}, mean ± standard deviation over seeds; "
            "weights at plain tokens of fresh sequences.",
            f"Solved: share of positions with every number within {TOLERANCE}, the worse of trigger and other "
            "positions; in brackets the worst seed.",
        ),
    )  # fmt: skip


def _solved(group: Group) -> str:
    return (
        f"{percent(Spread.of(run.solved.share for run in group).mean)} ({percent(min(r.solved.share for r in group))})"
    )


def deep_layers(runs: Sequence[TriggerRun]) -> Table:
    rows = []
    for name, group in groups(runs, deep=True):
        layers = [Spread.of(run.strong[layer] for run in group) for layer in range(len(group[0].strong))]
        total = Spread.of(sum(run.strong) for run in group)
        rows.append(
            (
                f"`{name}`",
                total.text(2),
                f"{total.low:.2f} to {total.high:.2f}",
                *(layer.text(2) for layer in layers),
                _solved(group),
            )
        )
    first = groups(runs, deep=True)[0][1]
    count = len(first[0].strong)
    return Table(
        f"{count} layers of {len(first[0].heads) // count} heads: strong sink heads a sequence",
        ("variant", "all layers", "seeds from - to", *(f"layer {i}" for i in range(count)), "solved (worst seed)"),
        tuple(rows),
        (
            f"Strong: at least {STRONG} of the weight of a sequence's plain tokens on its BOS. L = {first[0].length}, "
            f"{first[0].steps} steps, {seeds(first)}.",
        ),
    )


def eight_bits(runs: Sequence[TriggerRun]) -> Table:
    """How much of the error that `block` leaves goes when the sinks are split off, and when as many others are."""
    rows = []
    for deep in (False, True):
        for name, group in groups(runs, deep):
            errors = {method: Spread.of(run.errors[method] for run in group) for method in METHODS}
            closed = Spread.of(1 - run.errors[SINK] / run.errors[BLOCK] for run in group)
            control = Spread.of(1 - run.errors[RANDOM] / run.errors[BLOCK] for run in group)
            rows.append(
                (
                    f"`{name}`" + (f", {len(group[0].strong)} layers" if deep else ""),
                    *(errors[method].short() for method in METHODS),
                    f"{percent(closed.mean)} ({percent(closed.low)} to {percent(closed.high)})",
                    percent(control.mean),
                    percent(Spread.of(run.solved_8_bits[FIXED] for run in group).mean),
                    percent(Spread.of(run.solved_8_bits[BLOCK] for run in group).mean),
                    percent(Spread.of(run.solved_long for run in group).mean),
                )
            )
    return Table(
        "Scores, weights and values in 8 bits",
        ("variant", *METHODS, "closed by `sink` (from - to)", "by `random`", "solved, `fixed`", "`block`", "float64"),
        tuple(rows),
        (
            f"Error of the model's output relative to float64's norm, {runs[0].long_sequences} sequences a seed of L = "
            f"{LONG}, longer than it was trained for.",
            "fixed: weights on a grid of 1/127; row: of the row's largest; block: of the largest among 64 keys; sink: "
            "as block, with BOS and learnable sinks exact; random: as block, with as many other keys exact. Values "
            "have a scale per channel over the same keys: all of them, or 64.",
        ),
    )


def where_from(runs: Sequence[TriggerRun]) -> Table:
    rows = []
    for deep in (False, True):
        for name, group in groups(runs, deep):
            rows.append(
                (
                    f"`{name}`" + (f", {len(group[0].strong)} layers" if deep else ""),
                    *(Spread.of(run.parts[part] for run in group).short() for part in alone(1)),
                    Spread.of(run.errors[BLOCK] for run in group).short(),
                )
            )
    return Table(
        "Where the error comes from",
        ("variant", *alone(1), "all three"),
        tuple(rows),
        ("As above with `block`, but only what the column names in 8 bits.",),
    )


def calibrated(runs: Sequence[TriggerRun]) -> Table:
    rows = []
    for deep in (False, True):
        for name, group in groups(runs, deep):
            found = [run.calibrated for run in group if run.calibrated is not None]
            label = f"`{name}`" + (f", {len(group[0].strong)} layers" if deep else "")
            if not found:
                rows.append((label, "refused", "", "", "", ""))
                continue
            rows.append(
                (
                    label,
                    f"{sum(len(c.found) for c in found)} of {sum(len(run.heads) for run in group)}",
                    f"{sum(len(c.true) for c in found)}",
                    "yes" if all(c.found == c.true for c in found) else "no",
                    f"{max(c.largest_difference for c in found):.1e}",
                    f"{Spread.of(c.error for c in found).short()}, {percent(min(c.solved for c in found))} solved",
                )
            )
    return Table(
        "quantsink's own calibration and `w8a8`",
        ("variant", "heads found", "true sink heads", "the same", "largest difference of BOS mass", "`w8a8`: error"),
        tuple(rows),
        (
            "True: recorded weights give BOS 0.3 or more; counts over all seeds. The last column quantizes linear "
            "layers too.",
            "Refused: transformers' attention interface cannot express it, and calibration says so.",
        ),
    )


def trigger_plots(runs: Sequence[TriggerRun]) -> dict[str, bytes]:
    return {"trigger_bos.png": _bos(runs), "trigger_8_bits.png": _errors(runs)}


def _bos(runs: Sequence[TriggerRun]) -> bytes:
    found = groups(runs, deep=False)
    figure = canvas(9, 4.4)
    axes = figure.subplots()
    for y, (_, group) in enumerate(reversed(found)):
        for value, color, label in (
            ([run.heads[0].bos for run in group], DARK, "on BOS"),
            ([run.heads[0].bos + run.heads[0].learned for run in group], PALE, "with learnable sinks"),
        ):
            if color == PALE and not any(run.heads[0].learned for run in group):
                continue
            axes.plot(value, [y] * len(value), "o", color=color, markersize=6, alpha=0.7, label=label)
    axes.set_yticks(range(len(found)), [name for name, _ in reversed(found)])
    axes.set_xlim(-0.03, 1.03)
    axes.set_xlabel("weight of plain tokens on the sink; one dot a seed")
    axes.grid(True, axis="x", color="#e6e6e6")
    axes.set_axisbelow(True)
    _legend(figure, axes)
    figure.suptitle("One-layer trigger task: where idle weight goes", fontsize=11)
    return png(figure)


def _errors(runs: Sequence[TriggerRun]) -> bytes:
    found = [(name, group) for deep in (False, True) for name, group in groups(runs, deep)]
    names = [name + (", 4 layers" if group[0].layers > 1 else "") for name, group in found]
    figure = canvas(9, 5)
    axes = figure.subplots()
    colors = {"fixed": "#b8b8b8", "row": "#8a8a8a", "block": "#c8553d", "sink": "#1f6f8b", "random": "#e0a458"}
    for y, (_, group) in enumerate(reversed(found)):
        for place, method in enumerate(METHODS):
            values = [run.errors[method] for run in group]
            axes.plot(
                values,
                [y + 0.14 * (2 - place)] * len(values),
                "s" if method == RANDOM else "o",
                color=colors[method],
                markersize=5,
                markerfacecolor="white" if method == RANDOM else colors[method],
                label=method if y == 0 else None,
            )
    axes.set_yticks(range(len(found)), list(reversed(names)))
    axes.set_xscale("log")
    axes.set_xlabel(f"error of the output in 8 bits, relative to float64 (log); {LONG} tokens, one dot a seed")
    axes.grid(True, axis="x", color="#e6e6e6")
    axes.set_axisbelow(True)
    _legend(figure, axes)
    figure.suptitle("Which attention needs its sinks kept exact", fontsize=11)
    return png(figure)


def _legend(figure: Any, axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.legend(unique.values(), unique.keys(), loc="outside lower center", ncols=6, frameon=False, fontsize=9)
