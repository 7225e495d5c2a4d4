"""Folders in which evaluations of runs are written: the run, whose only writer they then are, or a
folder of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from flowrl.runtime.processes.world import ALONE, Alone, World
from flowrl.runtime.store import files
from flowrl.runtime.store.lock import Busy, Lock
from flowrl.runtime.store.run_folder import config_file


def own(folder: Path, doing: str) -> Lock:
    """Lock a folder for its results; where somebody else holds it, the Busy that is raised names
    the other way."""
    try:
        return Lock(folder, doing)
    except Busy as error:
        raise Busy(f"{error}, or write the results elsewhere with --output") from None


@contextmanager
def places(
    runs: Sequence[Path], output: Path | None, doing: str, world: World | Alone = ALONE
) -> Iterator[dict[Path, Path]]:
    """Run -> the folder of its results, locked inside: the run itself; `output`; or, of several
    runs, a folder in it with the run's name. Only the main process keeps its results."""
    for run in runs:
        config_file(run)
    with ExitStack() as stack:
        with world.all_or_none(ValueError):
            if world.main:
                chosen = stack.enter_context(_locked(runs, output, doing))
            else:
                scratch = Path(stack.enter_context(TemporaryDirectory()))
                chosen = {run: scratch / str(number) for number, run in enumerate(runs)}
        yield chosen


@contextmanager
def _locked(runs: Sequence[Path], output: Path | None, doing: str) -> Iterator[dict[Path, Path]]:
    """`places` of the main process."""
    chosen = {run: _place(run, runs, output) for run in runs}
    if len(set(chosen.values())) < len(chosen):
        raise ValueError("two runs have the same name, so --output cannot hold both; rename one")
    with ExitStack() as stack:
        for place in chosen.values():
            if output:
                place.mkdir(parents=True, exist_ok=True)
            stack.enter_context(own(place, doing))
            files.clean(place, owned=place in runs)
        yield chosen


def _place(run: Path, runs: Sequence[Path], output: Path | None) -> Path:
    if output is None:
        return run
    place = output / run.resolve().name if len(runs) > 1 else output
    if (place / "config.yaml").exists():
        raise ValueError(
            f"--output {place} is a run, whose own results would be lost; choose another folder"
        )
    return place
