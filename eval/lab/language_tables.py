"""The language experiments' tables and pictures."""

from collections.abc import Mapping, Sequence

from quantsink.calibration.collect import FIRST_ROW
from quantsink.eval.lab import language, language_runs, measures
from quantsink.eval.lab.language import HEADS, LAYERS, LENGTH, WIDTH, Bucket, Training
from quantsink.eval.lab.language_runs import KEYS, LONG, STREAM, LanguageResult, LanguageRun, claims
from quantsink.eval.lab.measures import SINK_HEAD, STRONG
from quantsink.eval.lab.plots import COLORS, Curve, Dots, curve_plot, dot_plot, method_dots
from quantsink.eval.lab.seeds import Group, plural
from quantsink.eval.lab.tables import Table, read_tables


def variants(result: LanguageResult) -> list[Group[LanguageRun]]:
    """In the order of the experiment."""
    groups = (Group(f"`{spec.name}`", tuple(result.of(spec.name))) for spec in language_runs.VARIANTS)
    return [group for group in groups if group.runs]


def places(buckets: Sequence[Bucket]) -> dict[str, int]:
    return {f"{bucket.start}-{bucket.end - 1}": index for index, bucket in enumerate(buckets)}


def language_tables(result: LanguageResult) -> list[Table]:
    groups, scale, lengths = variants(result), result.scale, result.runs[0].lengths
    streams = [Group(name, tuple(curves)) for name, curves in result.caches.items()]
    noises = ((group.name, zip(*group.figures("noise"), strict=True)) for group in groups)
    rows = {
        "claims": [one.group for one in claims(result)],
        "perplexity": groups,
        "noise": [Group(name, looks) for name, steps in noises for looks in steps],
        "sinks": groups,
        "eight_bits": groups,
        "streaming": streams,
        "streaming_pairs": language_runs.streaming_steps(result),
    }
    facts = {
        **vars(measures),
        **vars(language),
        **vars(language_runs),
        "setting": f"{LAYERS} layers, {HEADS} heads, width {WIDTH}, rotary; {scale.steps} steps of "
        f"{Training().sequences} x {LENGTH} bytes; {plural(scale.seeds, 'seed')}, mean ± standard deviation over "
        "seeds; all variants of a seed share initial weights and batches.",
        "scale": scale,
        "training": Training(),
        "text": result.text,
        "lengths": {f"{at.length} ({at.length // LENGTH}x)": index for index, at in enumerate(lengths)},
        "scored": " and ".join(f"{at.scored:,} at {at.length}" for at in lengths),
        "buckets": places(lengths[-1].buckets),
        "some_buckets": {
            name: index for name, index in places(streams[0].runs[0].buckets).items() if index < 2 or index % 3 == 0
        },
        "heads": LAYERS * HEADS,
        "FIRST_ROW": FIRST_ROW,
        "times": STREAM // LENGTH,
    }
    return read_tables("language", rows, facts)


def language_plots(result: LanguageResult) -> dict[str, bytes]:
    groups = variants(result)
    long = {group.name.replace("`", ""): [run.lengths[-1].buckets for run in group.runs] for group in groups}
    streams = {name: [curve.buckets for curve in curves] for name, curves in result.caches.items()}
    place, kl = "position in a held-out window of", f"KL to float64, nats per byte (log); {LONG} bytes, a mark per seed"
    of_stream, title = f"{place} {STREAM} bytes; a point per {KEYS}", "Perplexity per byte beyond the trained length"
    return {
        "language_positions.png": by_position(title, f"{place} {LONG} bytes", long),
        "language_sinks.png": idle_weight(groups),
        "language_8_bits.png": dot_plot("Attention in 8 bits", kl, groups, method_dots(groups, "kl"), log=True),
        "language_streaming.png": by_position(f"A softmax model with {KEYS} keys in its cache", of_stream, streams),
    }


def by_position(title: str, xlabel: str, lines: Mapping[str, Sequence[Sequence[Bucket]]]) -> bytes:
    """`lines`: by label, the buckets of each seed."""
    curves = []
    for label, seeds in lines.items():
        middle = [(bucket.start + bucket.end) / 2 for bucket in seeds[0]]
        curves.append(Curve(label, middle, [[bucket.perplexity for bucket in each] for each in seeds]))
    note, ylabel = f"trained length, {LENGTH}", "perplexity per byte (log; lower is better)"
    return curve_plot(title, xlabel, ylabel, curves, mark=LENGTH, note=note)


def idle_weight(groups: Sequence[Group[LanguageRun]]) -> bytes:
    """Every head, in a line of dots for each seed."""
    series, seeds = [], len(groups[0].runs)
    for seed in range(seeds):
        above = 0.5 * (seed - (seeds - 1) / 2) / max(seeds, 2)
        heads = [group.runs[seed].heads for group in groups]
        learned = [[head.learned for head in each if head.learned] for each in heads]
        series.append(Dots("on BOS", [[head.bos for head in each] for each in heads], COLORS[2], above=above))
        series.append(Dots("on the learnable sink", learned, COLORS[1], "x", above))
    title = "Where idle weight goes in small language models"
    xlabel = "mean weight; a mark per head, a line of marks per seed; dashed: sink heads, strong ones"
    return dot_plot(title, xlabel, groups, series, lines=(SINK_HEAD, STRONG))
