"""`flowrl.train`: a run from Python, by names or with live objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flowrl.config.live import with_live_objects
from flowrl.config.load import Given
from flowrl.config.schema import Config
from flowrl.runtime.log import logger
from flowrl.training.budget import fit
from flowrl.training.finished import finished, sentence
from flowrl.training.loop import Trainer
from flowrl.training.records import Run
from flowrl.training.resume import config_of


def train(
    cfg: Config | Given = None,
    *,
    resume: str | Path | None = None,
    accept_changes: bool = False,
    policy: Any = None,
    rewards: Any = None,
    algorithm: Any = None,
    prompts: Any = None,
    features: Any = None,
) -> Run:
    """Train, or go on in a run's folder, to the end, a stop rule or a signal (`Run.stopped`).

    cfg: a Config, or a source of load_config: an experiment's name, a YAML file, a mapping. None:
    the defaults, or the config of the run that goes on.
    resume: the folder of a run. accept_changes: go on although settings, files or code differ.
    policy: a diffusers pipeline, or a result of load_policy, which is trained in place.
    rewards: a function (media, prompts, context) -> (B,), a Reward, a name, a list of them, or
    {label: one of them or {"reward": it, "weight": 0.5}}.
    algorithm: a subclass of Algorithm, or an instance with its options.
    prompts: texts or records {"prompt": text, **meta}, or {"train": ..., "eval": ...} of such lists
    or names of files; a list alone is trained on, and nothing is evaluated.
    features: a function media (n, ...) -> (n, d) by which samples are compared (section diversity).

    Objects take the place of what the config names; see flowrl.config.live. They are not stored: a
    run goes on when they are passed again. On a GPU that cannot hold the run, by its budget, a
    ValueError says which settings fit (guard.fits).
    A finished run that is resumed by its folder alone is returned as it is.
    """
    live = (policy, rewards, algorithm, prompts, features)
    if resume is not None and all(given is None for given in live):
        given = config_of(Path(resume)) if cfg is None else with_live_objects(cfg)[0]
        if done := finished(given, Path(resume), accept=accept_changes):
            logger.info(sentence(done))
            return done
    # one function makes the trainer for scripts and for the command line
    trainer = start(
        cfg,
        resume=resume,
        accept_changes=accept_changes,
        policy=policy,
        rewards=rewards,
        algorithm=algorithm,
        prompts=prompts,
        features=features,
    )
    if trainer.budget:
        logger.info(trainer.budget)
    return trainer.run()


def start(
    cfg: Config | Given = None,
    *,
    resume: str | Path | None = None,
    accept_changes: bool = False,
    **live: Any,
) -> Trainer:
    """Make the trainer of a run, with parts built and checked, for `train` and `flowrl train`.

    On a GPU the budget of the run comes first, since it costs seconds and a model may cost minutes.
    """
    if cfg is None and resume:
        cfg = config_of(Path(resume))
    gpu = fit.this_gpu() is not None
    needed = fit.before(with_live_objects(cfg, **live)[0]) if gpu else None
    trainer = Trainer(cfg, resume=resume, accept_changes=accept_changes, **live)
    trainer.budget = needed
    return trainer
