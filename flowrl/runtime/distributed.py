"""What a run asks of accelerate: precision, trackers, and sums and gathers over its processes.

Prompts are dealt to processes whole (a group never spreads over two), and gradients are summed
after the last micro-batch, so ranks may differ in their number of micro-batches. Statistics are
made from gathered rewards, so they do not depend on the number of processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import ProjectConfiguration, gather_object
from torch import Tensor

from flowrl.types import Rewards


def start(precision: str, trackers: list[str], folder: Path) -> Accelerator:
    """An Accelerator that writes nothing yet. An unknown or missing tracker, or fp16 without a GPU
    -> ValueError."""
    if precision == "fp16" and not torch.cuda.is_available():
        raise ValueError("train.precision=fp16 needs a GPU, and there is none; use bf16 or no")
    # an earlier run of this process may have had another precision
    AcceleratorState._reset_state(reset_partial_state=False)
    project = ProjectConfiguration(str(folder), logging_dir=str(folder))
    try:
        accelerator = Accelerator(
            mixed_precision=precision, log_with=trackers or None, project_config=project
        )
    except (ValueError, ImportError) as error:
        raise ValueError(f"train.precision={precision}, trackers={trackers}: {error}") from error
    found = {str(getattr(tracker, "value", tracker)) for tracker in accelerator.log_with}
    missing = set(trackers) - found - {"all"}
    if missing:
        raise ValueError(
            f"trackers={trackers}: {sorted(missing)[0]} is not installed; install it, or leave it"
            " out"
        )
    return accelerator


class World:
    """The processes of a run. rank in [0, size); main is rank 0."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.rank, self.size = accelerator.process_index, accelerator.num_processes
        self.main = accelerator.is_main_process

    def share(self, count: int) -> slice:
        """This process's part of `count` prompts; count divides by the number of processes."""
        # every size-th, so that an update trains the same prompts on any number of processes
        return slice(self.rank, count, self.size)

    def part(self, rows: int) -> slice:
        """Where this process's `rows` rows lie in what `gather` returns."""
        before = sum(self._counts(rows)[: self.rank]) if self.size > 1 else 0
        return slice(before, before + rows)

    def gather(self, value: Tensor) -> Tensor:
        """Concatenate (n, ...) over processes, in rank order; n may differ."""
        if self.size == 1:
            return value
        counts = self._counts(len(value))
        if not max(counts):
            return value
        padded = torch.cat([value, value.new_zeros(max(counts) - len(value), *value.shape[1:])])
        pieces = self.accelerator.gather(padded.contiguous()).split(max(counts))
        return torch.cat([piece[:count] for piece, count in zip(pieces, counts, strict=True)])

    def _counts(self, rows: int) -> list[int]:
        """Rows of every process."""
        if self.size == 1:
            return [rows]
        mine = torch.tensor([rows], device=self.accelerator.device)
        return self.accelerator.gather(mine).tolist()

    def gather_rewards(self, rewards: Rewards) -> Rewards:
        """Rewards of all processes; errors stay local."""
        raw = {name: self.gather(value) for name, value in rewards.raw.items()}
        return replace(
            rewards, raw=raw, total=self.gather(rewards.total), valid=self.gather(rewards.valid)
        )

    def gather_groups(self, group: Tensor) -> Tensor:
        """Groups (B,) of all processes, numbered apart."""
        return self.gather(group + self.rank * (1 << 32))

    def sum(self, value: Tensor) -> Tensor:
        """Sum of equal shapes over processes."""
        return value if self.size == 1 else self.accelerator.reduce(value, "sum")

    def sum_metrics(self, metrics: dict[str, Tensor]) -> dict[str, float]:
        """Sum by name over processes; one that trained no row has no names."""
        mine = {name: float(value) for name, value in metrics.items()}
        if self.size == 1:
            return mine
        everyone = gather_object([mine])
        return {
            name: sum(m.get(name, 0.0) for m in everyone) for name in sorted(set().union(*everyone))
        }

    def mean_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Mean by name over the processes that have it."""
        if self.size == 1:
            return metrics
        everyone = gather_object([metrics])
        return {
            name: sum(v := [m[name] for m in everyone if name in m]) / len(v)
            for name in sorted(set().union(*everyone))
        }

    def agree(self, reason: str | None) -> str | None:
        """The first process's reason to stop, if any has one: all leave the loop at the same
        iteration."""
        return reason if self.size == 1 else next((r for r in gather_object([reason]) if r), None)

    @contextmanager
    def all_or_none(self, error: type[Exception]) -> Iterator[None]:
        """Where `error` is raised inside on one process, it is raised after it on all of them."""
        said = None
        try:
            yield
        except error as raised:
            said = str(raised)
        if said := self.agree(said):
            raise error(said)

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Add up gradients over processes, a missing one counting as zero."""
        if self.size == 1:
            return
        for p in parameters:
            p.grad = self.sum(torch.zeros_like(p) if p.grad is None else p.grad)


def scaler_state(accelerator: Accelerator) -> dict[str, Any]:
    """State of the fp16 gradient scaler; {} without one."""
    return {} if accelerator.scaler is None else accelerator.scaler.state_dict()
