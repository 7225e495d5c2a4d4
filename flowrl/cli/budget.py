"""`flowrl budget`: memory and time of a run, before it runs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from flowrl.cli.common import Json, Overrides, as_json, one_sentence_errors, parse_config, show

Device = Annotated[
    str,
    typer.Option(
        help="h100, h200, b200, a100, a100-40gb, l40s, a6000, rtx3090, rtx4090, rtx5090, or cpu:"
        " this machine's."
    ),
]
Gpus = Annotated[int, typer.Option(help="Processes, one a device, on all machines together.")]
Machines = Annotated[int, typer.Option(help="Machines that they are on.")]


def budget(
    overrides: Overrides = None,
    device: Device = "h100",
    gpus: Gpus = 1,
    machines: Machines = 1,
    json_: Json = None,
) -> None:
    """Say what a run will need, before it runs. Without a GPU and without weights: memory,
    seconds, network calls and FLOPs of each phase, which cards it fits, and what makes it fit."""
    from flowrl.runtime import log
    from flowrl.runtime.excerpt import part

    log.setup()
    with one_sentence_errors():
        cfg = parse_config(overrides)
        part("flowrl.training.budget.planner", "check_words")(cfg, gpus, machines)
        if device != "cpu":
            part("flowrl.training.budget.roofline", "known_gpu")(device)
        log.logger.info("rehearse two iterations, without weights: a minute or so")
        with log.waiting("rehearse"):
            from flowrl.training.budget import fit, roofline
            from flowrl.training.budget.planner import Planner

            log.hush()
            where = roofline.device(device).over(machines, gpus)
            planner = Planner(cfg, where, gpus=gpus)
            found, start = fit.fit(planner), planner.start()
        if not as_json(fit.record(found, start), json_):
            if said := fit.verdict(found):
                show(f"{said}\n", wrap=True)
            for table in (*tables(found, cfg), started(start)):
                show(table)
            # a table would cut these where a terminal is narrow
            for card, free in fit.CARDS.items():
                if (step := found.on(free)) and step.settings:
                    show(f"To fit {card} GB, add {fit.as_words(step.settings)}", wrap=True)
            for note in found.own.notes:
                show(f"Note: {note}.", wrap=True)
        if found.fits is False:
            raise typer.Exit(1)


def started(start: Any) -> Any:
    """A run's start as a table: what its parts compute before the first iteration."""
    from rich.table import Table

    from flowrl.training.budget.start import Work

    table = Table(title="Start: before the first iteration, without rewards")
    for name in ("part", "network rows", "texts encoded", "media decoded", "seconds"):
        table.add_column(name, justify="left" if name == "part" else "right")
    for name, work in {**start, "total": sum(start.values(), Work())}.items():
        counts = (f"{n:,}" if n else "" for n in (work.rows, work.encodes, work.decodes))
        style = "bold" if name == "total" else None
        table.add_row(name, *counts, f"{work.seconds:.3g}", style=style)
    return table


def tables(found: Any, cfg: Any) -> list[Any]:
    """A budget as tables: each phase, the whole run, what stays, and the cards."""
    from rich.table import Table

    from flowrl.training.budget.fit import CARDS
    from flowrl.training.budget.whole_run import hours

    # First table: one row for each phase of an iteration.
    b = found.own
    processes = f", {b.gpus} processes" if b.gpus > 1 else ""
    phases = Table(
        title=f"{b.model} on {b.device.name}{processes}: an iteration of {b.samples} samples"
    )
    for name in ("phase", "GB", "above what stays", "seconds", "TFLOP", "network rows"):
        phases.add_column(name, justify="left" if name == "phase" else "right")
    phases.add_row("what stays", f"{b.resident:.2f}", "", "", "", "")
    for name, phase in b.phases.items():
        phases.add_row(
            name,
            f"{b.resident + phase.gb:.2f}",
            f"{phase.gb:.2f}",
            f"{phase.seconds:.3g}" if phase.seconds else "",
            f"{phase.flops / 1e12:.4g}" if phase.flops else "",
            f"{phase.rows:,}" if phase.rows else "",
        )
    if b.gpus > 1:
        phases.add_row("all-reduce", "", f"{b.reduced['gb']:.2f}", f"{b.reduced['seconds']:.3g}")
    phases.add_section()
    total = f"{b.seconds:.3g}", f"{b.flops / 1e12:.4g}"
    phases.add_row("an iteration", f"{b.peak:.2f}", "", *total, "", style="bold")

    run = Table(title=f"The run of {b.iterations} iterations, without rewards")
    for name in ("part", "h:min"):
        run.add_column(name, justify="left" if name == "part" else "right")
    for name, seconds in b.run.items():
        run.add_row(name, hours(seconds), style="bold" if name == "total" else None)

    stays = Table(title=f"What stays, GB ({b.parameters['trained']:,} trained weights)")
    for name in ("of", "GB"):
        stays.add_column(name, justify="left" if name == "of" else "right")
    off = {"network": cfg.model.offload != "none", "rewards": cfg.model.offload == "all"}
    off["text encoders"] = cfg.model.encoders == "leave"
    for name, size in b.fixed.items():
        stays.add_row(name, "off the card" if off.get(name) and not size else f"{size:.2f}")

    cards = Table(title=f"Cards ({b.device.source})")
    on = f"on {b.device.name}"
    for name in ("card", "fits", "needs GB", f"seconds an iteration {on}", f"h:min {on}"):
        cards.add_column(name, justify="left" if name in ("card", "fits") else "right")
    for card, free in CARDS.items():
        step = found.on(free)
        told = (step or found.steps[-1]).budget
        how = "no" if step is None else "changed, see below" if step.settings else "yes"
        took = (f"{told.seconds:.3g}", hours(told.run["total"])) if step else ()
        cards.add_row(f"{card} GB", how, f"{told.needed:.1f}", *took)
    return [phases, run, stays, cards]
