"""THE training loop: `for it in Trainer(cfg)`, or `flowrl.train(cfg)` to the end.

One iteration: prompts -> samples -> rewards -> advantages -> updates -> old policy. What a run is
made of is built and checked in training/build.py before anything is written; what it writes is in
training/outputs.py, and what a checkpoint holds in training/state.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flowrl.config.build import schedule
from flowrl.config.live import with_live_objects
from flowrl.rewards import check_valid, reward_metrics
from flowrl.rollouts.draw import draw
from flowrl.rollouts.trained import what_to_train
from flowrl.training import outputs, state
from flowrl.training.build import build
from flowrl.training.ratio_check import RatioCheck
from flowrl.training.records import Iteration, Run
from flowrl.training.resume import config_of
from flowrl.training.resume import resume as continue_run
from flowrl.training.run import run_to_the_end, stop_rule
from flowrl.training.terms import gradient_terms
from flowrl.training.update import Learner
from flowrl.training.watch.reward_trial import NoiseWatch
from flowrl.training.winner_gain import winner_gain


class Trainer:
    """Iterating trains. Leaving the `for` early is safe: call `save` to keep the state."""

    def __init__(
        self, cfg: Any = None, *, resume: Any = None, accept_changes: bool = False, **live: Any
    ) -> None:
        """See `flowrl.train`, which takes the same arguments."""
        cfg, objects = with_live_objects(
            config_of(Path(resume)) if cfg is None and resume else cfg, **live
        )
        self.cfg, self.parts = cfg, build(cfg, resume, accept=accept_changes, live=objects)
        self.path, self.algorithm = self.parts.path, self.parts.algorithm
        self.source = source = self.parts.source
        self.world, self.policy, self.ledger = source.world, source.policy, source.ledger
        self.sigmas = schedule(cfg, self.policy)
        self.learner = Learner(self.parts)
        self.ratio_check = RatioCheck(self.learner)
        self.noise_watch = NoiseWatch()
        self.iteration, self.hours = 0, 0.0  # finished, and how long they took
        self.stopped: str | None = None
        self.saved_at: int | None = None  # iteration of the newest checkpoint
        self.saved_time = time.monotonic()
        self.started = False  # what comes before the first iteration is done
        if resume is not None:
            continue_run(self, accept=accept_changes)

    def __iter__(self) -> Iterator[Iteration]:
        outputs.start(self)
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
        """Iteration i, from 0: the algorithm of every paper here, with its parts plugged in."""
        cfg, algorithm, world, ledger = self.cfg, self.algorithm, self.world, self.ledger
        source = self.source.at(i)
        ledger.reset()

        # Which denoising steps are walked, and which of them are trained.
        plan = algorithm.plan(self.sigmas, sampler=cfg.sampler, iteration=i, seed=cfg.seed)

        # Prompts -> samples -> rewards, on this process.
        drawn = draw(source, i, plan)

        # Rewards of all processes: statistics do not depend on how many there are.
        rewards = world.gather_rewards(drawn.rewards)
        group = world.gather_groups(drawn.rollout.group)
        check_valid(rewards, cfg.guard.invalid_fraction)
        metrics = reward_metrics(rewards)
        if self.noise_watch.noise:  # some reward has noise of its own: is it the larger?
            self.noise_watch(rewards, group)

        # Credit: rewards -> an advantage for each sample -> for each trained step.
        with ledger.phase("advantages"):
            everyone, spread = self.parts.diversity(algorithm.leaf_advantages, rewards, group)
            leaf = everyone[world.part(len(drawn.rollout.leaf))]
            metrics |= spread | source.chooser.told(i, drawn, leaf, world.gather)
            observed = algorithm.observe(drawn.rollout, drawn.rewards)
            observed = world.mean_metrics(observed) if observed else {}
            trained = what_to_train(source, i, drawn, leaf)  # old samples may join the new ones
            rollout = trained.rollout
            advantages = algorithm.advantages(rollout, trained.leaf)
            rows = algorithm.columns(rollout, advantages, seed=cfg.seed, iteration=i)
            columns = trained.weighed(rows)

        # The policy has not moved yet, so its ratio to the sampling policy must be 1.
        if self.ratio_check.needed:
            columns = self.ratio_check(rollout, columns, metrics)

        # Gradient (rewards of mode=grad beside the loss), clip, optimizer step, averaged weights.
        with ledger.phase("update"):
            self.learner.policy.judge = source.judge(drawn.batch)
            metrics |= self.learner.update(trained, columns, gradient_terms(source, trained, i))

        # Are good samples more likely than under the reference?
        metrics |= observed | trained.metrics | winner_gain(self.learner, rollout, columns)

        # The old policy and a moving reference follow.
        self.learner.touched = True  # from here on no signal gives the iteration up
        if observed:
            algorithm.remember(observed)
        for view, decay in algorithm.follow(self.learner.step, i).items():
            self.policy.copy_view("default", view, decay=decay)

        return Iteration(
            number=i + 1,
            batch=drawn.batch,
            rollout=drawn.rollout,
            rewards=drawn.rewards,
            shown=drawn.shown,
            metrics=metrics | ledger.iteration(),
        )

    def run(self) -> Run:
        """Iterate to the end with a progress bar; see `train`."""
        return run_to_the_end(self)

    def finish(self) -> Run:
        """Write the averaged LoRA and the report, as `run` does at its end."""
        return outputs.finish(self)

    def describe(self) -> str:
        """What an iteration will do, before it does it."""
        return outputs.describe(self)

    def save(self) -> Path | None:
        """Everything that a later `--resume` needs, once for each iteration."""
        return state.save(self)
