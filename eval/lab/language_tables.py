"""What the language experiments found, as tables and pictures."""

from collections.abc import Iterable, Sequence
from typing import Any

from quantsink.calibration.collect import FIRST_ROW
from quantsink.eval.lab.language import HEADS, LAYERS, LENGTH, WIDTH, Bucket, Training
from quantsink.eval.lab.language_runs import (
    KEYS,
    LONG,
    NEWEST,
    PAIRS,
    SOFTMAX,
    STREAM,
    TUNED,
    TUNED_SINK,
    VARIANTS,
    WITH_FIRST,
    LanguageResult,
    LanguageRun,
    claims,
)
from quantsink.eval.lab.quantize import BLOCK
from quantsink.eval.lab.tables import Spread, Table, canvas, png
from quantsink.eval.lab.trigger_runs import METHODS, RANDOM, SINK, SINK_HEAD, STRONG

Group = list[LanguageRun]
"""The runs of one variant, a seed each."""
COLORS = ("#222222", "#c8553d", "#1f6f8b", "#7a5c99", "#d9a13b", "#6b8f3c")
MARKS = ("o", "s", "^", "D", "v", "P")
STYLES = ("-", "--", "-", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))


def language_tables(result: LanguageResult) -> list[Table]:
    return [
        claim_table(result),
        perplexity_table(result),
        noise_table(result),
        sink_table(result),
        eight_bit_table(result),
        streaming_table(result),
        streaming_pairs(result),
    ]


def groups(result: LanguageResult) -> list[tuple[str, Group]]:
    """(variant, its runs by seed), in the order of the experiment."""
    return [(spec.name, found) for spec in VARIANTS if (found := result.of(spec.name))]


def setting(result: LanguageResult) -> str:
    training = Training()
    seeds = result.scale.seeds
    return (
        f"{LAYERS} layers, {HEADS} heads, width {WIDTH}, rotary; {result.scale.steps} steps of {training.sequences} x "
        f"{LENGTH} bytes; {seeds} seed{'s' * (seeds != 1)}, mean ± standard deviation over seeds; all variants of a "
        "seed share initial weights and batches."
    )


def read(result: LanguageResult) -> str:
    facts = result.text
    return (
        f"Trained on {facts.train:,} bytes of `builtin:prose`; {facts.cut:,} more were cut out: passages that "
        f"`builtin:heldout` ({facts.heldout:,} bytes, the text that is measured) has too, and rests under a window."
    )


def claim_table(result: LanguageResult) -> Table:
    rows = []
    for claim in claims(result):
        rows.append(
            (
                claim.name,
                claim.published,
                claim.softmax.short(),
                claim.softmax1.short(),
                _changes(claim.changes),
                _changes([_mean(claim.changes)]),
                claim.verdict or "-",
            )
        )
    return Table(
        "softmax1 against softmax: what was published, and what is seen here",
        ("measure", "published of softmax1", "softmax", "softmax1", "change, pair by pair", "mean", "verdict here"),
        tuple(rows),
        (
            setting(result),
            read(result),
            "Change: of softmax1 from softmax, a pair for each seed; of the cost, a pair for each of 5 rounds of "
            "processor time, the two taking turns in one process.",
            "A gain is reproduced if all pairs are below 0 and their mean has its size (the lower end), not reproduced "
            "if no pair has its size; a cost is reproduced if no pair exceeds it, not if all do; else, and with fewer "
            f"than {PAIRS} pairs, undecided.",
            "Models of this size can contradict such a claim for themselves or agree with it; they prove and refute "
            "nothing about large ones.",
        ),
        left=2,
    )


def _changes(values: Iterable[float]) -> str:
    return ", ".join(f"{100 * value:+.1f}" for value in values) + "%"


def perplexity_table(result: LanguageResult) -> Table:
    found = groups(result)
    first = found[0][1][0]
    rows = [
        (f"`{name}`", *(Spread.of(run.perplexity(at.length) for run in group).text() for at in first.lengths),
         *(_bucket(group, bucket) for bucket in first.lengths[-1].buckets))
        for name, group in found
    ]  # fmt: skip
    scored = " and ".join(f"{at.scored:,} at {at.length}" for at in first.lengths)
    return Table(
        "Perplexity per byte on held-out text",
        ("variant", *(f"{at.length} ({at.length // LENGTH}x)" for at in first.lengths),
         *(f"{b.start}-{b.end - 1}" for b in first.lengths[-1].buckets)),
        tuple(rows),
        (
            setting(result),
            f"Whole windows, each with its BOS, every position scored: bytes {scored}. On the right, positions of the "
            f"windows of {first.lengths[-1].length}.",
            f"Rotary positions from {LENGTH} on were never trained, and every variant pays for that by itself.",
        ),
    )  # fmt: skip


def _bucket(group: Group, bucket: Bucket) -> str:
    same = (b for run in group for b in run.lengths[-1].buckets if b.start == bucket.start)
    return Spread.of(b.perplexity for b in same).text(2)


def noise_table(result: LanguageResult) -> Table:
    rows = []
    for name, group in groups(result):
        for index, look in enumerate(group[0].noise):
            noises = [run.noise[index] for run in group]
            rows.append(
                (
                    f"`{name}`",
                    str(look.step),
                    Spread.of(n.trace for n in noises).short(),
                    Spread.of(n.mean_square for n in noises).short(),
                    Spread.of(n.relative for n in noises).short(),
                )
            )
    return Table(
        "Variance of the gradient during training",
        ("variant", "step", "trace", "‖mean‖²", "trace / ‖true‖²"),
        tuple(rows),
        (
            setting(result),
            f"Trace of the sample covariance of the gradient of all parameters over {result.scale.batches} batches of "
            "the training's size at fixed weights, unclipped; the same batches for both variants and at every step.",
            "‖mean‖² holds trace / batches of noise besides the true gradient's norm; ‖true‖² is without it (n/a: "
            "nothing is left).",
        ),
        left=1,
    )


def sink_table(result: LanguageResult) -> Table:
    rows = []
    for name, group in groups(result):
        rows.append(
            (
                f"`{name}`",
                Spread.of(_mean(h.bos for h in run.heads) for run in group).text(),
                Spread.of(max(h.bos for h in run.heads) for run in group).text(2),
                Spread.of(_mean(h.learned for h in run.heads) for run in group).text(),
                Spread.of(_mean(h.total for h in run.heads) for run in group).text(),
                _counts(group, SINK_HEAD),
                _counts(group, STRONG),
                Spread.of(max(a.bos for a in run.activations) for run in group).text(1),
                Spread.of(max(a.others for a in run.activations) for run in group).text(1),
                Spread.of(run.loss for run in group).text(),
            )
        )
    return Table(
        "Sink heads and large activations",
        ("variant", "BOS mass, mean of heads", "of the strongest head", "learnable sink", "row's sum",
         f"sink heads (>= {SINK_HEAD})", f">= {STRONG}", "largest activation at BOS", "elsewhere", "training loss"),
        tuple(rows),
        (
            setting(result),
            f"Queries from {FIRST_ROW} on in {result.scale.looked} held-out windows of {LENGTH}. Sink heads, of "
            f"{LAYERS * HEADS} and seed by seed: weight on BOS and learnable sinks together.",
            "Activation: largest absolute number of the residual stream behind any block. Loss in nats per byte.",
            f"q_proj, k_proj and learnable keys learn at {Training().attention_rate:g} times the rate, chosen so that "
            "sink heads appear in so few steps.",
        ),
    )  # fmt: skip


def _counts(group: Group, least: float) -> str:
    return ", ".join(str(run.sink_heads(least)) for run in group)


def eight_bit_table(result: LanguageResult) -> Table:
    rows = []
    for name, group in groups(result):
        rows.append(
            (
                f"`{name}`",
                *(Spread.of(run.kl(method) for run in group).short() for method in METHODS),
                *(Spread.of(1 - run.kl(method) / run.kl(BLOCK) for run in group).text(2) for method in (SINK, RANDOM)),
                *(Spread.of(_ratio(run, method) for run in group).text(5) for method in (BLOCK, SINK)),
            )
        )
    return Table(
        "Attention in 8 bits: KL to float64, nats per byte",
        ("variant", *METHODS, f"gap closed, {SINK}", f"gap closed, {RANDOM}", f"perplexity ratio, {BLOCK}",
         f"perplexity ratio, {SINK}"),
        tuple(rows),
        (
            setting(result),
            f"{result.scale.quantized} held-out windows of {LONG}, every byte scored. {SINK}: the BOS key and "
            f"learnable sinks are exact; {RANDOM}: as many other keys.",
            f"Gap closed: share of {BLOCK}'s KL that is gone, seed by seed; 1 is all of it, below 0 is worse than "
            f"{BLOCK}.",
        ),
    )  # fmt: skip


def _ratio(run: LanguageRun, method: str) -> float:
    return next(found.ratio for found in run.eight_bits if found.method == method)


def streaming_table(result: LanguageResult) -> Table:
    softmax = result.of(SOFTMAX.name)
    wide = _wide([run.streaming[0].buckets for run in softmax])
    rows = []
    for index, curve in enumerate(softmax[0].streaming):
        curves = [run.streaming[index] for run in softmax]
        places = _wide([one.buckets for one in curves])
        rows.append(
            (curve.name, Spread.of(c.beyond for c in curves).text(), *(Spread.of(v).text(2) for _, _, v in places))
        )
    return Table(
        "A softmax model in a streaming cache: perplexity per byte by position",
        ("cache", f"from {LENGTH} on", *(f"{start}-{end - 1}" for start, end, _ in wide)),
        tuple(rows),
        (
            setting(result),
            f"{result.scale.streamed} held-out windows of {STREAM}, {STREAM // LENGTH}x the trained length; all but "
            f"full attention see {KEYS} keys, a learnable sink counted in.",
            f"Full attention meets distances from {LENGTH} on that were never trained: its rise is that of rotary "
            "positions, not of lost keys. The others never look so far, since positions count inside the cache unless "
            "it says otherwise.",
            f"Fine-tuned: {result.scale.tuned} steps through the same cache, all weights, at a tenth of the learning "
            "rate; with a learnable sink key and value per head or, the control, without.",
        ),
    )


def _wide(groups: Sequence[Sequence[Bucket]]) -> list[tuple[int, int, list[float]]]:
    """The first two buckets and then every third: (start, end, perplexity of each seed)."""
    chosen = [index for index in range(len(groups[0])) if index < 2 or index % 3 == 0]
    return [(groups[0][i].start, groups[0][i].end, [g[i].perplexity for g in groups]) for i in chosen]


def streaming_pairs(result: LanguageResult) -> Table:
    """What each step buys, seed by seed."""
    softmax = result.of(SOFTMAX.name)
    pairs = (
        ("first tokens kept", NEWEST, WITH_FIRST),
        ("fine-tuning alone", NEWEST, TUNED),
        ("fine-tuning with a learnable sink", NEWEST, TUNED_SINK),
        ("the learnable sink, both fine-tuned", TUNED, TUNED_SINK),
        ("learnable sink fine-tuned, against first tokens kept", WITH_FIRST, TUNED_SINK),
    )
    rows = []
    for name, before, after in pairs:
        changes = [_beyond(run, after) / _beyond(run, before) - 1 for run in softmax]
        rows.append((name, before, after, _changes(changes), _changes([_mean(changes)])))
    return Table(
        f"Streaming: change of perplexity from position {LENGTH} on, seed by seed",
        ("what", "from", "to", "change", "mean"),
        tuple(rows),
        ("Negative is better. Sink heads of these models are counted in the table of sink heads, in the same order.",),
        left=3,
    )


def _beyond(run: LanguageRun, name: str) -> float:
    return next(curve.beyond for curve in run.streaming if curve.name == name)


def _mean(values: Iterable[float]) -> float:
    return Spread.of(values).mean


def language_plots(result: LanguageResult) -> dict[str, bytes]:
    return {
        "language_positions.png": _positions(result),
        "language_sinks.png": _sinks(result),
        "language_8_bits.png": _quantized(result),
        "language_streaming.png": _streaming(result),
    }


def _figure(width: float, height: float) -> tuple[Any, Any]:
    figure = canvas(width, height)
    return figure, figure.subplots()


def _positions(result: LanguageResult) -> bytes:
    figure, axes = _figure(9, 5)
    for (name, group), color, style in zip(groups(result), COLORS, STYLES, strict=False):
        _line(axes, [run.lengths[-1].buckets for run in group], name, color, style)
    _trained(axes)
    axes.set_xlabel(f"position in a held-out window of {LONG} bytes")
    return _finished(figure, axes, "Perplexity per byte beyond the trained length", 5)


def _streaming(result: LanguageResult) -> bytes:
    figure, axes = _figure(10, 5.6)
    softmax = result.of(SOFTMAX.name)
    for index, (color, style) in enumerate(zip(COLORS, STYLES, strict=True)):
        curves = [run.streaming[index] for run in softmax]
        _line(axes, [curve.buckets for curve in curves], curves[0].name, color, style)
    _trained(axes)
    axes.set_xlabel(f"position in a held-out window of {STREAM} bytes; a point for each {KEYS}")
    return _finished(figure, axes, f"A softmax model in a streaming cache of {KEYS} keys", 2)


def _line(axes: Any, groups: Sequence[Sequence[Bucket]], label: str, color: str, style: Any) -> None:
    """Mean over seeds, and a band from the smallest to the largest."""
    middle = [(bucket.start + bucket.end) / 2 for bucket in groups[0]]
    spreads = [Spread.of(b.perplexity for b in same) for same in zip(*groups, strict=True)]
    axes.fill_between(middle, [s.low for s in spreads], [s.high for s in spreads], color=color, alpha=0.10, linewidth=0)
    axes.plot(middle, [s.mean for s in spreads], color=color, linestyle=style, marker="o", markersize=3.5, label=label)


def _trained(axes: Any) -> None:
    axes.axvline(LENGTH, color="#888888", linewidth=1, linestyle="--")
    axes.annotate(
        f"trained length, {LENGTH}",
        xy=(LENGTH, 1),
        xycoords=("data", "axes fraction"),
        xytext=(5, -4),
        textcoords="offset points",
        fontsize=9,
        va="top",
        color="#222222",
    )
    axes.set_ylabel("perplexity per byte (log; lower is better)")
    axes.set_yscale("log")
    axes.margins(y=0.14)
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 6, 8)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _sinks(result: LanguageResult) -> bytes:
    figure, axes = _figure(9, 4.4)
    found = list(reversed(groups(result)))
    for y, (_, group) in enumerate(found):
        seeds = len(group)
        for index, run in enumerate(group):
            place = y + 0.5 * (index - (seeds - 1) / 2) / max(seeds, 2)
            for mass, color, mark, label in (
                ([h.bos for h in run.heads], COLORS[2], "o", "on BOS"),
                ([h.learned for h in run.heads], COLORS[1], "x", "on the learnable sink"),
            ):
                if any(mass):
                    axes.plot(mass, [place] * len(mass), mark, color=color, markersize=5, alpha=0.65, label=label)
    axes.set_yticks(range(len(found)), [name for name, _ in found])
    for least in (SINK_HEAD, STRONG):
        axes.axvline(least, color="#888888", linewidth=1, linestyle="--")
    axes.set_xlim(-0.03, 1.03)
    axes.set_xlabel("mean weight; a mark for each head, a row for each seed; dashed: sink heads, strong ones")
    return _finished(figure, axes, "Where idle weight goes in small language models", 2, grid="x")


def _quantized(result: LanguageResult) -> bytes:
    figure, axes = _figure(9, 4.6)
    found = list(reversed(groups(result)))
    for y, (_, group) in enumerate(found):
        for index, method in enumerate(METHODS):
            values = [run.kl(method) for run in group]
            place = y + 0.14 * ((len(METHODS) - 1) / 2 - index)
            axes.plot(
                values, [place] * len(values), MARKS[index], color=COLORS[index], markersize=5, alpha=0.75, label=method
            )
    axes.set_yticks(range(len(found)), [name for name, _ in found])
    axes.set_xscale("log")
    axes.set_xlabel(f"KL to float64, nats per byte (log); {LONG} bytes, a mark for each seed")
    return _finished(figure, axes, "Attention in 8 bits", len(METHODS), grid="x")


def _finished(figure: Any, axes: Any, title: str, columns: int, grid: str = "y") -> bytes:
    axes.grid(True, which="major", axis=grid, color="#e6e6e6")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(unique.values(), unique.keys(), loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=11)
    return png(figure)
