"""THE training loop: `for it in Trainer(cfg)`, or `flowrl.train(cfg)` to the end.

One iteration: prompts -> samples -> rewards -> advantages -> updates -> old policy. The parts of a
run are built and checked in training/build.py before anything is written; training/outputs.py
writes its files, and training/state.py says what a checkpoint holds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from flowrl.algorithms.common.base import check_gated
from flowrl.config.live import with_live_objects
from flowrl.rewards import check_valid, reward_metrics
from flowrl.rollouts.draw import draw
from flowrl.rollouts.records import Drawn, Source
from flowrl.rollouts.trained import TrainingBatch, what_to_train
from flowrl.training import outputs, state
from flowrl.training.build import build
from flowrl.training.diversity import Diversity
from flowrl.training.observe import Observation, Observer
from flowrl.training.ratio_check import RatioCheck
from flowrl.training.records import Credited, Iteration, Run
from flowrl.training.resume import config_of
from flowrl.training.resume import resume as continue_run
from flowrl.training.run import run_to_the_end, stop_rule
from flowrl.training.update import Learner, climbed_terms, data_terms
from flowrl.training.watch.one_view import OneView
from flowrl.training.watch.reward_trial import NoiseWatch
from flowrl.training.winner_gain import winner_gain
from flowrl.types import Columns, Rewards, brief


class Trainer:
    """Iterating trains. Leaving the `for` early is safe: call `save` to keep the state."""

    def __init__(
        self, cfg: Any = None, *, resume: Any = None, accept_changes: bool = False, **live: Any
    ) -> None:
        """See `flowrl.train`, which takes the same arguments."""
        cfg, objects = with_live_objects(
            config_of(Path(resume)) if cfg is None and resume else cfg, **live
        )
        self.parts = build(cfg, resume, accept=accept_changes, live=objects)
        self.learner = Learner(self.parts)
        self.prepare()
        self.iteration, self.hours = 0, 0.0  # number of finished iterations, and their hours
        self.stopped: str | None = None
        self.saved_at: int | None = None  # iteration of the newest checkpoint
        self.saved_time = time.monotonic()
        self.started = False  # whether start-up before the first iteration has finished
        self.budget: str | None = None  # sentence of `start` about this machine's GPU
        if resume is not None:
            continue_run(self, accept=accept_changes)

    def __repr__(self) -> str:
        method = f"{self.cfg.algorithm['label']} on {self.cfg.model.source}"
        done = f"iteration {self.iteration} of {self.cfg.iterations}"
        return brief(self, method, done, f"path={str(self.path)!r}")

    def prepare(self) -> None:
        """Set the attributes that iterations read, and those steps of them that have a state."""
        self.setup, self.source, self.path = self.parts.setup, self.parts.source, self.parts.path
        self.cfg, self.algorithm = self.setup.cfg, self.setup.algorithm
        source = self.source
        self.world, self.policy, self.ledger = source.world, source.policy, source.ledger
        self.views = self.algorithm.views  # copies of the weights that follow them
        self.ratio_check = RatioCheck(self.learner)
        self.noise_watch = NoiseWatch()
        self.observers = self.choose_observers()

    def __iter__(self) -> Iterator[Iteration]:
        outputs.start(self)
        # again, because the rewards' noise is known only after `start` has tried them
        self.observers = self.choose_observers()
        began, before = time.perf_counter(), self.hours
        while self.iteration < self.cfg.iterations and self.stopped is None:
            result = self.iterate(self.iteration)
            self.iteration += 1
            self.hours = before + (time.perf_counter() - began) / 3600
            outputs.record(self, result)
            yield result
            reason = self.stopped or stop_rule(self.cfg.stop, result.metrics, self.hours)
            self.stopped = self.world.agree(reason)
            if state.due(self):
                self.save()

    def iterate(self, i: int) -> Iteration:
        """Iteration i, from 0: the six steps of GRPO, with the parts of this run plugged in."""
        self.ledger.reset()
        source = self.source.at(i) if self.source.rewards.rules else self.source

        # Plan: choose the denoising steps to walk, and those of them to train.
        plan = self.algorithm.plan(
            self.setup.sigmas, sampler=self.cfg.sampler, iteration=i, seed=self.cfg.seed
        )

        # Draw: prompts -> samples -> rewards, for this process's share of the prompts.
        drawn = draw(source, i, plan)

        # Gather: rewards of all processes, because statistics must not depend on their number.
        rewards = self.world.gather_rewards(drawn.rewards)
        group = self.world.gather_groups(drawn.rollout.group)
        check_valid(rewards, self.cfg.guard.invalid_fraction)

        # Credit: rewards -> an advantage for each sample -> rows of the loss with their advantages.
        with self.ledger.phase("advantages"):
            credited = self.credit(source, i, drawn, rewards, group)
        batch, columns = credited.batch, credited.columns
        metrics = reward_metrics(rewards) | credited.metrics
        if self.ratio_check.needed:  # the policy has not moved yet, so its ratio must be 1
            columns = self.ratio_check(batch.rollout, columns, metrics)

        # Update: the gradient of the loss over these rows, and the optimizer's steps.
        with self.ledger.phase("update"):
            metrics |= self.update(source, i, drawn, batch, columns)
        # weights have moved: no signal may give up this iteration until it is recorded
        self.learner.touched = True

        # Observers read the iteration before the old policy has followed the new one.
        seen = Observation(
            number=i + 1,
            drawn=drawn,
            rewards=rewards,
            group=group,
            batch=batch,
            columns=columns,
            metrics=metrics,
        )
        observed: dict[str, float] = {}
        for observer in self.observers:
            observed |= observer(seen)

        # Follow: update the old policy, a moving reference, and what later plans depend on.
        self.follow(i, credited.observed)

        return Iteration(
            number=i + 1,
            batch=drawn.batch,
            rollout=drawn.rollout,
            rewards=drawn.rewards,
            shown=drawn.shown,
            metrics=metrics | observed | self.ledger.iteration(),
        )

    def credit(
        self, source: Source, i: int, drawn: Drawn, rewards: Rewards, group: Tensor
    ) -> Credited:
        """Turn rewards into advantages of all processes' samples -> the rows that this process
        trains.

        rewards, group: for the samples of all processes; drawn: the samples of this process.
        """
        algorithm, chooser, metrics = self.algorithm, source.chooser, {}
        if rewards.features is None:
            everyone = algorithm.leaf_advantages(rewards, group)
        else:  # samples that are alike share their credit
            diversity = Diversity(self.cfg.diversity)
            everyone, metrics = diversity(algorithm.leaf_advantages, rewards, group)
        mine = self.world.part(len(drawn.rollout.leaf))
        leaf, gate = everyone[mine], algorithm.kl_gate(rewards)
        if gate is not None:  # only samples with a suspect reward are held to the reference
            metrics |= {"policy/kl_gate": gate.mean().item()}
            gate = gate[mine]
        if chooser.learns or chooser.helper:  # decide which prompts come next, and which get help
            metrics |= chooser.learn_from(i, drawn, leaf, self.world.gather)
        observed = algorithm.observe(drawn.rollout, drawn.rewards)
        observed = self.world.mean_metrics(observed) if observed else {}
        # old samples may join the new ones
        batch = what_to_train(source, i, drawn, leaf, gate)
        advantages = algorithm.advantages(batch.rollout, batch.leaf)
        if batch.kl_gate is not None:
            advantages = replace(advantages, kl_gate=batch.kl_gate)
        rows = algorithm.columns(batch.rollout, advantages, seed=self.cfg.seed, iteration=i)
        check_gated(algorithm, advantages, rows)
        return Credited(
            batch=batch,
            columns=batch.weighed(rows) if self.cfg.replay.size else rows,
            observed=observed,
            metrics=metrics | observed | batch.metrics,
        )

    def update(
        self, source: Source, i: int, drawn: Drawn, batch: TrainingBatch, columns: Columns
    ) -> dict[str, float]:
        """Train the rows, and beside them media of the user's own and rewards of mode=grad ->
        metrics."""
        if self.policy.teachers is not None:
            self.policy.teachers.begin(drawn.batch.meta)
        more = data_terms(source, self.algorithm, batch.rollout.plan, columns, i)
        if "reward" in self.setup.needs:
            self.learner.policy.reward_of = source.reward_of(drawn.batch)
            more += climbed_terms(source, batch, i)
        return self.learner.update(batch, columns, more)

    def follow(self, i: int, observed: dict[str, float]) -> None:
        """Let copies of the weights follow them, and the method learn facts for later plans."""
        if observed:
            self.algorithm.remember(observed)
        if self.views:
            for view, decay in self.algorithm.follow(self.learner.step, i).items():
                self.policy.trainable.copy("default", view, decay)

    def choose_observers(self) -> tuple[Observer, ...]:
        """Choose the observers that this run needs; their order is the same on all processes."""
        found: list[Observer] = []
        if self.noise_watch.noise:
            found.append(self.noise_watch)
        if "old" in self.views:
            found.append(OneView(self.learner))
        if self.cfg.train.mode == "lora" or "reference" in self.algorithm.needs:
            found.append(partial(winner_gain, self.learner))
        if self.cfg.watch.held_out is not None or self.cfg.watch.detectors:
            found.append(self.parts.watch)
        return tuple(found)

    def run(self) -> Run:
        """Iterate to the end with a progress bar; see `train`."""
        return run_to_the_end(self)

    def finish(self) -> Run:
        """Write the averaged LoRA and the report; `run` does it at its end."""
        return outputs.finish(self)

    def describe(self) -> str:
        """Describe what an iteration will do, before it starts."""
        return outputs.describe(self)

    def save(self) -> Path | None:
        """Save all that a later `--resume` needs, once for each iteration."""
        return state.save(self)
