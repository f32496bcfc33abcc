"""A calibration as the terminal shows it, and as `--json` prints it."""

from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from quantsink.calibration.calibration import LEVELS, Calibration
from quantsink.calibration.records import Head

STRONGEST = 10
LOCAL_DISTANCE, LOCAL_MASS = 256, 0.02
"""A KV head is local if at most this share of its weight, sink tokens left out, lies that many tokens away or more."""


def differing(calibration: Calibration) -> list[Head]:
    """Heads that are sink heads on one domain and not on another."""
    limit = LEVELS["sink"]
    return [h for h in calibration.heads() if len({means["bos_mass"] >= limit for means in h.domains.values()}) > 1]


def counts(calibration: Calibration) -> dict[str, int]:
    """Heads at or above each report level of BOS mass."""
    heads = calibration.heads()
    return {name: sum(h.bos_mass >= limit for h in heads) for name, limit in LEVELS.items()}


def kv_counts(calibration: Calibration) -> dict[str, int | None]:
    """KV heads in all, those that hold a sink head, and local ones: None where no window was long enough."""
    heads = calibration.kv_heads()
    far = [mass for h in heads if (mass := h.far[LOCAL_DISTANCE]) is not None]
    local = sum(mass <= LOCAL_MASS for mass in far) if far else None
    return {"all": len(heads), "sink": sum(h.sink for h in heads), "local": local}


def as_dict(calibration: Calibration, folder: str) -> dict[str, Any]:
    """What `--json` prints: counts, conditions and the folder of the tables."""
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
        rest = "" if domain.complete else "; --max-tokens reached before the end of the text"
        taken = f"; {domain.removed_bos} BOS tokens removed from the text" if domain.removed_bos else ""
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
    local = "not measured: windows too short" if kv["local"] is None else f"{kv['local']}"
    yield Text(
        f"KV heads: {kv['all']}; {kv['sink']} hold a sink head; local, with at most {LOCAL_MASS:.0%} of their weight "
        f"beyond {LOCAL_DISTANCE} tokens: {local}"
    )

    strongest = Table(title=f"The {STRONGEST} strongest", title_justify="left")
    for column in ("layer", "head", "KV head", "BOS mass", "+-", "entropy", "INT8 error", "sink route error"):
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
        table = Table(title=f"Heads that are sink heads on some texts only: {len(other)}", title_justify="left")
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
            yield Text("Every head is a sink head on all texts or on none.")


def _spread(head: Head) -> float:
    masses = [means["bos_mass"] for means in head.domains.values()]
    return max(masses) - min(masses)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.3g} %"
