"""Verdicts follow from the rows' paired differences."""

import dataclasses
import math

from quantsink.eval import Report, Row
from quantsink.eval.findings import findings, number


def test_verdicts_follow_the_rows(report: Report) -> None:
    def shifted(name: str, by: float) -> Row:
        base = next(row for row in report.rows if row.method == "attention-row")
        sums = tuple(dataclasses.replace(w, kl=w.kl + by * w.count) for w in base.windows)
        return dataclasses.replace(base, method=name, windows=sums, kl=base.kl + by)

    def verdict(sink: float, other: float) -> str:
        (finding,) = findings([shifted("attention-sink", sink), shifted("attention-random", other)])
        return finding.verdict

    assert verdict(0.0, 0.1) == "helped"
    assert verdict(0.1, 0.0) == "hurt"
    assert verdict(0.0, 0.0) == "no difference shown"
    one = [dataclasses.replace(r, windows=r.windows[:1]) for r in report.rows]
    assert {finding.verdict for finding in findings(one)} == {"not decided"}


def test_numbers_have_three_significant_digits() -> None:
    texts = [number(value) for value in (0.0, 0.000744, 0.0103, 1.6512, 12345.6, 1.23e-6, -0.00021, math.inf)]
    assert texts == ["0", "0.000744", "0.0103", "1.65", "12,300", "1.23e-06", "-0.000210", "inf"]
