"""The batch of an update whose loss or gradient is not finite, written out to be looked at."""

from __future__ import annotations

from pathlib import Path

from flowrl.runtime import checkpoint
from flowrl.runtime.log import logger
from flowrl.types import Columns, Rollout


def write_out(run: Path, name: str, rollout: Rollout, part: Columns) -> Path:
    """Write the rows of an update and the states they read, and say so -> the folder."""
    folder = run / "nonfinite"
    folder.mkdir(exist_ok=True)
    used = {f"columns.{column}": value.cpu() for column, value in part.data.items()}
    used |= {"states": rollout.states.cpu(), "prompt": rollout.prompt.cpu()}
    checkpoint.write_tensors(folder / f"{name}.safetensors", used)
    logger.warning(f"{name}: loss or gradient is not finite; skipped, its batch is in {folder}")
    return folder
