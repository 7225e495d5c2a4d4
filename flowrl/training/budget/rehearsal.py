"""Rehearse two iterations of a run by its own loop, with a policy that computes nothing.

The loop, the engine, the method and the update are the run's; the policy's latents are a few
numbers, its networks one, and it records its calls: how many rows in a forward, under which
guidance and view, with a gradient or not. Rewards all differ, so that every group has a signal, as
with rewards that are not whole numbers. The second iteration is the usual one: the first also
checks ratios, and its old weights are still equal to the current ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flowrl.config.build import give_heads, make_algorithm
from flowrl.config.facts import of_config
from flowrl.config.schema import Config
from flowrl.config.training import DiversityConfig
from flowrl.data.scored_dataset import Dataset
from flowrl.policy import Policy
from flowrl.policy.replay.arguments import Cond
from flowrl.policy.replay.call import Request
from flowrl.policy.replay.coords import Schedule
from flowrl.policy.teachers import Teacher, Teachers
from flowrl.policy.tokens import TokenGrids
from flowrl.policy.weights.compiled import Compiled
from flowrl.rewards import load_set
from flowrl.rollouts.choose import chooser
from flowrl.rollouts.data_stream import draw_media
from flowrl.rollouts.join import of_leaves
from flowrl.rollouts.records import Source
from flowrl.rollouts.replay_buffer import ReplayBuffer
from flowrl.runtime.ledger import Ledger
from flowrl.runtime.processes.world import World
from flowrl.samplers import keys
from flowrl.training.budget.call_shapes import CallShapes
from flowrl.training.budget.meter import Meter
from flowrl.training.budget.modelled import evenly, replay_of
from flowrl.training.build import weights
from flowrl.training.loop import Trainer
from flowrl.training.records import RunParts
from flowrl.training.setup import set_up
from flowrl.training.update import Learner
from flowrl.training.watch.guards import Guards
from flowrl.training.watch.reward_trial import first_samples
from flowrl.training.watch.watch import Watch
from flowrl.types import Plan, Rollout

GOLDEN = (5**0.5 - 1) / 2
WINNERS = "winners"  # name of the phase of policy/winner_gain


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyCall:
    """One call of the policy: all facts on which its cost depends, beside a run's settings."""

    what: Literal["velocity", "decode", "encode"]  # method of the policy
    rows: int  # number of states, media or prompts
    branches: int = 1  # number of network rows of a state
    guidance: Literal["none", "guided"] = "none"  # "guided": more than one branch
    detach_uncond: bool = False  # guidance's other branch has no gradient
    grad: bool = False  # a backward follows
    adapted: bool = True  # LoRA is on; it is off for the reference


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A moment of an iteration: a call of the policy, or the begin or end of a phase."""

    phase: str  # phase of the ledger; "other" between phases
    call: PolicyCall | None  # the call; None: a phase begins or ends
    backward: bool  # whether the event is the call's backward
    live: float  # bytes of the loop's own tensors, above those at the start of the iteration
    since: float  # the same bytes at the highest moment since the previous event
    moved: float  # bytes that the loop's operators read and wrote since the previous event
    operators: int  # number of the loop's operators since the previous event

    def without(self, states: float) -> Event:
        """Return the event with so many bytes of states moved to host memory; while states are made
        all bytes are counted, because some states are still on the device."""
        if self.phase in ("rollout", "encode", "other"):
            return self
        live, since = max(0.0, self.live - states), max(0.0, self.since - states)
        return replace(self, live=live, since=since)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """The result of two rehearsed iterations."""

    first: dict[str, int]  # metric -> network rows of the first iteration
    rows: dict[str, int]  # metric -> network rows of the second iteration, which is a usual one
    events: list[Event]  # events of the second iteration
    states: float  # bytes of a rollout's states


class NotedLedger(Ledger):
    """A ledger that records when phases begin and end, and the calls of the policy, with the memory
    and operators of the loop between them. Reference calls after the update, for
    policy/winner_gain, are a phase of their own: more prompts do not give it more rows."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.notes: list[Event] = []
        # living bytes at the start, and the books at the previous event
        self.start, self.before = 0, (0.0, 0)
        super().__init__("cpu")

    def reset(self) -> None:
        # whether the update has finished, and network rows of the phase WINNERS
        self.updated, self.winners = False, 0
        super().reset()

    def begin(self) -> None:
        """Record events from here on."""
        self.notes, self.start = [], self.meter.live
        self.meter.reset_peak()
        self.before = self.meter.bytes, self.meter.operators

    def note(self, call: PolicyCall | None = None, *, backward: bool = False) -> None:
        """Record an event of the present phase."""
        meter, (moved, operators) = self.meter, self.before
        since = meter.reset_peak() - self.start
        self.notes.append(
            Event(
                phase=self.now,
                call=call,
                backward=backward,
                live=meter.live - self.start,
                since=since,
                moved=meter.bytes - moved,
                operators=meter.operators - operators,
            )
        )
        self.before = meter.bytes, meter.operators
        if call and self.now == WINNERS and call.what == "velocity":
            self.winners += call.rows * call.branches

    def iteration(self) -> dict[str, float]:
        winners = float(self.winners)
        return super().iteration() | {"nfe/winners": winners}

    @property
    def now(self) -> str:
        """The present phase."""
        if self.updated and self.stack:
            return WINNERS
        return self.stack[-1] if self.stack else "other"

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.note()
        with super().phase(name):
            yield
            self.note()
        self.updated |= name == "update"

    @contextmanager
    def work(self, kind: str, *, rows: int = 0, call: str = "forward") -> Iterator[None]:
        yield


class Called(torch.autograd.Function):
    """Maps x (n, *L) to half of it, or to logits or media of its rows; its backward is recorded."""

    @staticmethod
    def forward(ctx, x, weight, note, size):
        ctx.note, ctx.sizes = note, x.shape
        return x * 0.5 if size is None else torch.full((len(x), *size), 0.5, device=x.device)

    @staticmethod
    def backward(ctx, grad):
        ctx.note()
        return grad.new_zeros(ctx.sizes), grad.new_ones(1, 1), None, None


class ToyPolicy(Policy):
    """A policy with latents of `shape`, which has the calls of a pipeline but computes nothing."""

    def __init__(
        self, cfg: Config, shapes: CallShapes, shape: tuple[int, ...], media: tuple[int, ...]
    ) -> None:
        network = nn.Module()
        network.to_q = nn.Linear(1, 1, bias=False)
        lora = cfg.train.mode == "lora"
        adapter = {"rank": 1, "alpha": 1, "targets": ["to_q"]} if lora else None
        super().__init__({shapes.network: network}, adapter, shape)
        with torch.no_grad():  # around 0 a step is not rounded away, so that views differ after it
            for weight in self.trainable.named().values():
                weight.zero_()
        self.regime = replay_of(shapes, torch.float32).regimes[0]
        self.media, self.vocabulary = media, shapes.vocabulary
        self.ledger: NotedLedger | None = None
        if cfg.train.compile == "blocks":
            self.compiled = Compiled([])  # compiled blocks pad rows

    def branches(self, guidance: float | str) -> int:
        return self.regime.guidance.branches(guidance)

    def schedule(self, steps: int) -> Schedule:
        return evenly(steps)

    def encode(
        self, prompts: list[str], conditions: Sequence[Mapping[str, Any]] | None = None
    ) -> Cond:
        if self.ledger is not None:
            self.ledger.note(PolicyCall(what="encode", rows=len(prompts)))
        return Cond.of(prompts, {})

    def _velocity(self, request: Request) -> tuple[Tensor, int]:
        branches = sum(len(blocks) for _, blocks, _, _ in self.regime.passes(request))
        call = PolicyCall(
            what="velocity",
            rows=len(request.x),
            branches=branches,
            guidance="none" if branches == 1 else "guided",
            detach_uncond=request.detach_uncond and torch.is_grad_enabled() and branches > 1,
            grad=torch.is_grad_enabled(),
            adapted=getattr(self.trainable, "active", "default") != "reference",
        )
        logits = (*self.latent_shape, self.vocabulary) if self.vocabulary else None
        return self._called(request.x, call, logits), branches * len(request.x)

    def decode(
        self,
        x: Tensor,
        sigma: float = 0.0,
        cond: Cond | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        grad = torch.is_grad_enabled() and x.requires_grad
        return self._called(x, PolicyCall(what="decode", rows=len(x), grad=grad), self.media)

    def _called(self, x: Tensor, call: PolicyCall, size: tuple[int, ...] | None) -> Tensor:
        def note(backward: bool) -> None:
            if self.ledger is not None:
                self.ledger.note(call, backward=backward)

        note(False)
        weight = next(iter(self.trainable.named().values()))
        return Called.apply(x, weight, lambda: note(True), size)


class ToyTokens(TokenGrids, ToyPolicy):
    """The same for a masked generator, which encodes an empty text beside each list of prompts."""

    def encode(
        self, prompts: list[str], conditions: Sequence[Mapping[str, Any]] | None = None
    ) -> Cond:
        super().encode([*prompts, ""])
        return Cond.of(prompts, {})


def made_up(dataset: Dataset, source: Source, ids: Tensor, plan: Plan) -> Rollout:
    """Make media (anchor.data) that no file holds, and that cost nothing to encode."""
    with source.ledger.phase("rollout"):
        cond = source.policy.encode([dataset.prompts[i]["prompt"] for i in ids.tolist()])
        x0 = torch.zeros(len(ids), *source.policy.latent_shape)
        return of_leaves(x0, ids, torch.arange(len(ids)), plan, cond)


class NotedLearner(Learner):
    """Books the optimizer's step as a phase of its own."""

    def apply(self) -> None:
        with self.policy.ledger.phase("optimizer"):
            super().apply()


def plainer(cfg: Config) -> Config:
    """Remove settings that have no part in a rehearsal: features of media, and the package of an
    optimizer, which may be missing."""
    plain = cfg.optimizer.model_copy(update={"name": "adamw"})
    return cfg.model_copy(update={"diversity": DiversityConfig(), "optimizer": plain})


def take_teachers(policy: ToyPolicy, named: Mapping[str, Any] | None) -> None:
    """Let the policy be its own teacher, at the costliest guidance of those that are named.

    An adapter costs what the student does; a whole model's weights are not counted.
    """
    if named:
        guidance = max((own.guidance for own in named.values()), key=policy.branches)
        own = Teacher(policy=policy, view="default", guidance=guidance, domains=None)
        policy.teachers = Teachers({"any": own}, "")


class Rehearsal(Trainer):
    """The trainer of a run without its folder, its weights and its rewards. shape, media: shapes of
    one sample, which may be very small."""

    ledger: NotedLedger

    def __init__(
        self, cfg: Config, shapes: CallShapes, shape: tuple[int, ...], media: tuple[int, ...]
    ) -> None:
        # the same steps as in training/build.py, with stand-ins for the run's policy and processes
        cfg = plainer(cfg)
        algorithm = make_algorithm(cfg)
        policy = (ToyTokens if shapes.vocabulary else ToyPolicy)(cfg, shapes, shape, media)
        give_heads(cfg, policy, algorithm)
        take_teachers(policy, getattr(algorithm.config, "teachers", None))
        accelerator: Any = _alone()
        world, ledger = World(accelerator), NotedLedger(Meter())
        setup = set_up(cfg, algorithm, policy)
        of_config(cfg, processes=1, plan=setup.plan)

        # enough prompts that several iterations differ, with tags for samplers that balance them
        numbers = range(4 * cfg.batch.prompts)
        prompts = [{"prompt": f"prompt {k}", "tag": str(k % 4)} for k in numbers]
        own = Dataset(prompts=prompts, items=[[] for _ in prompts], weights={}, kind="media")
        rewards = load_set(
            {
                label: {"reward": scores(label), "weight": entry["weight"]}
                | ({"mode": entry["mode"]} if "mode" in entry else {})
                for label, entry in cfg.reward.items()
            }
        )

        # the parts that an iteration reads
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
            draw_media=partial(draw_media, own, encode=made_up) if cfg.anchor.data.weight else None,
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

    def rehearse(self) -> Rehearsed:
        """Run two iterations, and record the second."""
        first = self.iterate(0).metrics
        with self.ledger.meter:
            self.ledger.begin()
            done = self.iterate(1)
            self.ledger.note()
        states = done.rollout.states
        return Rehearsed(
            first=counts(first),
            rows=counts(done.metrics),
            events=self.ledger.notes,
            states=states.numel() * states.element_size(),
        )

    def trial(self) -> list[PolicyCall]:
        """Make the samples on which a start tries the rewards -> the policy's calls."""
        self.ledger.begin()
        first_samples(self.parts, self.ledger)
        return [event.call for event in self.ledger.notes if event.call]


def counts(metrics: dict[str, float]) -> dict[str, int]:
    """Take the network rows from a line of metrics."""
    names = ("nfe/rollout", "nfe/reference", "nfe/update", "nfe/winners", "policy/rows")
    return {name: round(metrics.get(name, 0.0)) for name in names}


def _alone() -> SimpleNamespace:
    """Stand in for accelerate's Accelerator: a process has only one, which belongs to the run."""
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
    """Make a reward that scores the k-th sample by the fraction of k times the golden ratio: scores
    lie in [0, 1), all differ, and any few in a row are spread evenly, so that half of a group is
    better than its mean, as with most rewards."""
    seen, first = 0, keys.uniform(keys.key("rehearsal", label, torch.arange(1)))

    def score(media: Tensor, prompts: list[str], context: Any = None) -> Tensor:
        nonlocal seen
        places = torch.arange(seen, seen + len(media), dtype=torch.float64)
        seen += len(media)
        spread = (first + places * GOLDEN) % 1
        # a gradient may pass, but is 0
        return spread.float().to(media.device) + 0.0 * media.float().flatten(1).mean(1)

    return score
