"""Two iterations of a run with a policy that computes nothing: what its own loop would ask for.

The loop, the engine, the method and the update are the run's; the policy's latents are a few
numbers, its networks one, and it writes down what it is asked: how many rows in a forward, under
which guidance and view, with a gradient or not. Rewards all differ, so that every group has a
signal, as with rewards that are no whole numbers. The second iteration is the usual
one: the first also checks ratios, and old weights are still the present ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.config.build import give_heads, make_algorithm
from flowrl.config.schema import Config
from flowrl.config.training import DiversityConfig
from flowrl.policy import Policy
from flowrl.policy.replay.arguments import Cond
from flowrl.policy.replay.call import Request
from flowrl.policy.replay.coords import Schedule
from flowrl.policy.weights.compiled import Compiled
from flowrl.rewards import load_set
from flowrl.rollouts.choose import chooser
from flowrl.rollouts.records import Source
from flowrl.rollouts.replay_buffer import ReplayBuffer
from flowrl.runtime.ledger import Ledger
from flowrl.runtime.processes.world import World
from flowrl.samplers import keys
from flowrl.training.budget.call_shapes import CallShapes
from flowrl.training.budget.meter import Meter
from flowrl.training.budget.modelled import evenly, replay_of
from flowrl.training.build import weights
from flowrl.training.checks import check_batch
from flowrl.training.loop import Trainer
from flowrl.training.records import RunParts
from flowrl.training.setup import set_up
from flowrl.training.update import Learner
from flowrl.training.watch.guards import Guards
from flowrl.training.watch.watch import Watch

GOLDEN = (5**0.5 - 1) / 2
WINNERS = "winners"  # the phase of policy/winner_gain


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyCall:
    """What one call of the policy is, all that its cost depends on. what: "velocity", "decode" or
    "encode"; rows: states, media or prompts; branches: network rows a state."""

    what: str
    rows: int
    branches: int = 1
    guidance: str = "none"  # "none" or "guided"
    detach_uncond: bool = False
    grad: bool = False
    adapted: bool = True  # by LoRA; the reference is not


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A moment of an iteration. asked: what the policy is asked, None where a phase begins or
    ends; backward: its gradient. live: bytes of the loop's own tensors, above those at the start of
    the iteration; since, moved, operators: their peak, the bytes that its operators moved and the
    number of these, since the event before. phase: where that was."""

    phase: str
    asked: PolicyCall | None
    backward: bool
    live: float
    since: float
    moved: float
    operators: int

    def without(self, states: float) -> Event:
        """The event where so many bytes of states lie in host memory; while they are made, all are
        counted, since some are on their way."""
        if self.phase in ("rollout", "encode", "other"):
            return self
        live, since = max(0.0, self.live - states), max(0.0, self.since - states)
        return replace(self, live=live, since=since)


@dataclass(slots=True)
class Notes:
    """What was written down in an iteration."""

    meter: Meter
    events: list[Event] = field(default_factory=list)
    start: int = 0
    before: tuple[float, int] = (0.0, 0)

    def begin(self) -> None:
        self.events = []
        self.start = self.meter.live
        self.meter.reset_peak()
        self.before = self.meter.bytes, self.meter.operators

    def add(self, phase: str, asked: PolicyCall | None = None, *, backward: bool = False) -> None:
        meter, (moved, operators) = self.meter, self.before
        since = meter.reset_peak() - self.start
        self.events.append(
            Event(
                phase=phase,
                asked=asked,
                backward=backward,
                live=meter.live - self.start,
                since=since,
                moved=meter.bytes - moved,
                operators=meter.operators - operators,
            )
        )
        self.before = meter.bytes, meter.operators


class NotedLedger(Ledger):
    """Writes down where phases begin and end. References after the update, of policy/winner_gain,
    are a phase of their own: its rows are not more with more prompts."""

    def __init__(self, notes: Notes) -> None:
        self.notes = notes
        super().__init__("cpu")

    def reset(self) -> None:
        self.updated, self.winners = False, 0  # network rows of that phase
        super().reset()

    def iteration(self) -> dict[str, float]:
        winners = float(self.winners)
        return super().iteration() | {"nfe/winners": winners}

    @property
    def now(self) -> str:
        if self.updated and self.stack:
            return WINNERS
        return self.stack[-1] if self.stack else "other"

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.notes.add(self.now)
        with super().phase(name):
            yield
            self.notes.add(self.now)
        self.updated |= name == "update"

    @contextmanager
    def work(self, kind: str, *, rows: int = 0, call: str = "forward") -> Iterator[None]:
        yield


class Called(torch.autograd.Function):
    """x (n, *L) -> half of it, or media of its rows; writes down its gradient too."""

    @staticmethod
    def forward(ctx, x, weight, note, media):
        ctx.note, ctx.sizes = note, x.shape
        return x * 0.5 if media is None else x.new_full((len(x), *media), 0.5)

    @staticmethod
    def backward(ctx, grad):
        ctx.note()
        return grad.new_zeros(ctx.sizes), grad.new_ones(1, 1), None, None


class ToyPolicy(Policy):
    """A policy of latents `shape` whose calls are those of a pipeline, and do nothing."""

    def __init__(
        self, cfg: Config, shapes: CallShapes, shape: tuple[int, ...], media: tuple[int, ...]
    ) -> None:
        network = nn.Module()
        network.to_q = nn.Linear(1, 1, bias=False)
        lora = cfg.train.mode == "lora"
        adapter = {"rank": 1, "alpha": 1, "targets": ["to_q"]} if lora else None
        super().__init__({shapes.network: network}, adapter, shape)
        with torch.no_grad():  # where a step is not rounded away, so that views differ after it
            for weight in self.trainable.named().values():
                weight.zero_()
        self.regime = replay_of(shapes, torch.float32).regimes[0]
        self.media = media
        self.ledger: NotedLedger | None = None
        if cfg.train.compile == "blocks":
            self.compiled = Compiled([])  # rows are padded

    def branches(self, guidance: float | str) -> int:
        return self.regime.guidance.branches(guidance)

    def schedule(self, steps: int) -> Schedule:
        return evenly(steps)

    def encode(
        self, prompts: list[str], conditions: Sequence[Mapping[str, Any]] | None = None
    ) -> Cond:
        self._note(PolicyCall(what="encode", rows=len(prompts)))
        return Cond.of(prompts, {})

    def _velocity(self, request: Request) -> tuple[Tensor, int]:
        branches = sum(len(blocks) for _, blocks, _, _ in self.regime.passes(request))
        asked = PolicyCall(
            what="velocity",
            rows=len(request.x),
            branches=branches,
            guidance="none" if branches == 1 else "guided",
            detach_uncond=request.detach_uncond and torch.is_grad_enabled() and branches > 1,
            grad=torch.is_grad_enabled(),
            adapted=getattr(self.trainable, "active", "default") != "reference",
        )
        return self._called(request.x, asked, None), branches * len(request.x)

    def decode(
        self,
        x: Tensor,
        sigma: float = 0.0,
        cond: Cond | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        grad = torch.is_grad_enabled() and x.requires_grad
        return self._called(x, PolicyCall(what="decode", rows=len(x), grad=grad), self.media)

    def _called(self, x: Tensor, asked: PolicyCall, media: tuple[int, ...] | None) -> Tensor:
        self._note(asked)
        weight = next(iter(self.trainable.named().values()))
        return Called.apply(x, weight, lambda: self._note(asked, backward=True), media)

    def _note(self, asked: PolicyCall, *, backward: bool = False) -> None:
        if self.ledger is None:
            return
        phase = self.ledger.now
        self.ledger.notes.add(phase, asked, backward=backward)
        if phase == WINNERS and asked.what == "velocity":
            self.ledger.winners += asked.rows * asked.branches


class NotedLearner(Learner):
    """Books the optimizer's step apart."""

    def apply(self) -> None:
        with self.policy.ledger.phase("optimizer"):
            super().apply()


def plainer(cfg: Config) -> Config:
    """Without what has no part in a rehearsal: features of media, and the package of an optimizer,
    which may be missing."""
    plain = cfg.optimizer.model_copy(update={"name": "adamw"})
    return cfg.model_copy(update={"diversity": DiversityConfig(), "optimizer": plain})


class Rehearsal(Trainer):
    """The trainer of a run without its folder, its weights and its rewards. shape, media: of a
    sample, as small as one likes."""

    def __init__(
        self, cfg: Config, shapes: CallShapes, shape: tuple[int, ...], media: tuple[int, ...]
    ) -> None:
        cfg, self.meter = plainer(cfg), Meter()
        self.notes = Notes(self.meter)
        algorithm = make_algorithm(cfg)
        policy = ToyPolicy(cfg, shapes, shape, media)
        give_heads(cfg, policy, algorithm)
        accelerator: Any = _alone()
        world, ledger = World(accelerator), NotedLedger(self.notes)
        setup = set_up(cfg, algorithm, policy)
        check_batch(cfg, processes=1, leaves=setup.plan.leaves)
        numbers = range(4 * cfg.batch.prompts)
        prompts = [{"prompt": f"prompt {k}", "tag": str(k % 4)} for k in numbers]
        rewards = load_set(
            {
                label: {"reward": scores(label), "weight": entry["weight"]}
                | ({"mode": entry["mode"]} if "mode" in entry else {})
                for label, entry in cfg.reward.items()
            }
        )
        source = Source(
            cfg=cfg,
            world=world,
            ledger=ledger,
            prompts=prompts,
            chooser=chooser(prompts, cfg.data.sampler, size=cfg.batch.prompts, seed=cfg.seed),
            dataset=None,
            references=False,
            policy=policy,
            view=algorithm.rollout_view,
            guidance=setup.guidance,
            autocast=nullcontext,
            rewards=rewards,
            buffer=ReplayBuffer(cfg.replay, prompts, cfg.seed) if cfg.replay.size else None,
        )
        self.parts = RunParts(
            setup=setup,
            path=Path(),
            source=source,
            held_out=[],
            weights=weights(setup, policy, accelerator),
            guards=Guards(cfg.guard, rewards),
            watch=Watch(cfg.watch, world, lower=False),
            identity={},
            lock=None,
        )
        self.learner = NotedLearner(self.parts)
        self.prepare()
        policy.ledger = ledger

    def rehearse(self) -> tuple[dict[str, float], list[Event], dict[str, float], float]:
        """(metrics of the first iteration, events and metrics of the second one, bytes of its
        states); metrics are what a line of metrics.jsonl would hold, and nfe/winners."""
        first = self.iterate(0).metrics
        with self.meter:
            self.notes.begin()
            done = self.iterate(1)
            self.notes.add("other")
        states = done.rollout.states
        return first, self.notes.events, done.metrics, states.numel() * states.element_size()


def _alone() -> SimpleNamespace:
    """In place of accelerate's Accelerator, which is one of a process and is the run's."""
    return SimpleNamespace(
        process_index=0,
        num_processes=1,
        is_main_process=True,
        device=torch.device("cpu"),
        scaler=None,
        backward=Tensor.backward,
        clip_grad_norm_=torch.nn.utils.clip_grad_norm_,
        prepare=lambda optimizer: optimizer,
    )


def scores(label: str) -> Callable[[Tensor, list[str], Any], Tensor]:
    """A reward that scores the k-th sample that it sees by the fraction of k times the golden
    ratio: in [0, 1), all differ, and any few in a row are spread evenly, so that half of a group is
    better than its mean, as with most rewards."""
    seen, first = 0, keys.uniform(keys.key("rehearsal", label, torch.arange(1)))

    def score(media: Tensor, prompts: list[str], context: Any = None) -> Tensor:
        nonlocal seen
        places = torch.arange(seen, seen + len(media), dtype=torch.float64)
        seen += len(media)
        spread = (first + places * GOLDEN) % 1
        # a gradient may pass, and changes nothing
        return spread.float().to(media.device) + 0.0 * media.float().flatten(1).mean(1)

    return score
