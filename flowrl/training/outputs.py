"""The output of a run: at its start, for each iteration, evaluations, the LoRA and the report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from flowrl.config.live import named
from flowrl.config.schema import Config
from flowrl.data.media import encoded
from flowrl.evaluation import held_out
from flowrl.evaluation import record as evaluation_record
from flowrl.policy.weights import heads
from flowrl.policy.weights.lora import write_settings
from flowrl.report import grids
from flowrl.report.numbers import evaluation_cells
from flowrl.rollouts.velocity import passes
from flowrl.runtime.log import logger
from flowrl.runtime.memory import during
from flowrl.runtime.processes.world import World
from flowrl.runtime.store import files, history
from flowrl.runtime.store.run_folder import (
    add_metrics,
    environment,
    read_evaluation,
    read_metrics,
    read_peak,
    truncate_metrics,
)
from flowrl.samplers.plan import nfe
from flowrl.training import trackers, validation
from flowrl.training.records import Iteration, NothingTrained, Run, RunParts
from flowrl.training.resume import write_config
from flowrl.training.update import Learner
from flowrl.training.watch import peak_lora
from flowrl.training.watch.guards import nothing_trained
from flowrl.training.watch.reward_trial import NoiseWatch, try_rewards

ON_SHEET = 32  # most samples on the sheet of an iteration: more would be too small to see
ALL_DONE = "all iterations are done"  # in history.jsonl, why a run ended after its last iteration


class Running(Protocol):
    """The parts of a trainer that its output needs."""

    cfg: Config
    parts: RunParts
    learner: Learner
    noise_watch: NoiseWatch
    iteration: int
    started: bool
    stopped: str | None
    budget: str | None

    def save(self) -> Path | None: ...


def start(trainer: Running) -> None:
    """Write a description of the run, open the trackers, try the rewards, evaluate the untrained
    policy, and save a checkpoint of iteration 0."""
    cfg, parts, main = trainer.cfg, trainer.parts, trainer.parts.source.world.main
    if parts.lock:
        parts.lock.take()
    read_evaluation(parts.path)  # a damaged file is refused now, not after the training
    if main:
        files.clean(parts.path, owned=True)
        write_config(parts.path, cfg)
        live = {f"live {argument}": label for argument, label in named(cfg).items()}
        files.write(parts.path / "environment.json", json.dumps(environment() | live))
        truncate_metrics(parts.path, trainer.iteration)
    trackers.start(parts, trainer.iteration)
    if trainer.started:
        return
    if main:
        processes = parts.source.world.processes
        history.add(parts.path, "started", iteration=0, processes=processes)
    if cfg.guard.check_rewards and parts.source.dataset is None:
        trainer.noise_watch.noise = try_rewards(parts)
    if cfg.eval.at_start:
        evaluate(trainer, "before")
        if cfg.eval.baseline_guidance:
            evaluate(trainer, "before, guided", guidance=cfg.eval.baseline_guidance)
        if found := validation.losses(parts):
            if main:
                add_metrics(parts.path, 0, found)
            trackers.each(parts, lambda tracker: tracker.log(found, step=0))
    trainer.started = True
    trainer.save()


def rehearse(trainer: Running) -> None:
    """Try the rewards as `start` does, and leave the run's folder as it was before."""
    parts = trainer.parts
    try:
        if trainer.cfg.guard.check_rewards and parts.source.dataset is None:
            try_rewards(parts)
    finally:
        if parts.lock:
            parts.lock.withdraw()


def record(trainer: Running, it: Iteration) -> None:
    """Write a grid of samples and held-out numbers when they are due, then one line of metrics."""
    cfg, parts, main = trainer.cfg, trainer.parts, trainer.parts.source.world.main
    # a sheet at each tenth of the run is for the report, the others go with the checkpoints
    tenth = it.number * 10 // cfg.iterations > (it.number - 1) * 10 // cfg.iterations
    due = it.number == 1 or it.number % cfg.checkpoint.every == 0 or tenth
    if main and due and grids.drawable(it.shown):
        group = it.rollout.group[: len(it.shown)].tolist()
        places = on_sheet(group)
        captions = [it.batch.text[group[i]] for i in places]
        file = parts.path / "samples" / f"iteration-{it.number:06d}.png"
        files.write(file, encoded(grids.grid(it.shown[places], captions)))
        trackers.put(parts, it.number, "samples/iteration", "Image", str(file))
    try:
        last = it.number == cfg.iterations
        if last or (cfg.eval.every and it.number % cfg.eval.every == 0):
            it.metrics.update(validation.losses(parts))
            it.metrics.update({} if last else evaluate(trainer))
    # record it even if a reward is gone and the run stops: the iteration itself is finished
    finally:
        if main:
            add_metrics(parts.path, it.number, it.metrics)
        trackers.each(parts, lambda tracker: tracker.log(it.metrics, step=it.number))
        # the iteration is recorded, so a signal may give up the next one
        trainer.learner.touched = False
    parts.guards(it.metrics, it.number - 1)


def on_sheet(group: Sequence[int]) -> list[int]:
    """Choose at most ON_SHEET samples by their place, never by their score: the first ones of each
    prompt, equally many. group: (n,) the prompt of each sample."""
    each = max(1, ON_SHEET // len({*group}))
    return [i for i, prompt in enumerate(group) if group[:i].count(prompt) < each][:ON_SHEET]


def evaluate(
    trainer: Running, name: str = "", *, guidance: float | str | None = None
) -> dict[str, float]:
    """Evaluate the averaged weights on held-out prompts -> eval/*; {} if there are none.

    A named evaluation becomes a row of evaluation.json, and its images go into samples/.
    """
    cfg, parts = trainer.cfg.eval, trainer.parts
    if not parts.held_out:
        return {}
    named = bool(name) and parts.source.world.main
    how = held_out.settings_of(trainer.cfg, guidance=guidance)
    # announce named evaluations only: those of iterations may come every few seconds
    if named:
        logger.info(f"evaluating: {name}, {cfg.images} images")
    with during("evaluation"), parts.weights.ema.swapped(), parts.source.policy.view("default"):
        result = held_out.evaluate(
            parts.source.policy,
            parts.held_out,
            parts.source.rewards,
            images=cfg.images,
            autocast=parts.source.autocast,
            world=parts.source.world,
            **how,
        )
    if named:
        setting = {"iteration": trainer.iteration} | held_out.recorded(how)
        found = evaluation_record.add_row(parts.path, name, result, parts.held_out, **setting)
        evaluation_record.save_images(parts.path, name, result, parts.held_out)
        trackers.put(parts, trainer.iteration, "evaluation", "Table", *evaluation_cells(found))
        # grids, and four videos of each evaluation; the names of others begin with iteration-
        for pattern, kind in (("[!i]*.png", "Image"), ("*/0[0-3].*", "Video")):
            for file in sorted(parts.path.glob(f"samples/{pattern}")):
                tag = file.relative_to(parts.path).with_suffix("").as_posix()
                trackers.put(parts, trainer.iteration, tag, kind, str(file))
    return result.metrics()


def finish(trainer: Running) -> Run:
    """Write the averaged LoRA, with the settings that load it, and the report.

    NothingTrained, after the report, if there was no optimizer step; then no LoRA is written.
    """
    # imported here: charts and templates are needed at the end of a run only
    from flowrl.report import run_page

    parts, path = trainer.parts, trainer.parts.path
    if parts.source.world.main:
        if trainer.learner.step:
            export(parts)
            peak_lora.write(parts)
        left = trainer.cfg.iterations - trainer.iteration
        why = f"{left} iterations were left out" if left > 0 else ALL_DONE
        history.add(path, "ended", iteration=trainer.iteration, what=trainer.stopped or why)
        run_page.build(path)
    trackers.finish(parts)
    parts.weights.accelerator.end_training()
    if parts.lock:
        parts.lock.release()
    run = result(path, trainer.stopped)
    if not trainer.learner.step:
        raise NothingTrained(nothing_trained(run.metrics, run.stopped), run)
    return run


def result(path: Path, stopped: str | None = None) -> Run:
    """Read what a run found from its folder."""
    return Run(
        path=path,
        metrics=read_metrics(path),
        evaluation=read_evaluation(path),
        stopped=stopped,
        peak=read_peak(path),
    )


def export(parts: RunParts) -> None:
    """Write the averaged LoRA, with the settings that load it, and the small networks beside it."""
    policy, train = parts.source.policy, parts.setup.cfg.train
    with parts.weights.ema.swapped():
        heads.save(policy.trainable.heads, parts.path / "heads")
        if train.mode == "lora" and policy.trainable.named():
            policy.save_lora(parts.path / "lora")
            write_settings(
                parts.path / "lora", train.lora.model_dump(), policy.trainable.part_names
            )


def describe(trainer: Running) -> str:
    """Say what an iteration will do, before it starts."""
    cfg, parts, source = trainer.cfg, trainer.parts, trainer.parts.source
    batch, algorithm = cfg.batch, parts.setup.algorithm
    group = batch.group + source.references
    prompts = batch.prompts + (source.buffer.most(batch.prompts) if source.buffer else 0)
    rows = algorithm.most_rows(parts.setup.plan, group) * prompts
    weights = sum(w.numel() for w in parts.weights.parameters.values())
    done, last = trainer.iteration, cfg.iterations
    left = f"iterations {done + 1} to {last}"
    if done >= last:
        left = f"all {done} iterations are done; evaluated again"
    data = cfg.anchor.data
    beside = f", and {data.per_row:g} x that of media," if data.weight else ""
    lines = [
        f"model      {cfg.model.source}, {weights:,} trained weights on {source.policy.device}",
        f"algorithm  {cfg.algorithm['label']}, reward {_rewards(parts)}",
        f"iteration  {batch.prompts} prompts x {batch.group} = {batch.prompts * batch.group}"
        f" samples on {_processes(source.world)}; {_sampling(parts)}",
        f"update     at most {rows:,} trained rows{beside} in {batch.updates} optimizer step(s),"
        f" {batch.micro} network rows a forward",
        f"run        {left}, in {parts.path}",
    ]
    return "\n".join([*lines, trainer.budget] if trainer.budget else lines)


def _processes(world: World) -> str:
    if world.members == 1:
        return f"{world.processes} process(es)"
    return f"{world.size} team(s) of {world.members} processes"


def _rewards(parts: RunParts) -> str:
    rewards = parts.source.rewards.at(0)
    how = dict.fromkeys(rewards.climbers, " by its gradient")
    named = ", ".join(f"{w:g} x {name}{how.get(name, '')}" for name, w in rewards.weights.items())
    if parts.source.dataset is None:
        return named
    folder, scored = parts.setup.cfg.data.offline, parts.source.dataset.kind == "scored"
    return (
        f"{named} (of evaluations; trained on {'are the scores in' if scored else 'is'} {folder})"
    )


def _sampling(parts: RunParts) -> str:
    """Write steps, guidance and network calls of an iteration's samples."""
    cfg, source = parts.setup.cfg, parts.source
    if source.dataset is not None:
        return f"or fewer, read from {cfg.data.offline}"
    copies = cfg.batch.group // parts.setup.plan.leaves
    branches = source.policy.branches(source.guidance)
    calls = nfe(parts.setup.plan, copies) * cfg.batch.prompts * branches * passes(cfg.sampler.rlg)
    own = ""
    if source.guidance != cfg.sampler.guidance:
        own = f" (the algorithm's own, not sampler.guidance={cfg.sampler.guidance})"
    return f"{cfg.sampler.steps} steps, guidance {source.guidance}{own}: {calls:,} network calls"
