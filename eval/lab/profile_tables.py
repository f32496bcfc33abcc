"""A profile's and a streaming experiment's tables."""

from types import SimpleNamespace

from quantsink.calibration.collect import FIRST_ROW
from quantsink.eval.lab import profile_results
from quantsink.eval.lab.profile import FIRST, NEWEST
from quantsink.eval.lab.profile_results import ALL, DEEP, DORMANT, LEARNED, SHUT, SINK, Profile
from quantsink.eval.lab.streaming import Streaming
from quantsink.eval.lab.tables import Table, read_tables


def profile_tables(profile: Profile) -> list[Table]:
    """In reading order."""
    shares = [SimpleNamespace(share=share, mean=mean) for share in profile.shares for mean in share.means]
    sliding = any(row.mean.seeing < row.share.rows for row in shares)
    sentences, contrast = profile.sentences, profile.contrast
    depths = [(depth, sentences.count(depth), sentences.share(depth), sentences.pairs(depth)) for depth in (ALL, DEEP)]
    levels = ((level, *contrast.at_least(level)) for level in (SINK, DORMANT, SHUT))
    switching = ((level, len(contrast.switching(level))) for level in (DORMANT, SHUT))
    where_seen = "where seen: over those rows only whose sliding window still reaches the first token"
    facts = {
        **vars(profile_results),
        "FIRST": FIRST,
        "NEWEST": NEWEST,
        "FIRST_ROW": FIRST_ROW,
        "text": profile.text,
        "sentences": sentences,
        "contrast": contrast,
        "learned": ["learned sink"] * any(row.mean.learned > LEARNED for row in shares),
        "where_seen": [f"first {FIRST}, where seen"] * sliding,
        "note_where_seen": where_seen * sliding,
        "sentences_bos": "with" if sentences.bos else "without",
        "contrast_bos": "with" if contrast.bos else "without",
        "heads": len(contrast.heads),
        "levels": "; ".join(f">= {level}: {one} and {other}" for level, one, other in levels),
        "switching": "; ".join(f">= {level} on one, < {SINK} on the other: {count}" for level, count in switching),
    }
    tables = read_tables("profile", {"shares": shares, "sentences": depths, "contrast": contrast.strongest()}, facts)
    for waking in profile.waking:
        woken = [(head, token, repr(token.token)) for head in waking.heads for token in head.tokens]
        tables += read_tables("profile", {"waking": woken}, {**facts, "waking": waking})
    return tables + read_tables("profile", {"comparisons": profile.comparisons}, facts)


def streaming_table(stream: Streaming) -> Table:
    buckets = stream.curves[0].buckets
    rows = [
        (f"{bucket.start:,}-{bucket.end - 1:,}", bucket.scored, [curve.buckets[i].ppl for curve in stream.curves])
        for i, bucket in enumerate(buckets)
    ]
    past = sum(bucket.scored for bucket in buckets if bucket.start >= stream.past)
    rows.append((f"from {stream.past:,} on", past, [curve.ppl(stream.past) for curve in stream.curves]))
    facts = {
        "stream": stream,
        "curves": {curve.variant.name: index for index, curve in enumerate(stream.curves)},
        "bos": "none" if stream.bos is None else stream.bos,
        "kept": ", ".join(map(str, stream.curves[-1].variant.kept)),
    }
    return read_tables("profile", {"streaming": rows}, facts)[0]
