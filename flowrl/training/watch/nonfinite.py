"""Write out the batch of an update whose loss or gradient is not finite, for inspection."""

from __future__ import annotations

from pathlib import Path

from flowrl.runtime.log import logger
from flowrl.runtime.store import checkpoint
from flowrl.training.records import RunFailed
from flowrl.types import Columns, Rollout


def write_out(run: Path, name: str, rollout: Rollout, part: Columns) -> None:
    """Write the rows of an update and the states that they read, and log where they are."""
    folder = run / "nonfinite"
    used = {f"columns.{column}": value.cpu() for column, value in part.data.items()}
    used |= {"states": rollout.states.cpu(), "prompt": rollout.prompt.cpu()}
    checkpoint.write_tensors(folder / f"{name}.safetensors", used)
    logger.warning(f"{name}: loss or gradient is not finite; skipped, its batch is in {folder}")


def given_up(run: Path, updates: int) -> RunFailed:
    """Make the error after so many such updates in a row."""
    return RunFailed(
        f"{updates} updates in a row had a non-finite loss or gradient; lower optimizer.lr or use"
        f" train.precision=no, and look at {run / 'nonfinite'}; the last checkpoint stands"
    )
