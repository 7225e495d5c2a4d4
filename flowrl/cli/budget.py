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
    seconds, rows and FLOPs of each phase, which cards it fits, and what makes it fit."""
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
            from flowrl.training.budget.planner import Planner, check_known

            log.hush()
            # mistakes are reported before an architecture is built, which takes seconds
            check_known(cfg, gpus, machines)
            where = roofline.device(device).over(machines, gpus)
            found = fit.fit(Planner(cfg, where, gpus=gpus))
        printed = as_json(fit.record(found), json_)
    if not printed:
        _print(found, cfg)
    if found.fits is False:
        raise typer.Exit(1)


def _print(found: Any, cfg: Any) -> None:
    """Print whether the run fits, the tables, and the settings of other cards, which a table would
    cut where a terminal is narrow."""
    from flowrl.training.budget import fit

    steps = {card: found.on(free) for card, free in fit.CARDS.items()}
    changed = {card: step.settings for card, step in steps.items() if step and step.settings}
    if said := fit.verdict(found):
        show(f"{said}\n", wrap=True)
    for table in tables(found, cfg):
        show(table)
    for card, settings in changed.items():
        show(f"To fit {card} GB, add {fit.as_words(settings)}", wrap=True)
    for note in found.own.notes:
        show(f"Note: {note}.", wrap=True)


def tables(found: Any, cfg: Any) -> list[Any]:
    """A budget as tables: each phase, the whole run, what stays, and the cards."""
    from rich.table import Table

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

    # Second table: from the start of the run to its end.
    run = Table(title=f"The run of {b.iterations} iterations, without rewards")
    for name in ("part", "h:min"):
        run.add_column(name, justify="left" if name == "part" else "right")
    for name, seconds in b.run.items():
        run.add_row(name, hours(seconds), style="bold" if name == "total" else None)

    # Third table: what stays in memory from phase to phase.
    stays = Table(title=f"What stays, GB ({b.parameters['trained']:,} trained weights)")
    for name in ("of", "GB"):
        stays.add_column(name, justify="left" if name == "of" else "right")
    off = {"network": cfg.model.offload != "none", "rewards": cfg.model.offload == "all"}
    off["text encoders"] = cfg.model.encoders == "leave"
    for name, size in b.fixed.items():
        stays.add_row(name, "off the card" if off.get(name) and not size else f"{size:.2f}")

    return [phases, run, stays, _cards(found, b.device)]


def _cards(found: Any, device: Any) -> Any:
    """The table of the cards that hold the run, as it is or with other settings."""
    from rich.table import Table

    from flowrl.training.budget.fit import CARDS
    from flowrl.training.budget.whole_run import hours

    cards = Table(title=f"Cards ({device.source})")
    on = f"on {device.name}"
    for name in ("card", "fits", "needs GB", f"seconds an iteration {on}", f"h:min {on}"):
        cards.add_column(name, justify="left" if name in ("card", "fits") else "right")
    for card, free in CARDS.items():
        step = found.on(free)
        if step is None:
            cards.add_row(f"{card} GB", "no", f"{found.steps[-1].budget.needed:.1f}", "", "")
            continue
        how = "changed, see below" if step.settings else "yes"
        needed, seconds = step.budget.needed, step.budget.seconds
        whole = hours(step.budget.run["total"])
        cards.add_row(f"{card} GB", how, f"{needed:.1f}", f"{seconds:.3g}", whole)
    return cards
