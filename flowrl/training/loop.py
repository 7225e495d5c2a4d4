"""THE training loop. `for it in Trainer(cfg): it.rollout, it.rewards, it.metrics`, or `train(cfg)`
to the end.

One iteration: prompts -> rollout -> rewards -> advantages -> updates -> old policy -> log. Start-up
(what a run is made of, and everything that can be wrong with it) is in flowrl/training/build.py, so that
nothing is written before all of it was checked.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.config import build as config_build
from flowrl.config.load import dump
from flowrl.config.schema import Config
from flowrl.evaluation import held_out
from flowrl.evaluation import record as evaluation_record
from flowrl.policy.lora import SETTINGS as LORA_SETTINGS
from flowrl.report import grids, run_page
from flowrl.rewards import RewardUnavailable, TooManyInvalid, check_valid
from flowrl.rewards.checks import check
from flowrl.rollouts import draw, join
from flowrl.rollouts.velocity import rows_of
from flowrl.runtime import checkpoint, distributed, log, run_folder
from flowrl.runtime.signals import Aborted, StopRequest, by_signal
from flowrl.samplers import plan as plans
from flowrl.training import build, gradient, ratio_check, reward_trial, update
from flowrl.training.records import Failed, Iteration, Run, reward_metrics
from flowrl.types import Columns, PromptBatch, Rewards, Rollout

COUNTERS = (
    "step",
    "nonfinite",
    "hours",
    "proved",
    "recompute",
)  # of a Trainer, kept in checkpoints


class Trainer:
    """Iterating trains. Leaving the `for` early is safe: call `save` to keep the state."""

    def __init__(self, cfg: Config, *, resume: Path | None = None) -> None:
        self.cfg = cfg
        parts = build.build(cfg, resume)
        self.parts, self.path, self.world, self.policy = (
            parts,
            parts.path,
            parts.world,
            parts.policy,
        )
        self.algorithm, self.rewards, self.prompts, self.ledger = (
            parts.algorithm,
            parts.rewards,
            parts.prompts,
            parts.ledger,
        )
        self.optimizer, self.ema, self.parameters = parts.optimizer, parts.ema, parts.parameters
        self.sigmas = config_build.schedule(cfg, self.policy)
        dearest = max(
            (parts.guidance, build.reference_guidance(parts.algorithm)), key=self.policy.branches
        )
        self.micro = rows_of(cfg.batch.micro, self.policy, dearest)
        self.booked = update.Booked(parts)
        self.collect = draw.Collector(parts)
        self.iteration = self.step = self.nonfinite = (
            0  # iterations and optimizer steps finished; non-finite updates in a row
        )
        self.hours = 0.0
        self.proved = False  # the ratio's self-test was done
        self.recompute = False  # low precision needs old log-probs from the training forward
        self.noise: dict[
            str, float
        ] = {}  # own noise of the rewards, as long as no spread was below it
        self.mid_update = False
        self.stopped: str | None = None
        self.saved_at: int | None = None  # iteration of the newest checkpoint
        if resume:
            self._load(checkpoint.latest(resume))

    # ------------------------------------------------------------------ the loop

    def __iter__(self) -> Iterator[Iteration]:
        self._start()
        began, before = time.perf_counter(), self.hours
        while self.iteration < self.cfg.iterations and self.stopped is None:
            result = self._iterate(self.iteration)
            self.iteration += 1
            self.hours = before + (time.perf_counter() - began) / 3600
            self._record(result)
            self.mid_update = False
            yield result
            self.stopped = self.world.agree(self.stopped or self._stop_rule(result.metrics))
            if (
                self.iteration % self.cfg.checkpoint.every == 0
                or self.iteration == self.cfg.iterations
                or self.stopped
            ):
                self.save()

    def _iterate(self, i: int) -> Iteration:
        cfg, algorithm, ledger = self.cfg, self.algorithm, self.ledger
        ledger.reset()
        plan = algorithm.plan(self.sigmas, sampler=cfg.sampler, iteration=i, seed=cfg.seed)
        drawn = self.collect(i, plan, self.rewards)
        rollout, rewards = drawn.rollout, drawn.rewards
        everyone = self.world.gather_rewards(rewards)
        metrics = reward_metrics(everyone)
        check_valid(everyone, cfg.guard.invalid_fraction)
        group = self.world.gather_groups(rollout.group)
        self._watch_noise(everyone, group)
        with ledger.phase("advantages"):
            leaf = algorithm.leaf_advantages(everyone, group)[self.world.part(len(rollout.leaf))]
            observed = self.world.mean_metrics(algorithm.observe(rollout, rewards))
            kept = draw.chosen(drawn, cfg.batch.group).to(
                leaf.device
            )  # baselines are made of all draws
            rollout = join.take(rollout, kept)
            advantages = algorithm.advantages(rollout, leaf[kept])
            columns = algorithm.columns(rollout, advantages, seed=cfg.seed, iteration=i)
        metrics |= observed
        if "log_prob" in algorithm.needs and (self.recompute or not self.proved):
            columns, error = self._proved(rollout, columns)
            metrics |= {} if error is None else {"policy/ratio_error": error}
        with ledger.phase("update"):
            metrics |= self._update(rollout, columns, drawn.batch)
        metrics |= self._winners(rollout, columns)
        self.mid_update = (
            True  # from here on the iteration is finished and recorded, whatever signal comes
        )
        algorithm.remember(observed)
        for view, decay in algorithm.follow(self.step, i).items():
            self.policy.copy_view("default", view, decay=decay)
        self._samples(i + 1, drawn)
        return Iteration(
            number=i + 1,
            rollout=drawn.rollout,
            rewards=rewards,
            metrics=metrics | ledger.iteration(),
        )

    def _watch_noise(self, rewards: Rewards, group: Tensor) -> None:
        """Warn, once of each reward, where scores within groups differ by less than its own noise:
        training narrows them."""
        if self.world.main and self.cfg.guard.canaries:
            for label, sentence in check.below_noise(self.noise, rewards.raw, group).items():
                log.logger.warning(sentence)
                del self.noise[label]

    def _update(self, rollout: Rollout, columns: Columns, batch: PromptBatch) -> dict[str, float]:
        """`batch.updates` optimizer steps, each on whole prompts -> policy/* averaged over the rows
        trained."""
        updates = self.cfg.batch.updates
        sums: dict[str, float] = {}
        trained = 0.0
        out = {"policy/grad_norm": 0.0, "policy/skipped": 0.0, "policy/rows": 0.0}
        for u in range(updates):
            rows = torch.nonzero(columns.prompt * updates // len(batch) == u).flatten()
            part = columns[rows]
            weight = float(self.world.sum(part.weight.sum()))
            if weight == 0:  # no group has a signal
                out["policy/skipped"] += 1
                continue
            metrics, norm = self._gradient(rollout, part, weight)
            if not math.isfinite(norm):
                out["policy/skipped"] += 1
                self._nonfinite(rollout, part)
                continue
            self._step()
            trained += weight
            out["policy/rows"] += float(
                self.world.sum(torch.tensor(float(len(part)), device=part.weight.device))
            )
            out["policy/grad_norm"] += norm / updates
            for name, value in self.world.sum_metrics(metrics).items():
                sums[name] = sums.get(name, 0.0) + value
        return out | {name: value / trained for name, value in sums.items()}

    def _proved(self, rollout: Rollout, columns: Columns) -> tuple[Columns, float | None]:
        """The ratio's self-test, at the first iteration with rows to train; where it asks for it,
        old log-probs from the training forward.

        -> the columns, and max |log ratio| of this process's rows, None without any.
        """
        with self.ledger.phase("reference"):
            old = ratio_check.old_scores(self.algorithm, self.booked, rollout, columns, self.micro)
        recomputed = old.get("log_prob", columns.log_prob)
        if not self.proved:
            low = ratio_check.prove(
                recomputed,
                columns,
                precision=config_build.precision(self.cfg),
                clip=self.algorithm.clip_size,
            )
            rows, low = self.world.sum(
                torch.tensor([float(len(columns)), float(low)], device=self.policy.device)
            ).tolist()
            self.proved, self.recompute = rows > 0, low > 0
        error = float((recomputed - columns.log_prob).abs().max()) if len(columns) else None
        return (Columns({**columns.data, **old}) if self.recompute else columns), error

    def _winners(self, rollout: Rollout, columns: Columns) -> dict[str, float]:
        """policy/winner_gain, where a reference is at hand: with full weights only if the method
        has one."""
        if self.cfg.train.mode == "full" and "reference" not in self.algorithm.needs:
            return {}
        with self.ledger.phase("reference"):
            gain = gradient.winner_gain(
                self.algorithm,
                self.booked,
                rollout,
                columns,
                micro=self.micro,
                gather=self.world.gather,
                total=self.world.sum,
            )
        return {} if gain is None else {"policy/winner_gain": gain}

    def _gradient(
        self, rollout: Rollout, part: Columns, weight: float
    ) -> tuple[dict[str, Tensor], float]:
        """Gradient of the update's mean loss -> (summed metrics, its norm before clipping)."""
        self.optimizer.zero_grad(set_to_none=True)
        metrics: dict[str, Tensor] = {}
        if len(part):
            metrics = gradient.accumulate(
                self.algorithm,
                self.booked,
                rollout,
                part,
                micro=self.micro,
                total_weight=weight,
                backward=self.booked.backward,
            )
        self.world.sum_gradients(self.parameters.values())
        return metrics, self.parts.clip()

    def _step(self) -> None:
        self.nonfinite = 0
        for group in self.optimizer.param_groups:
            group["lr"] = update.learning_rate(self.cfg, self.step)
        self.mid_update = True
        self.optimizer.step()
        self.step += 1
        self.ema.step()

    def _nonfinite(self, rollout: Rollout, part: Columns) -> None:
        """Skip the update, write its batch out, and give up after guard.nonfinite in a row."""
        self.nonfinite += 1
        if self.parts.accelerator.scaler is not None:
            self.optimizer.step()  # the fp16 scaler skips it and lowers its scale
        self.optimizer.zero_grad(set_to_none=True)
        folder = self.path / "nonfinite"
        folder.mkdir(exist_ok=True)
        used = {f"columns.{k}": v.cpu() for k, v in part.data.items()} | {
            "states": rollout.states.cpu(),
            "prompt": rollout.prompt.cpu(),
        }
        checkpoint.write_tensors(
            folder / f"step-{self.step:06d}-rank-{self.world.rank}.safetensors", used
        )
        log.logger.warning(
            f"update {self.step}: loss or gradient is not finite; skipped, its batch is in {folder}"
        )
        if self.nonfinite >= self.cfg.guard.nonfinite:
            raise Failed(
                f"{self.nonfinite} updates in a row had a non-finite loss or gradient; lower"
                f" optimizer.lr or use train.precision=no, and look at {folder}; the last"
                " checkpoint stands"
            )

    # ------------------------------------------------------------------ around it

    def _start(self) -> None:
        """Write what the run is, open the trackers, try the rewards, and evaluate the untrained
        policy."""
        if self.world.main:
            (self.path / "samples").mkdir(parents=True, exist_ok=True)
            (self.path / "config.yaml").write_text(dump(self.cfg))
            (self.path / "environment.json").write_text(json.dumps(run_folder.environment()))
            run_folder.truncate_metrics(self.path, self.iteration)
        self.parts.start_trackers(self.iteration)
        if (
            self.iteration == 0
            and self.cfg.guard.canaries
            and self.world.main
            and self.parts.dataset is None
        ):
            self.noise = reward_trial.rehearse(self.parts, self.rewards)
        if self.iteration == 0 and self.parts.eval_prompts and self.cfg.eval.at_start:
            self._evaluate("before", self.cfg.eval.guidance)
            if self.cfg.eval.baseline_guidance:
                self._evaluate("before, guided", self.cfg.eval.baseline_guidance)

    def _evaluate(self, name: str, guidance: float | str) -> held_out.Evaluation:
        """Evaluate averaged weights on held-out prompts; a named row goes into evaluation.json and
        its images into samples/."""
        cfg = self.cfg.eval
        if name and self.world.main:
            log.logger.info(f"evaluating: {name}, {cfg.images} images")
        with self.ema.swapped(), self.policy.view("default"):
            result = held_out.evaluate(
                self.policy,
                self.parts.eval_prompts,
                self.rewards,
                images=cfg.images,
                steps=cfg.steps,
                guidance=guidance,
                seed=cfg.seed,
                solver=cfg.solver,
                micro=self.cfg.batch.micro,
                decode=self.cfg.batch.decode,
                autocast=self.parts.autocast,
            )
        if name and self.world.main:
            setting = {
                "iteration": self.iteration,
                "guidance": guidance,
                "steps": cfg.steps,
                "solver": cfg.solver,
                "seed": cfg.seed,
            }
            evaluation_record.add_row(self.path, name, result, self.parts.eval_prompts, **setting)
            evaluation_record.save_images(self.path, name, result, self.parts.eval_prompts)
        return result

    def run(self) -> Run:
        """Iterate to the end with a progress bar; see `train`."""
        with (
            StopRequest(self),
            log.Progress(self.cfg.iterations, done=self.iteration, show=self.world.main) as bar,
        ):
            try:
                for it in self:
                    bar.update(
                        it.number,
                        reward=it.metrics["reward/total"],
                        grad=it.metrics["policy/grad_norm"],
                    )
                if self.parts.eval_prompts and not by_signal(self.stopped):
                    self._evaluate("after", self.cfg.eval.guidance)
            except Aborted:
                pass  # self.stopped says why
            except (
                TooManyInvalid,
                RewardUnavailable,
            ):  # before an update or after it: weights are those of the last finished iteration
                self.save()
                raise
            if self.stopped:
                self.save()
        return self.finish()

    def finish(self) -> Run:
        """Write the averaged LoRA, with the settings that load it, and the report."""
        if self.world.main:
            if self.cfg.train.mode == "lora":
                with self.ema.swapped():
                    self.policy.save_lora(self.path / "lora")
                (self.path / "lora" / LORA_SETTINGS).write_text(
                    json.dumps(self.cfg.train.lora.model_dump())
                )
            run_page.build(self.path)
        self.parts.end_trackers()
        path = self.path / evaluation_record.FILE
        record = json.loads(path.read_text()) if path.exists() else {}
        return Run(
            path=self.path,
            metrics=run_folder.read_metrics(self.path),
            evaluation=record,
            stopped=self.stopped,
        )

    def _record(self, result: Iteration) -> None:
        """Held-out numbers when they are due, then one line in metrics.jsonl and in the
        trackers."""
        cfg = self.cfg
        result.metrics["optimizer/lr"] = update.learning_rate(cfg, max(0, self.step - 1))
        result.metrics["optimizer/step"] = self.step
        try:
            if (
                self.parts.eval_prompts
                and cfg.eval.every
                and result.number % cfg.eval.every == 0
                and result.number < cfg.iterations
            ):
                result.metrics.update(self._evaluate("", cfg.eval.guidance).metrics())
        finally:  # a reward may be gone by now, and the run stop; the iteration itself is finished
            if self.world.main:
                run_folder.MetricsFile(self.path).write(result.number, result.metrics)
            self.parts.track(result.metrics, result.number)

    def _samples(self, number: int, drawn: draw.Collected) -> None:
        if (
            self.world.main
            and (number == 1 or number % self.cfg.checkpoint.every == 0)
            and drawn.shown.ndim == 4
        ):
            captions = [
                drawn.batch.text[g] for g in drawn.rollout.group[: len(drawn.shown)].tolist()
            ]
            grids.grid(drawn.shown, captions).save(
                self.path / "samples" / f"iteration-{number:06d}.png"
            )

    def _stop_rule(self, metrics: dict[str, float]) -> str | None:
        stop = self.cfg.stop
        if stop.kl is not None and metrics.get("policy/kl", 0.0) > stop.kl:
            return f"policy/kl {metrics['policy/kl']:.4g} exceeds stop.kl={stop.kl}"
        if stop.reward is not None and metrics["reward/total"] >= stop.reward:
            return f"reward/total {metrics['reward/total']:.4g} reached stop.reward={stop.reward}"
        if stop.hours is not None and self.hours >= stop.hours:
            return f"stop.hours={stop.hours} are over"
        return None

    def describe(self) -> str:
        """What an iteration will do, before it does it."""
        b, plan, p = self.cfg.batch, self.parts.plan, self.parts
        samples = b.prompts * b.group
        calls = (
            plans.nfe(plan, b.group // plan.leaves) * b.prompts * self.policy.branches(p.guidance)
        )
        own = (
            ""
            if p.guidance == self.cfg.sampler.guidance
            else f" (the algorithm's own, not sampler.guidance={self.cfg.sampler.guidance})"
        )
        sampled = (
            f"{len(self.sigmas) - 1} steps, guidance {p.guidance}{own}: {calls:,} network calls"
        )
        sampled = sampled if p.dataset is None else f"or fewer, read from {self.cfg.data.offline}"
        rows = self.algorithm.most_rows(plan, b.group + p.references) * b.prompts
        rewards = ", ".join(f"{w:g} x {n}" for n, w in self.rewards.weights.items())
        rewards += (
            f" (of evaluations; trained on are the scores in {self.cfg.data.offline})"
            if p.dataset
            else ""
        )
        done, last = self.iteration, self.cfg.iterations
        left = (
            f"iterations {done + 1} to {last}"
            if done < last
            else f"all {done} iterations are done; evaluated again"
        )
        weights = sum(w.numel() for w in self.parameters.values())
        return "\n".join(
            [
                (
                    f"model      {self.cfg.model.source}, {weights:,} trained weights on"
                    f" {self.policy.device}"
                ),
                f"algorithm  {self.cfg.algorithm['name']}, reward {rewards}",
                (
                    f"iteration  {b.prompts} prompts x {b.group} = {samples} samples on"
                    f" {self.world.size} process(es); {sampled}"
                ),
                (
                    f"update     at most {rows:,} trained rows in {b.updates} optimizer step(s),"
                    f" {b.micro} network rows a forward"
                ),
                f"run        {left}, in {self.path}",
            ]
        )

    # ------------------------------------------------------------------ checkpoints

    @property
    def saved(self) -> bool:
        """Whether a checkpoint is there to resume from."""
        return bool(checkpoint.steps(self.path))

    def save(self) -> Path | None:
        """Everything that a later `--resume` needs, once for each iteration; taken between
        iterations."""
        if not self.world.main:
            return None
        if self.saved_at == self.iteration:
            return checkpoint.folder_of(self.path, self.iteration)
        tensors = {"policy": self.policy.state("default"), "ema": self.ema.state_dict()}
        tensors |= {view: self.policy.state(view) for view in build.views(self.algorithm)}
        tensors["optimizer"] = checkpoint.pack_optimizer(self.parts.raw_optimizer, self.parameters)
        meta: dict[str, Any] = {name: getattr(self, name) for name in COUNTERS}
        meta["memory"], meta["noise"] = self.algorithm.memory, self.noise
        meta["scaler"] = distributed.scaler_state(self.parts.accelerator)
        folder = checkpoint.save(
            self.path, self.iteration, tensors, meta, keep=self.cfg.checkpoint.keep
        )
        self.saved_at = self.iteration  # not before it is whole: a signal may interrupt the writing
        return folder

    def _load(self, folder: Path) -> None:
        tensors, meta = checkpoint.load(folder)
        self.policy.load_state("default", tensors["policy"])
        for view in build.views(self.algorithm):
            self.policy.load_state(view, tensors[view])
        self.algorithm.memory, self.noise = (
            dict(meta.get("memory", {})),
            dict(meta.get("noise", {})),
        )
        self.ema.load_state_dict(tensors["ema"])
        checkpoint.unpack_optimizer(
            self.parts.raw_optimizer, self.parameters, tensors.get("optimizer", {})
        )
        if meta["scaler"]:
            self.parts.accelerator.scaler.load_state_dict(meta["scaler"])
        self.iteration = self.saved_at = meta["iteration"]
        for name in COUNTERS:
            setattr(self, name, meta[name])


def train(cfg: Config, *, resume: str | Path | None = None) -> Run:
    """Train to the end, a stop rule, or SIGTERM / Ctrl-C (both checkpoint; `Run.stopped` says
    so)."""
    return Trainer(cfg, resume=None if resume is None else Path(resume)).run()
