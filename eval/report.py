"""`Report`: rows and conditions, as JSON, as one HTML page, as a picture and as a table on the terminal."""

import base64
import importlib.resources
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from quantsink.errors import QuantSinkError, UsageError
from quantsink.eval.divergence import CHUNK, PREFILL
from quantsink.eval.findings import Finding, findings, number, rolling_findings
from quantsink.eval.methods import CACHES, GROUPS
from quantsink.eval.plot import kl_vs_bits, kl_vs_kv_bits, rolling_curves
from quantsink.eval.rolling import CHUNK as ROLLING_CHUNK
from quantsink.eval.rolling import RollingCurve
from quantsink.eval.rows import Conditions, Row, compare_conditions, from_plain, to_plain
from quantsink.files import contents, whole_folder, write_bytes, write_json, write_text

SCHEMA = 2
JSON, HTML = "report.json", "report.html"
PLOT, KV_PLOT, ROLLING_PLOT = "kl_vs_bits.png", "kl_vs_kv_bits.png", "rolling.png"
FEW_WINDOWS = 10
"""With fewer windows the report warns that its intervals are rough."""


@dataclass(frozen=True)
class Report:
    """Rows measured under the same conditions. `notes`: facts about the model that a reader must know. `rolling`: the
    curves of a rolling cache, on the same text as one sequence."""

    conditions: Conditions
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    rolling: tuple[RollingCurve, ...] = ()

    @property
    def warnings(self) -> tuple[str, ...]:
        """Reasons to trust the figures less, from the conditions and the rows."""
        c, warnings = self.conditions, []
        if c.calibration is not None and c.calibration.covers_text:
            warnings.append("measured on text used for calibration: the calibrated rows look better than on new text")
        if c.windows < FEW_WINDOWS:
            warnings.append(_few_windows(c.windows))
        if c.bos is None:
            warnings.append("no BOS token before the windows: each window's first token is the sink")
        warnings += [f"{row.method}: {row.status}" for row in self.rows if not row.ok]
        return tuple(warnings)

    def merge(self, other: "Report") -> "Report":
        """This report with the rows of `other` appended.

        Raises:
            UsageError: measured under other conditions, or a method (or a rolling cache) that appears in both.
        """
        compare_conditions(self.conditions, other.conditions)
        methods = {row.method for row in self.rows}
        added = tuple(row for row in other.rows if row.group != "reference")
        both = [row.method for row in added if row.method in methods]
        if both:
            raise UsageError(f"{both[0]} appears in both reports; leave it out of one")
        if self.rolling and other.rolling:
            raise UsageError("a rolling cache appears in both reports; leave it out of one")
        return replace(
            self,
            rows=self.rows + added,
            notes=tuple(dict.fromkeys(self.notes + other.notes)),
            rolling=self.rolling + other.rolling,
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "conditions": to_plain(self.conditions),
            "notes": list(self.notes),
            "rows": [to_plain(row) for row in self.rows],
            "rolling": [to_plain(curve) for curve in self.rolling],
        }

    @classmethod
    def from_dict(cls, data: Any, place: str = JSON) -> "Report":
        """The inverse of `to_dict`; anything missing, unknown or of another type is refused.

        Raises:
            UsageError: names the place and what is wrong there.
        """
        keys = {"schema", "conditions", "notes", "rows", "rolling"}
        if not isinstance(data, dict) or data.keys() != keys:
            raise UsageError(
                f"{place}: not a quantsink report, whose keys are {', '.join(sorted(keys))}; name another file"
            )
        if data["schema"] != SCHEMA:
            raise UsageError(f"{place}: schema {data['schema']!r}, this quantsink reads {SCHEMA}; measure again")
        return cls(
            from_plain(Conditions, data["conditions"], f"{place}: conditions"),
            from_plain(tuple[Row, ...], data["rows"], f"{place}: rows"),
            from_plain(tuple[str, ...], data["notes"], f"{place}: notes"),
            from_plain(tuple[RollingCurve, ...], data["rolling"], f"{place}: rolling"),
        )

    @classmethod
    def load(cls, path: str | Path) -> "Report":
        """Read `report.json`, or the one in a folder."""
        path = Path(path)
        path = path / JSON if path.is_dir() else path
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"{path}: cannot be read as a report: {error}; measure again") from error
        return cls.from_dict(data, str(path))

    def save(self, folder: str | Path, *, force: bool = False) -> None:
        """Write report.json, report.html and the pictures; the folder appears whole or not at all.

        Raises:
            UsageError: the folder is not empty and `force` is not given.
            OutputError: no room, or no permission.
        """
        pictures = self.pictures()
        with whole_folder(Path(folder), is_report, force=force) as work:
            write_json(work / JSON, self.to_dict())
            for name, picture in pictures.items():
                write_bytes(work / name, picture)
            write_text(work / HTML, self.html(pictures))

    def pictures(self) -> dict[str, bytes]:
        """PNGs by file name: KL against the bits of the weights, and of the cache, and the curves of a rolling cache.

        Only what was measured is drawn; without any cache the first is always there.
        """
        caches = [row for row in self.rows if row.group in CACHES]
        others = [row for row in self.rows if row.group not in CACHES]
        pictures = {}
        if len(others) > 1 or not (caches or self.rolling):
            pictures[PLOT] = kl_vs_bits(others, self.title)
        if caches:
            pictures[KV_PLOT] = kl_vs_kv_bits(caches, self.title)
        if self.rolling:
            pictures[ROLLING_PLOT] = rolling_curves(self.rolling, self.rolling_title)
        return pictures

    @property
    def title(self) -> str:
        c = self.conditions
        return f"{c.model}: {c.windows} windows of {c.length} tokens of {c.data}, {c.dtype}"

    @property
    def rolling_title(self) -> str:
        c, curve = self.conditions, self.rolling[0]
        return (
            f"{c.model}: {curve.tokens:,} tokens of {c.data} through a rolling cache of {curve.max_length:,} tokens, "
            f"{curve.bits_kv:.1f} bits, {c.dtype}"
        )

    @property
    def findings(self) -> list[Finding]:
        return findings(self.rows) + rolling_findings(self.rolling)

    def html(self, pictures: Mapping[str, bytes]) -> str:
        """One self-contained page: style and pictures (`pictures()`) are embedded, and there is no script."""
        import jinja2

        template = importlib.resources.files("quantsink.eval").joinpath("templates").joinpath("report.html.j2")
        environment = jinja2.Environment(
            autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        return environment.from_string(template.read_text(encoding="utf-8")).render(
            report=self,
            facts=self.facts(),
            groups=[(GROUPS[g], [row for row in self.rows if row.group == g]) for g in GROUPS],
            cells=lambda row: _cells(row, self.cached),
            columns=COLUMNS + KV_COLUMNS if self.cached else COLUMNS,
            cached=self.cached,
            findings=self.findings,
            rolling=(self.rolling_columns, self.rolling_cells()) if self.rolling else None,
            pictures=[(*PICTURES[name], base64.b64encode(picture).decode()) for name, picture in pictures.items()],
        )

    @property
    def cached(self) -> bool:
        """Whether any row was measured through a KV cache."""
        return any(row.kv_bytes is not None for row in self.rows)

    @property
    def rolling_columns(self) -> list[str]:
        names = [f"perplexity, {curve.method}" for curve in self.rolling]
        return ["tokens", *names, "cache MB", *(["peak MB"] if self.rolling[0].points[0].peak_bytes else [])]

    def rolling_cells(self) -> list[list[str]]:
        """One line per point: tokens, each curve's perplexity, then the first curve's memory."""
        lines = []
        for points in zip(*(curve.points for curve in self.rolling), strict=True):
            first = points[0]
            peak = [] if first.peak_bytes is None else [f"{first.peak_bytes / 1e6:,.0f}"]
            perplexities = [f"{point.ppl:,.2f}" for point in points]
            lines.append([f"{first.tokens:,}", *perplexities, f"{first.cache_bytes / 1e6:.2f}", *peak])
        return lines

    def facts(self) -> list[tuple[str, str]]:
        """The conditions in words, the most important first."""
        c = self.conditions
        versions = ", ".join(f"{name} {version}" for name, version in to_plain(c.versions).items())
        calibration = "none"
        if c.calibration is not None:
            facts = c.calibration
            calibration = f"{facts.tokens:,} tokens of {', '.join(facts.data)}, windows of {facts.seq_len}"
        windows = f"{c.windows} of {c.length} tokens, stride {c.stride}, {c.scored:,} tokens scored, each once"
        if c.context:
            windows += f"; the first {c.context} of each window are context only"
        fed = f"a new one per window, which is fed {PREFILL} tokens first and then {CHUNK} at a time"
        return [
            ("model", f"{c.model}, {c.parameters:,} parameters (tied ones counted once)"),
            ("model fingerprint", c.model_fingerprint),
            ("text", f"{c.data}, {'the whole text' if c.complete else 'only its beginning'}"),
            ("text fingerprint", c.data_fingerprint),
            ("windows", windows),
            *([("KV caches", fed)] if self.cached else []),
            *([("rolling cache", self._rolling_fact())] if self.rolling else []),
            ("BOS", "none" if c.bos is None else f"token {c.bos} before each window"),
            ("dtype", c.dtype),
            ("calibration", calibration),
            ("run on", f"{c.device}, {c.threads} threads"),
            ("versions", versions),
            ("date", c.date),
        ]

    def _rolling_fact(self) -> str:
        curve = self.rolling[0]
        return (
            f"{curve.tokens:,} tokens from the text's beginning as one sequence, fed {ROLLING_CHUNK} at a time, the "
            f"first {ROLLING_CHUNK} not scored; at most {curve.max_length:,} tokens held, {curve.bits_kv:.2f} bits "
            f"per coded number"
        )

    def table(self) -> Table:
        """For a terminal of 80 columns: one line per method, a rule between groups; report.html shows the rest."""
        table = Table(title=_plain(self.title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        # Where only the caches differ, the bits of the weights say nothing.
        same_weights = self.cached and len({row.bits_weight for row in self.rows if row.ok}) == 1
        bits = [name for name, useful in (("bits", not same_weights), ("KV bits", self.cached)) if useful]
        for name in ("method", *bits, "KL", "95 %", "ratio", "top-1"):
            table.add_column(name, justify="left" if name == "method" else "right", no_wrap=name != "method")
        group = self.rows[0].group if self.rows else ""
        for row in self.rows:
            if group != row.group:
                table.add_section()
            group = row.group
            table.add_row(*(_plain(cell) for cell in (row.method, *_short_cells(row, bits))))
        return table

    def rolling_table(self) -> Table:
        """The curves of a rolling cache, one line per point."""
        table = Table(title=_plain(self.rolling_title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for name in self.rolling_columns:
            table.add_column(name, justify="right")
        for cells in self.rolling_cells():
            table.add_row(*cells)
        return table

    def lines(self) -> list[str]:
        """The lines below the table: conditions, warnings, what helped and what did not."""
        c = self.conditions
        bos = "none" if c.bos is None else f"token {c.bos}"
        context = f"context {c.context}, " if c.context else ""
        return [
            f"measured with length {c.length}, stride {c.stride}, {context}BOS {bos}, {c.dtype}, {c.data} "
            f"(fingerprint {c.data_fingerprint[:12]}), {c.windows} windows, {c.scored:,} tokens",
            "KL in nats per token; 95 %: interval by a paired bootstrap over windows; ratio: perplexity / reference's",
            *(f"warning: {warning}" for warning in self.warnings),
            *(f"note: {note}" for note in self.notes),
            *(f"{item.verdict}: {item.question}. {item.evidence}" for item in self.findings),
        ]


def is_report(folder: Path) -> bool:
    """Whether a folder holds a report and nothing else."""
    try:
        Report.load(folder)
    except QuantSinkError:
        return False
    return contents(folder) <= {JSON, PLOT, KV_PLOT, ROLLING_PLOT, HTML}


COLUMNS: tuple[tuple[str, str], ...] = (
    ("method", "left"),
    ("bits", "right"),
    ("MB", "right"),
    ("attn bits", "right"),
    ("sink heads", "right"),
    ("KL", "right"),
    ("perplexity", "right"),
    ("ratio", "right"),
    ("top-1", "right"),
)
KV_COLUMNS = (("KV bits", "right"), ("KV MB", "right"))
"""Further columns of a report with caches."""
PICTURES = {
    PLOT: ("KL against bits", "KL to the reference against bits per parameter, one point per row"),
    KV_PLOT: (
        "KL against the bits of the KV cache",
        "KL to the reference against bits per coded number, one point per row",
    ),
    ROLLING_PLOT: ("A rolling cache, sinks kept or dropped", "Perplexity against tokens, sinks kept and dropped"),
}
"""Heading and description of each picture."""


def _few_windows(windows: int) -> str:
    if windows == 1:
        return "only 1 window: differences between rows may be chance, and there is no interval to tell"
    chance = 2.0 ** (1 - windows)
    return (
        f"only {windows} windows: the intervals are rough and tend to be too narrow; if there were no difference, all "
        f"windows would still agree in sign with probability {chance:.2g}"
    )


def _cells(row: Row, cached: bool) -> Sequence[str]:
    """The cells of one row after the method's name; a dash where nothing was measured."""
    if not row.ok or row.kl is None or row.ppl is None or row.ppl_ratio is None or row.payload_bytes is None:
        return ["-"] * (len(COLUMNS) - 1 + len(KV_COLUMNS) * cached)
    cells = [
        f"{row.bits_weight:.2f}",
        f"{row.payload_bytes / 1e6:.1f}",
        f"{row.bits_attention:.1f}",
        str(row.sink_heads),
        _with_bounds(number(row.kl), row.kl_low, row.kl_high, lambda v: number(v)),
        f"{row.ppl:.2f}",
        _with_bounds(f"{row.ppl_ratio:.4f}", row.ppl_ratio_low, row.ppl_ratio_high, lambda v: f"{v:.4f}"),
        f"{row.top1:.1%}",
    ]
    if cached:
        cells += [f"{row.bits_kv:.2f}", "-" if row.kv_bytes is None else f"{row.kv_bytes / 1e6:.2f}"]
    return cells


def _short_cells(row: Row, bits: Sequence[str]) -> Sequence[str]:
    if not row.ok or row.kl is None or row.ppl_ratio is None:
        return [*["-"] * len(bits), row.status if len(row.status) < 16 else "not run", "-", "-", "-"]
    low, high = row.kl_low, row.kl_high
    bounds = "" if low is None or high is None or low == high else f"{number(low)} to {number(high)}"
    values = {"bits": row.bits_weight, "KV bits": row.bits_kv}
    return [
        *(f"{values[name]:.2f}" for name in bits),
        number(row.kl),
        bounds,
        f"{row.ppl_ratio:.4f}",
        f"{row.top1:.1%}",
    ]


def _with_bounds(middle: str, low: float | None, high: float | None, text: Any) -> str:
    return middle if low is None or high is None or low == high else f"{middle} [{text(low)}, {text(high)}]"


def _plain(text: str) -> Any:
    from rich.text import Text

    return Text(text)
