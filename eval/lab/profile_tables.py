"""A profile's and a streaming experiment's tables, for a terminal and as Markdown."""

from collections.abc import Sequence

from quantsink.calibration.collect import FIRST_ROW
from quantsink.eval.lab.profile import FIRST, NEWEST
from quantsink.eval.lab.profile_results import (
    ALL,
    DEEP,
    DORMANT,
    SHUT,
    SINK,
    Contrast,
    Head,
    PositionShares,
    Profile,
    SentencePreference,
    Waking,
)
from quantsink.eval.lab.streaming import Streaming
from quantsink.eval.lab.tables import Table


def profile_tables(profile: Profile) -> tuple[Table, ...]:
    """All tables of a profile, in reading order."""
    return (
        share_table(profile.shares, profile.text),
        sentence_table(profile.sentences),
        contrast_table(profile.contrast),
        *(waking_table(waking) for waking in profile.waking),
        comparison_table(profile),
    )


def share_table(shares: Sequence[PositionShares], text: str) -> Table:
    rows = []
    learned = any(mean.learned > 1e-3 for share in shares for mean in share.means)
    sliding = any(mean.seeing < share.rows for share in shares for mean in share.means)
    for share in shares:
        for mean in share.means:
            cells = [f"{share.length:,}", "yes" if share.bos else "no", f"{mean.kind}, {mean.depth}"]
            cells += [_percent(value) for value in (mean.first, mean.newest, mean.middle)]
            cells += [_percent(mean.learned)] if learned else []
            if sliding:
                cells.append("-" if mean.first_seen is None else _percent(mean.first_seen))
            rows.append((*cells, str(mean.heads), f"{share.rows:,}"))
    columns = ["length", "BOS", "layers", f"first {FIRST}", f"newest {NEWEST}", "middle"]
    columns += (["learned sink"] if learned else []) + ([f"first {FIRST}, where seen"] if sliding else [])
    notes = [
        f"mean share of attention weight over heads and query rows ({text}); rows from {FIRST_ROW} on, where the "
        "groups do not overlap, evenly spread; rows: of each head",
        f"{DEEP}: the upper half of the attention layers",
    ]
    if sliding:
        notes.append("where seen: over those rows only whose sliding window still reaches the first token")
    return Table("Where attention goes", (*columns, "heads", "rows"), tuple(rows), tuple(notes), left=3)


def sentence_table(found: SentencePreference) -> Table:
    rows = tuple(
        (depth, str(found.count(depth)), _percent(found.share(depth)), _percent(found.pairs(depth)))
        for depth in (ALL, DEEP)
    )
    return Table(
        f"Heads that prefer the first {FIRST} tokens",
        ("heads of", "heads", "prefer the first, on average", "of (head, sentence) pairs"),
        rows,
        (
            f"{found.sentences} sentences of {found.text} (seed {found.seed}), {'with' if found.bos else 'without'} "
            f"BOS, {found.rows:,} query rows from {FIRST_ROW} on",
            f"prefers: more weight on the first {FIRST} than on the newest {NEWEST}, and than on all between",
        ),
    )


def contrast_table(found: Contrast, count: int = 10) -> Table:
    one, other = found.texts
    rows = tuple((_name(h.head), f"{h.one:.3f}", f"{h.other:.3f}", f"{h.difference:+.3f}") for h in
                 found.strongest(count))  # fmt: skip
    levels = "; ".join(f">= {level}: {a} and {b}" for level in (SINK, DORMANT, SHUT)
                       for a, b in [found.at_least(level)])  # fmt: skip
    switching = "; ".join(f">= {level} on one, < {SINK} on the other: {len(found.switching(level))}"
                          for level in (DORMANT, SHUT))  # fmt: skip
    mean_one, mean_other = found.means
    return Table(
        f"BOS mass on {one} and on {other}: the strongest differences",
        ("head", one, other, "difference"),
        rows,
        (
            f"of {len(found.heads)} heads, mean {mean_one:.3f} and {mean_other:.3f}; heads {levels}",
            f"heads that switch, {switching}",
            f"{found.rows[0]:,} and {found.rows[1]:,} query rows a head, windows of {found.length} tokens "
            f"{'with' if found.bos else 'without'} BOS",
        ),
    )


def waking_table(found: Waking) -> Table:
    rows = tuple(
        (_name(head.head), repr(token.token), str(token.count), f"{token.mean:.3f}", f"{token.least:.3f}",
         f"{head.moved:.3f}", f"{head.awake_rows:,}")
        for head in found.heads for token in head.tokens
    )  # fmt: skip
    return Table(
        f"Tokens that wake dormant heads, {found.text}",
        ("head", "token", "count", "moved", "least", "head's mean", "awake rows"),
        rows,
        (
            f"moved: weight off the sink, mean over the token's occurrences; least: the smallest of them; at least "
            f"{found.min_count} occurrences, {found.rows:,} query rows",
            f"{found.dormant} heads are dormant (mean BOS mass >= {DORMANT}), {found.never} of them never awake "
            f"(< {SINK}); shown are those that are awake in most rows",
            "the first of many ranked types is the largest of many means; read it together with count and least",
        ),
        left=2,
    )


def comparison_table(profile: Profile) -> Table:
    rows = tuple((c.claim, c.source, c.measured, c.verdict) for c in profile.comparisons)
    return Table("Beside what was published", ("reported", "where", "here", "verdict"), rows, (), left=4)


def streaming_table(found: Streaming) -> Table:
    curves = found.curves
    rows = [
        (f"{bucket.start:,}-{bucket.end - 1:,}", f"{bucket.scored:,}", *(_ppl(c.buckets[i].ppl) for c in curves))
        for i, bucket in enumerate(curves[0].buckets)
    ]
    past = sum(b.scored for b in curves[0].buckets if b.start >= found.past)
    rows.append((f"from {found.past:,} on", f"{past:,}", *(_ppl(curve.ppl(found.past)) for curve in curves)))
    return Table(
        "Perplexity by position",
        ("positions", "scored", *(curve.variant.name for curve in curves)),
        tuple(rows),
        (
            f"{found.model} on {found.text}, {found.tokens:,} tokens in one sequence, BOS "
            f"{'none' if found.bos is None else found.bos}; {found.scored:,} of them scored, alike for all",
            f"all but full attention hold {found.budget} keys; kept positions: {_kept(found)} (seed {found.seed})",
            "original rotary positions, not numbered anew inside the cache as StreamingLLM does",
            f"{found.restricted} layers are restricted, {found.own} sliding ones see what they always do",
        ),
    )


def _kept(found: Streaming) -> str:
    return ", ".join(str(position) for position in found.curves[-1].variant.kept)


def _name(head: Head) -> str:
    return f"{head.layer}.{head.head}" + ("" if head.kind == "full" else f" ({head.kind})")


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _ppl(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"
