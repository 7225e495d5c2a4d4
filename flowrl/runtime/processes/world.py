"""How a run uses accelerate: precision, and sums and gathers over its processes.

Prompts are dealt to processes whole (a group never spreads over two), and gradients are summed
after the last micro-batch, so ranks may differ in their number of micro-batches; where networks are
split, they keep in step (in_step.py). Statistics are made from gathered rewards, so
they do not depend on the number of processes.

With train.sequence_parallel=k, k processes in a row are a team: they hold the same prompts and the
same samples, and share each call of the network (training/split/sequence.py). To everything else a
team is one process, whose numbers are those of its first member; prompts are dealt to teams.

A process that died is noticed at once, because its connections close. One that hangs is noticed
after guard.rank_seconds, where all of them meet: when rewards are gathered, before gradients are
summed, and wherever they agree. The others say which one it was and end with an error.
"""

from __future__ import annotations

import io
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import accelerate
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import InitProcessGroupKwargs
from torch import Tensor
from torch import distributed as dist
from torch.nn.functional import pad
from torch.nn.utils import get_total_norm

from flowrl.runtime.log import logger
from flowrl.runtime.processes import shares
from flowrl.runtime.processes.in_step import InStep
from flowrl.runtime.processes.launcher import check_launcher, check_teams, launched
from flowrl.runtime.signals import Aborted
from flowrl.types import LARGEST, Rewards

# seconds after which every connection of a process that stopped is known to be closed
NOTICED = 0.5
T = TypeVar("T")
BUCKET = 2**26  # most numbers in gradients that are summed in one piece: 256 MB in fp32


def start(precision: str | None, seconds: float = 3600) -> Accelerator:
    """Make an Accelerator without trackers, which a run opens itself. fp16 without a GPU ->
    ValueError.

    precision: train.precision; None: nothing is trained. seconds: the longest that a process waits
    for the others.
    """
    check_launcher(os.environ, precision)
    if precision == "fp16" and not torch.cuda.is_available():
        raise ValueError("train.precision=fp16 needs a GPU, and there is none; use bf16 or no")
    # an earlier run in this process may have had another precision
    AcceleratorState._reset_state(reset_partial_state=False)
    try:
        with all_start():
            accelerator = Accelerator(
                # without a GPU accelerate would take each of several processes for one alone
                cpu=launched() > 1 and not torch.accelerator.is_available(),
                mixed_precision=precision or "no",
                # twice the patience of meetings: their error comes first, and names who is missing
                kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=2 * seconds))],
            )
    except (ValueError, ImportError) as error:
        raise ValueError(f"train.precision={precision}: {error}") from error
    if not accelerator.is_main_process:
        logger.setLevel(logging.ERROR)  # the main process alone says what all would say
    return accelerator


class Lost(RuntimeError):
    """Another process of this run stopped, or did not come in time."""


def here() -> World | Alone:
    """Return the processes in which a launcher started this command, or this one alone."""
    if launched() == 1:
        return ALONE
    return World(start(None))


@contextmanager
def all_start() -> Iterator[None]:
    """Inside, processes are being connected; a process that stops meanwhile is Lost."""
    try:
        yield
    except dist.DistError as error:
        raise Lost(
            "another process of this run stopped while all of them were being connected; its own"
            " last message says why"
        ) from error


class World:
    """The processes of a run, in teams of `members`.

    process is in [0, processes), and process 0 is `main`; rank, in [0, size), is the team's number.
    seconds: the longest that one process waits for the others. asked: the signal that asked this
    process to end the run, as a sentence; hurry: whether it should leave the iteration unfinished.
    """

    def __init__(
        self, accelerator: Accelerator, seconds: float = 3600, *, members: int = 1
    ) -> None:
        """ValueError if the processes do not make whole teams of `members`."""
        self.accelerator, self.seconds, self.members = accelerator, seconds, members
        self.process, self.processes = accelerator.process_index, accelerator.num_processes
        check_teams(self.processes, members)
        self.rank, self.size = self.process // members, self.processes // members
        self.leads = self.process % members == 0  # whether this process is the first of its team
        self.main = accelerator.is_main_process
        self.asked: str | None = None
        self.hurry = False
        self.control: Any = None  # process group of meetings, on the CPU
        self.team: Any = None  # process group of this process's team, on the CPU
        self.in_step: InStep | None = None  # set when networks are split over the processes
        if self.processes > 1 and dist.is_initialized():
            limit = timedelta(seconds=2 * seconds)
            with all_start():
                self.control = dist.new_group(backend="gloo", timeout=limit)
                for first in range(0, self.processes if members > 1 else 0, members):
                    # all processes must take part in making each group
                    ranks = [*range(first, first + members)]
                    group = dist.new_group(ranks, backend="gloo", timeout=limit)
                    self.team = group if self.process in ranks else self.team

    def share(self, count: int) -> slice:
        """This team's part of `count` prompts; count divides by the number of teams."""
        # every size-th prompt, so that an update trains the same prompts on any number of teams
        return slice(self.rank, count, self.size)

    def part(self, rows: int) -> slice:
        """Return where this team's `rows` rows lie in the result of `gather`."""
        before = sum(self._counts(rows)[: self.rank]) if self.processes > 1 else 0
        return slice(before, before + rows)

    def gather(self, value: Tensor) -> Tensor:
        """Concatenate (n, ...) over teams, in rank order; n may differ."""
        if self.processes == 1:
            return value
        counts = self._counts(len(value))
        if not max(counts):
            return value
        padded = torch.cat([value, value.new_zeros(max(counts) - len(value), *value.shape[1:])])
        with self._together():
            pieces = self.accelerator.gather(padded.contiguous()).split(max(counts))
        pieces = self._leaders(pieces)
        return torch.cat([piece[:count] for piece, count in zip(pieces, counts, strict=True)])

    def _counts(self, rows: int) -> list[int]:
        """Gather the number of rows of every team."""
        mine = torch.tensor([rows], device=self.accelerator.device)
        with self._together():
            return self._leaders(self.accelerator.gather(mine).tolist())

    def _leaders(self, everyone: Sequence[T]) -> list[T]:
        """Keep the value of each team's first process."""
        return [*everyone[:: self.members]]

    def alike(self, value: T) -> T:
        """Return the value of the team's first member. A judge's scores may differ from one call to
        the next, and what a team samples and trains next depends on them."""
        if self.team is None:
            return value
        sent = [packed(value) if self.leads else b""]
        with self._together():
            dist.broadcast_object_list(sent, self.rank * self.members, group=self.team)
        return value if self.leads else unpacked(sent[0], self.accelerator.device)

    def gather_rewards(self, rewards: Rewards) -> Rewards:
        """Gather the rewards of all processes, and the first error of each.

        Aborted, on all of them, if one was asked to hurry.
        """
        if self.processes == 1:
            return rewards
        self.meet()
        hurry = self.asked if self.hurry else None
        told = self._everyone((hurry, rewards.errors[:1], rewards.kinds, rewards.domain or ()))
        if reason := next((reason for reason, *_ in told if reason), None):
            raise Aborted(reason)
        told = self._leaders(told)
        return replace(
            rewards,
            raw={name: self.gather(value) for name, value in rewards.raw.items()},
            counted={name: self.gather(value) for name, value in rewards.counted.items()},
            seen={},  # left out here: flowrl/training/watch/watch.py gathers it
            total=self.gather(rewards.total),
            valid=self.gather(rewards.valid),
            errors=[error for _, errors, *_ in told for error in errors],
            kinds=dict(sum((Counter(kinds) for _, _, kinds, _ in told), Counter[str]())),
            features=self._gather_features(rewards.features),
            asked={name: self.gather(rows) for name, rows in rewards.asked.items()},
            domain=None if rewards.domain is None else [d for *_, names in told for d in names],
        )

    def _gather_features(self, features: Tensor | None) -> Tensor | None:
        """Gather (n, d) of all processes. Rows of a process without features, whose d is 0, become
        NaN."""
        if features is None:
            return None
        width = max(self._everyone(features.shape[1]))
        return self.gather(pad(features, (0, width - features.shape[1]), value=float("nan")))

    def gather_groups(self, group: Tensor) -> Tensor:
        """Gather groups (B,) of all teams, numbered so that no two teams share a number."""
        return self.gather(group + self.rank * (1 << 32))

    def sum(self, value: Tensor) -> Tensor:
        """Sum values of equal shapes over teams."""
        if self.processes == 1:
            return value
        return self._add_up(value if self.leads else torch.zeros_like(value))

    def _add_up(self, value: Tensor) -> Tensor:
        """Sum values of equal shapes over processes."""
        with self._together():
            return self.accelerator.reduce(value, "sum")

    def sum_metrics(self, metrics: dict[str, Tensor]) -> dict[str, float]:
        """Sum metrics of a loss by name over teams, or take the largest, as LossOutput has them; a
        team that trained no row has no names."""
        mine = {name: float(value) for name, value in metrics.items()}
        return self._by_name(mine, lambda name, of: max(of) if name.endswith(LARGEST) else sum(of))

    def mean_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Average metrics by name over the teams that have them."""
        return self._by_name(metrics, lambda _, values: sum(values) / len(values))

    def _by_name(
        self, metrics: dict[str, float], combine: Callable[[str, list[float]], float]
    ) -> dict[str, float]:
        """Combine metrics over the teams that have them. combine: a name and its values -> one."""
        if self.processes == 1:
            return metrics
        everyone = self.collect(metrics)
        names = sorted(set().union(*everyone))
        return {name: combine(name, [m[name] for m in everyone if name in m]) for name in names}

    def agree(self, reason: str | None) -> str | None:
        """Return the first process's reason to stop, if any has one, so that all leave the loop at
        the same iteration. A signal to one of them is such a reason."""
        return self._first(self.asked or reason)

    def check_alike(self, cfg: Any) -> None:
        """Raise ValueError on all processes where their devices, versions or settings differ."""
        mine = {
            "device": self.accelerator.device.type,
            "torch": torch.__version__,
            "accelerate": accelerate.__version__,
            **cfg,
        }
        for rank, theirs in enumerate(told := self._everyone(mine)):
            for name, value in theirs.items():
                if value != (first := told[0].get(name)):
                    raise ValueError(
                        f"processes of one run are alike, and rank 0 has {name}={first}, rank"
                        f" {rank} {name}={value}; give all of them the same"
                    )

    def collect(self, value: Any) -> list[Any]:
        """Return the values of all teams, in their order, on every process."""
        return self._leaders(self._everyone(value))

    def from_main(self, value: Any) -> Any:
        """Return the main process's value, on every process."""
        return self._everyone(value)[0]

    @contextmanager
    def all_or_none(self, error: type[Exception]) -> Iterator[None]:
        """Raise `error` on all processes after the block where it was raised inside on one of
        them."""
        if self.processes == 1:
            yield
            return
        own = None
        try:
            yield
        except error as raised:
            own = raised
        if said := self._first(None if own is None else str(own)):
            raise own or error(said)

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Add up gradients over processes; a missing one counts as zero. Gradients of split weights
        were added up in their backward. Each member of a team holds the part of its own tokens."""
        if self.processes == 1:
            return
        self.meet()
        grads = []
        for p in (p for p in parameters if not shares.is_split(p)):
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            grads.append(p.grad)
        for some in buckets(grads):  # in buckets, because hundreds of small sums are slow
            whole = self._add_up(torch.cat([grad.flatten() for grad in some]))
            for grad, own in zip(some, whole.split([g.numel() for g in some]), strict=True):
                grad.copy_(own.view_as(grad))

    def clip_gradients(self, parameters: list[torch.nn.Parameter], most: float) -> float:
        """Scale gradients, added up over processes, to a norm of at most `most` -> the old norm."""
        split = [p for p in parameters if shares.is_split(p)] if self.processes > 1 else []
        if not split:
            return float(self.accelerator.clip_grad_norm_(parameters, most))
        own, rest = (
            [shares.held(p.grad) for p in some if p.grad is not None]
            for some in (split, [p for p in parameters if not shares.is_split(p)])
        )
        squares = [get_total_norm(grads).double().square() for grads in (own, rest)]
        norm = float((self.sum(squares[0]) + squares[1]).sqrt())
        for grad in (*own, *rest):
            # the same factor as in torch's clip_grad_norm_
            grad.mul_(min(1.0, most / (norm + 1e-6)))
        return norm

    @contextmanager
    def together(self) -> Iterator[None]:
        """Inside, all processes gather the tensors of which each has a share."""
        self.meet()
        with self._losing():
            yield

    def backward(self, loss: Tensor) -> None:
        """Add up the gradient of a loss; with split networks, when all processes do so."""
        if self.in_step is not None:
            self.in_step.backward(loss)
        else:
            with self.safely() if self.members > 1 else nullcontext():
                self.accelerator.backward(loss)

    def keep_in_step(self, rows: list[Callable[[], Tensor]]) -> InStep:
        """From here on all processes call networks together. rows: see InStep."""
        self.in_step = InStep(self._largest, self.accelerator.backward, self.safely, rows)
        return self.in_step

    def _largest(self, value: int) -> int:
        """Return the largest value of all processes."""
        found = torch.tensor(value)
        with self._losing():
            work = dist.all_reduce(found, dist.ReduceOp.MAX, group=self.control, async_op=True)
            work.wait(timedelta(seconds=self.seconds))
        return int(found)

    @contextmanager
    def safely(self) -> Iterator[None]:
        """Inside, processes make a call together: one that fails because a process is gone is
        Lost."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            time.sleep(NOTICED)
            if self._all_gone():
                raise self._lost(error) from error
            raise

    def meet(self) -> None:
        """Wait for all processes. Lost if one stopped or does not come within `seconds`."""
        if self.control is not None:
            limit = timedelta(seconds=self.seconds)
            with self._together():
                dist.monitored_barrier(self.control, limit, wait_all_ranks=True)

    def _first(self, value: str | None) -> str | None:
        return next((v for v in self._everyone(value) if v), None)

    def _everyone(self, value: Any) -> list[Any]:
        """Return the values of all processes, in their order."""
        if self.processes == 1:
            return [value]
        out = [None] * self.processes
        self.meet()
        with self._together():
            dist.all_gather_object(out, value, group=self.control)
        return out

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Inside, all processes meet. See `_losing`."""
        if self.in_step is not None:
            self.in_step.meet()
        with self._losing():
            yield

    @contextmanager
    def _losing(self) -> Iterator[None]:
        """Turn an error inside that comes from the loss of a process into Lost, which names it."""
        try:
            yield
        except torch.OutOfMemoryError:  # this process's own error; the others are not gone
            raise
        except RuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, error: RuntimeError) -> Lost:
        return Lost(
            f"of the {self.processes} processes, {self._missing(error)} stopped, or did not come"
            f" within guard.rank_seconds={self.seconds:g} seconds; its own last message says why,"
            " and the others cannot go on without it"
        )

    def _missing(self, error: RuntimeError) -> str:
        """Find out which process is gone after a collective failed."""
        if found := re.search(r"Ranks ([\d, ]+) failed", str(error)):
            return f"rank {found[1]}"
        time.sleep(NOTICED)
        if gone := self._all_gone():
            return f"rank {', '.join(map(str, gone))}"
        return "one" if self.main else "rank 0, or one that rank 0 misses and names,"

    def _all_gone(self) -> list[int]:
        """List the processes whose connections are closed."""
        return [p for p in range(self.processes) if p != self.process and self._gone(p)]

    def _gone(self, process: int) -> bool:
        """Whether the connection to a process is closed."""
        try:
            dist.irecv(torch.zeros(1), src=process, group=self.control)
        except RuntimeError:
            return True
        return False


class Alone:
    """One process that shares its work with no other, with the methods of `World` that evaluations
    use."""

    rank, size, main = 0, 1, True

    def collect(self, value: Any) -> list[Any]:
        return [value]

    def from_main(self, value: Any) -> Any:
        return value

    def all_or_none(self, error: type[Exception]) -> AbstractContextManager[None]:
        return nullcontext()


ALONE = Alone()


def packed(value: Any) -> bytes:
    """Serialise a value with tensors, for a process whose device has another number."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpacked(value: bytes, device: torch.device) -> Any:
    """Undo `packed`; tensors that were not on the CPU are put on this device."""

    def place(storage: Any, where: str) -> Any:
        return storage if where == "cpu" else storage.to(device=device)

    return torch.load(io.BytesIO(value), map_location=place, weights_only=False)


def buckets(tensors: Iterable[Tensor], most: int = BUCKET) -> list[list[Tensor]]:
    """Group tensors that are sent as one: those of one type on one device, with at most `most`
    numbers, or a single tensor."""
    out: list[list[Tensor]] = []
    open_: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kind = tensor.dtype, tensor.device
        some = open_.get(kind)
        if some is None or sum(t.numel() for t in some) + tensor.numel() > most:
            some = open_[kind] = []
            out.append(some)
        some.append(tensor)
    return out


def scaler_state(accelerator: Accelerator) -> dict[str, Any]:
    """State of the fp16 gradient scaler; {} without one."""
    return {} if accelerator.scaler is None else accelerator.scaler.state_dict()
