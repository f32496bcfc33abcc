"""The trigger experiments' tables and pictures."""

from collections.abc import Sequence

from quantsink.eval.lab import measures, trigger, trigger_runs
from quantsink.eval.lab.plots import COLORS, Dots, dot_plot, method_dots
from quantsink.eval.lab.seeds import Group, grouped, plural
from quantsink.eval.lab.tables import Table, read_tables
from quantsink.eval.lab.trigger_runs import LONG, TriggerRun


def label(run: TriggerRun) -> str:
    layers = f", {run.layers} layers" if run.layers > 1 else ""
    return f"`{run.name}`{layers}" + ("" if run.own else ", own content left out")


def variants(runs: Sequence[TriggerRun]) -> list[Group[TriggerRun]]:
    """One layer first."""
    return grouped(sorted(runs, key=lambda run: run.layers > 1), label)


def trigger_tables(runs: Sequence[TriggerRun]) -> list[Table]:
    shallow = [group for group in variants(runs) if group.runs[0].layers == 1]
    deep = [group for group in variants(runs) if group.runs[0].layers > 1]
    main = [group for group in variants(runs) if group.runs[0].own]
    rows = {"one_layer": shallow, "deep_layers": deep, "eight_bits": main, "error_sources": main, "calibration": main}
    first = deep[0].runs[0]
    facts = {
        **vars(measures),
        **vars(trigger),
        **vars(trigger_runs),
        "shallow": shallow[0].runs[0],
        "deep": first,
        "deep_heads": len(first.heads) // first.layers,
        "layers": range(first.layers),
        "seeds": plural(len(deep[0].runs), "seed"),
        "parts": tuple(measures.single_parts(1)),
    }
    return read_tables("trigger", rows, facts)


def trigger_plots(runs: Sequence[TriggerRun]) -> dict[str, bytes]:
    main = [group for group in variants(runs) if group.runs[0].own]
    shallow = [group for group in main if group.runs[0].layers == 1]
    idle = dot_plot(
        "One-layer trigger task: where idle weight goes",
        "weight of plain tokens on the sink; a dot per seed",
        shallow,
        (
            Dots("on BOS", [group.figures("heads[0].bos") for group in shallow], COLORS[2]),
            Dots("with learnable sinks", [group.figures("with_learned") for group in shallow], COLORS[1]),
        ),
    )
    xlabel = f"error of the output in 8 bits, relative to float64 (log); {LONG} tokens, a dot per seed"
    errors = dot_plot("Which attention needs its sinks kept exact", xlabel, main, method_dots(main, "errors"), log=True)
    return {"trigger_bos.png": idle, "trigger_8_bits.png": errors}
