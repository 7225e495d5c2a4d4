"""`flowrl train --seeds`: a run for each seed, one after another in processes of their own, and
their comparison. What is there already is not trained again."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import typer

from flowrl.cli.common import complain, parse_run, show
from flowrl.cli.report import compare
from flowrl.config.load import diff, read_config
from flowrl.runtime.processes.launcher import launched
from flowrl.runtime.signals import by_signal
from flowrl.runtime.store import history
from flowrl.runtime.store.run_folder import is_run
from flowrl.runtime.text import listed

FLOWRL = [sys.executable, "-m", "flowrl"]  # command of a process that trains one seed


def split(given: str, overrides: list[str] | None) -> tuple[list[int], list[str]]:
    """Read --seeds 0,1,2 or --seeds 0 1 2, whose last seeds arrive among the words -> the seeds,
    and the other words."""
    words = [word for word in overrides or () if not word.isdecimal()]
    texts = [*given.split(","), *(word for word in overrides or () if word.isdecimal())]
    if wrong := [text for text in texts if not text.strip().isdecimal()]:
        raise ValueError(f'--seeds: "{wrong[0]}" is not a whole number; write --seeds 0,1,2')
    seeds = [int(text) for text in texts]
    if twice := [seed for seed in seeds if seeds.count(seed) > 1]:
        raise ValueError(f"--seeds names {twice[0]} twice; name each seed once")
    if own := [word for word in words if word.lstrip("+~").startswith("seed=")]:
        raise ValueError(f"{own[0]} and --seeds both choose the seed; leave one of them out")
    if launched() > 1:
        raise ValueError("--seeds starts one process after another; under a launcher, give seed=")
    return seeds, words


def plan(seeds: list[int], words: list[str]) -> tuple[dict[int, list[str]], Path]:
    """Find what there is to do -> seed -> the words of its `flowrl train`, [] if its run is
    finished; and the folder of all runs. ValueError where a start would refuse the words, or a run
    that is there has other settings."""
    folder, out = parse_run(words).output, {}
    if not folder or is_run(folder):
        what = f"output={folder} is a run" if folder else "--seeds needs a folder for its runs"
        raise ValueError(f"{what}; add output=runs/NAME, whose runs are runs/NAME/seed-0 and so on")
    for seed in seeds:
        place = Path(folder, f"seed-{seed}")
        out[seed] = [*words, f"seed={seed}", f"output={place}"]
        cfg = parse_run(out[seed])
        if is_run(place):
            if changed := diff(read_config(place / "config.yaml"), cfg):
                what = f"{place} was trained with other settings ({listed(changed)})"
                raise ValueError(f"{what}; repeat the words of then, or choose another output=")
            out[seed] = [] if _finished(place) else ["--resume", str(place)]
    return out, Path(folder)


def _finished(run: Path) -> bool:
    last: dict[str, Any] = (history.read(run) or [{}])[-1]
    return last.get("event") == "ended" and not by_signal(last.get("what"))


def train_all(commands: dict[int, list[str]], folder: Path) -> None:
    """Train what is missing, compare the runs that are finished, and exit with 1 if one is not."""
    places, failed = {seed: folder / f"seed-{seed}" for seed in commands}, set()
    for number, (seed, words) in enumerate(commands.items(), 1):
        state = "" if words else " is finished"
        show(f"Seed {seed} ({number} of {len(commands)}){state}: {places[seed]}", wrap=True)
        code, stopped = _run(["train", *words]) if words else (0, False)
        failed |= {seed} if code else set()
        if stopped:
            break
    done = [place for place in places.values() if _finished(place)]
    if done:
        compare(done, folder / "comparison.html", "algorithm")
    if left := [str(s) for s, place in places.items() if s in failed or place not in done]:
        complain(f"not finished: seed {listed(left)}; the same command goes on with what is left")
        raise typer.Exit(1)


def _run(words: list[str]) -> tuple[int, bool]:
    """Run a command -> its exit code, and whether a signal asks to start no other one. SIGTERM is
    passed on; Ctrl-C reaches the command by itself."""
    asked: list[int] = []

    def ask(number: int, _: Any) -> None:
        asked.append(number)
        if number == signal.SIGTERM:
            process.terminate()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        process = subprocess.Popen([*FLOWRL, *words])
        return process.wait(), bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
