"""Evaluates the averaged weights of a finished or stopped run on held-out prompts, and adds the
result to the run's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flowrl.config.build import autocast, load_run
from flowrl.config.live import held_out_of
from flowrl.evaluation import record
from flowrl.evaluation.held_out import evaluate, recorded, settings_of
from flowrl.report import run_page
from flowrl.runtime.processes.world import ALONE, Alone, World
from flowrl.runtime.store import run_folder


def evaluate_run(
    run: str | Path,
    *,
    images: int | None = None,
    steps: int | None = None,
    guidance: float | str | None = None,
    seed: int | None = None,
    rlg: float | None = None,
    policy: Any = None,
    rewards: Any = None,
    prompts: Any = None,
    into: Path | None = None,
    world: World | Alone = ALONE,
) -> dict[str, Any]:
    """Evaluate the newest checkpoint of a run -> evaluation.json with one row more.

    images, steps, guidance, seed, rlg: None takes the run's own. policy, rewards, prompts: the live
    objects of the run, as flowrl.train took them; prompts are the held-out ones, a list or under
    "eval". A policy is loaded with the run's weights. into: the folder for the results, by default
    the run, whose report is written again. world: the processes that share the samples. An object
    that does not fit, or was live and is not passed -> ValueError.
    """
    run, into = Path(run), Path(run) if into is None else into
    live = held_out_of(policy=policy, rewards=rewards, prompts=prompts)
    cfg, tuned, chosen, held_out = load_run(run, live)
    run_folder.read(run)  # raises an error about broken files before time is spent
    how = settings_of(cfg, guidance=guidance, steps=steps, seed=seed, rlg=rlg)
    tuned.branches(how["guidance"])
    result = evaluate(
        tuned,
        held_out,
        chosen,
        images=images or cfg.eval.images,
        autocast=autocast(cfg, tuned.device),
        world=world,
        **how,
    )
    setting = recorded(how)
    evaluation = record.add_row(into, _row_name(setting), result, held_out, **setting)
    if into == run:
        run_page.build(run)
    return evaluation


def _row_name(setting: dict[str, Any]) -> str:
    steps, guidance, seed = (setting[key] for key in ("steps", "guidance", "seed"))
    beyond = "" if setting["rlg"] == 1 else f", rlg {setting['rlg']:g}"
    return f"evaluate, {steps} steps, guidance {guidance}{beyond}, seed {seed}"
