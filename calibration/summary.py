"""A calibration as a person reads it on the terminal, and as `--json` gives it."""

from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from quantsink.calibration.calibration import LEVELS, Calibration
from quantsink.calibration.records import Head

STRONGEST = 10
NEAR, NEAR_MASS = 256, 0.02
"""A KV head is near-sighted where at most this share of its weight, sink tokens left out, lies that far away."""


def differing(calibration: Calibration) -> list[Head]:
    """Heads that are sink heads on one domain and not on another."""
    limit = LEVELS["sink"]
    return [h for h in calibration.heads() if len({means["bos_mass"] >= limit for means in h.domains.values()}) > 1]


def counts(calibration: Calibration) -> dict[str, int]:
    """Heads at or above each report level of BOS mass."""
    heads = calibration.heads()
    return {name: sum(h.bos_mass >= limit for h in heads) for name, limit in LEVELS.items()}


def kv_counts(calibration: Calibration) -> dict[str, int | None]:
    """KV heads in all, those that hold a sink head, and near-sighted ones: None where no window was long enough."""
    heads = calibration.kv_heads()
    far = [mass for h in heads if (mass := h.far[NEAR]) is not None]
    near = sum(mass <= NEAR_MASS for mass in far) if far else None
    return {"all": len(heads), "sink": sum(h.sink for h in heads), "near": near}


def as_dict(calibration: Calibration, folder: str) -> dict[str, Any]:
    """What `--json` prints: counts, conditions and where the tables lie."""
    return {
        "calibration": folder,
        "model": calibration.model,
        "bos": calibration.bos,
        "heads": len(calibration.heads()),
        "sink_heads": counts(calibration),
        "kv_heads": kv_counts(calibration),
        "differing_heads": [[h.layer, h.head] for h in differing(calibration)],
        "domains": [{"name": d.name, "tokens": d.tokens, "windows": d.windows} for d in calibration.domains],
    }


def render(calibration: Calibration) -> RenderableType:
    return Group(*_parts(calibration))


def _parts(calibration: Calibration) -> Iterator[RenderableType]:
    heads = calibration.heads()
    for domain in calibration.domains:
        rest = "" if domain.complete else "; --max-tokens reached, text left over"
        taken = f"; {domain.removed_bos} BOS tokens taken out of the text" if domain.removed_bos else ""
        yield Text(f"{domain.name}: {domain.tokens:,} tokens in {domain.windows} windows{rest}{taken}")
    if calibration.bos is None:
        yield Text("No BOS token: the first token of each window is the sink candidate.", style="yellow")

    levels = Table(title="Sink heads", title_justify="left")
    levels.add_column("level")
    levels.add_column("BOS mass")
    levels.add_column("heads", justify="right")
    for name, number in counts(calibration).items():
        levels.add_row(name, f">= {LEVELS[name]}", f"{number} of {len(heads)}")
    yield levels

    kv = kv_counts(calibration)
    near = "not measured: windows too short" if kv["near"] is None else f"{kv['near']}"
    yield Text(
        f"KV heads: {kv['all']}; {kv['sink']} hold a sink head; with at most {NEAR_MASS:.0%} of their weight beyond "
        f"{NEAR} tokens: {near}"
    )

    strongest = Table(title=f"The {STRONGEST} strongest", title_justify="left")
    for column in ("layer", "head", "KV head", "BOS mass", "+-", "entropy", "INT8 error", "with sink split"):
        strongest.add_column(column, justify="right")
    for h in sorted(heads, key=lambda h: -h.bos_mass)[:STRONGEST]:
        strongest.add_row(
            str(h.layer), str(h.head), str(h.kv_head), f"{h.bos_mass:.3f}", f"{h.bos_mass_std:.3f}", f"{h.entropy:.3f}",
            _percent(h.error_int8), _percent(h.error_sink),
        )  # fmt: skip
    yield strongest

    if len(calibration.domains) > 1:
        other = differing(calibration)
        names = [domain.name for domain in calibration.domains]
        table = Table(title=f"Heads whose state differs between texts: {len(other)}", title_justify="left")
        for column in ("layer", "head", *names):
            table.add_column(column, justify="right")
        gap = sorted(other, key=lambda h: -_spread(h))
        for h in gap[:STRONGEST]:
            table.add_row(
                str(h.layer), str(h.head), *(f"{h.domains[n]['bos_mass']:.3f}" for n in names if n in h.domains)
            )
        if other:
            yield table
        else:
            yield Text("No head is a sink head on one text and not on another.")


def _spread(head: Head) -> float:
    masses = [means["bos_mass"] for means in head.domains.values()]
    return max(masses) - min(masses)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.3g} %"
