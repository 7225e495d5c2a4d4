"""Start-up: all parts of a run are built and checked before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from flowrl.algorithms.common.base import Algorithm
from flowrl.config.build import autocast, make_algorithm, make_policy, schedule, trained
from flowrl.config.compose import unseen_words
from flowrl.config.facts import Facts, of_config
from flowrl.config.live import Live, check_given
from flowrl.config.load import flatten
from flowrl.config.schema import Config
from flowrl.data import conditions
from flowrl.data.conditions import check_alike, files, has_source
from flowrl.data.prompts import Prompts, load_prompts, load_training, references
from flowrl.data.scored_dataset import NO_MEDIA, Dataset
from flowrl.data.scored_dataset import load as load_dataset
from flowrl.policy import Policy, load_policy, teachers
from flowrl.policy.load import call_options
from flowrl.rewards import RewardSet, check_needs, load_set
from flowrl.rewards.core.features import load_features
from flowrl.rewards.core.score import check_meta
from flowrl.rollouts import from_files
from flowrl.rollouts.choose import chooser
from flowrl.rollouts.data_stream import draw_media
from flowrl.rollouts.detectors import Detectors
from flowrl.rollouts.latent_cache import LatentCache
from flowrl.rollouts.records import Source
from flowrl.rollouts.replay_buffer import ReplayBuffer
from flowrl.runtime.install import check_trackers
from flowrl.runtime.ledger import Ledger
from flowrl.runtime.log import logger
from flowrl.runtime.processes.world import World, start
from flowrl.runtime.store.lock import Lock
from flowrl.runtime.store.run_folder import is_run
from flowrl.training import identity, optimizer
from flowrl.training.checks import check_conditions, check_media, columns_read
from flowrl.training.claim import claimed
from flowrl.training.ema import Ema
from flowrl.training.out_of_memory import explained_start
from flowrl.training.records import RunParts, Weights
from flowrl.training.resume import check_resume
from flowrl.training.setup import Setup, set_up
from flowrl.training.split.shard import shard
from flowrl.training.watch.guards import Guards
from flowrl.training.watch.reward_trial import try_own
from flowrl.training.watch.watch import Watch
from flowrl.types import Plan


def build(
    cfg: Config,
    resume: str | Path | None = None,
    *,
    accept: bool = False,
    live: Live | None = None,
) -> RunParts:
    """Load and check all parts, and lock the run's folder; a mistake of the user -> ValueError, and
    nothing was written.

    resume: the folder of a run that goes on; accept: it may have changed. live: objects that a
    script handed over.
    """
    # checks of words alone come first, before anything is loaded
    folder, live = None if resume is None else Path(resume), live or Live()
    check_given(cfg, live)
    if folder:
        check_resume(cfg, folder, accept=accept)
    optimizer.try_class(cfg.optimizer)
    check_trackers(cfg.trackers)
    accelerator = start(cfg.train.precision, cfg.guard.rank_seconds)
    members = cfg.train.sequence_parallel
    world = World(accelerator, cfg.guard.rank_seconds, members=members)
    world.check_alike(flatten(cfg.model_dump(mode="json", exclude={"output"})))
    with explained_start(cfg), claimed(cfg, folder, world) as (path, lock):
        return assemble(cfg, world, path, lock, live)


def assemble(cfg: Config, world: World, path: Path, lock: Lock | None, live: Live) -> RunParts:
    """Load, check and connect all parts of a run whose folder is locked."""
    # checks without the model come before it loads, which may take minutes; words come first
    algorithm = live.algorithm or make_algorithm(cfg)
    facts = of_config(cfg, method=algorithm, processes=world.size)
    rewards = load_rewards(cfg, path, live)
    dataset, prompts, held_out, anchored, validation = load_data(cfg, rewards, live, facts)
    choice = chooser(prompts, cfg.data.sampler, size=cfg.batch.prompts, seed=cfg.seed)
    policy = make_policy(
        cfg,
        algorithm=algorithm,
        device=world.accelerator.device,
        live=live,
        split=bool(cfg.train.shard) and world.size > 1,
        main=world.main,
    )
    facts.learn(policy=policy)
    held = held_out + validation.prompts
    shown = [*prompts, *held, *anchored.prompts]
    prepare_policy(cfg, algorithm, policy, rewards, shown)
    setup = set_up(cfg, algorithm, policy)  # the method fits plan, guidance, rewards and media
    facts.learn(plan=setup.plan)
    masks, media = facts["masks"], [*facts["files"], *anchored.paths, *validation.paths]
    from_files.check(policy, media, cfg.data.crop)
    warn(cfg, policy, facts.warnings(), shown)
    # in full mode this makes weights fp32; references kept here would keep split weights whole
    policy.trainable.named()
    data = {"prompts": prompts + anchored.prompts, "held-out prompts": held}
    known = identity.of_parts(cfg, rewards, policy, data, [*media, *masks, *files(shown)], live)
    share_networks(cfg, world, policy, prompts, setup.guidance)
    source = Source(
        cfg=cfg,
        world=world,
        ledger=Ledger(policy.device),
        prompts=prompts,
        chooser=choice,
        dataset=dataset,
        references=not dataset and bool(facts["files"]),
        policy=policy,
        view=algorithm.rollout_view,
        guidance=setup.guidance,
        autocast=autocast(cfg, policy.device),
        rewards=rewards.beside(policy),
        buffer=ReplayBuffer(cfg.replay, prompts, cfg.seed) if cfg.replay.size else None,
        helped_plan=helped_plan(setup, policy),
        draw_media=partial(draw_media, anchored) if anchored.items else None,
        latents=latent_cache(cfg, policy),
    )
    return RunParts(
        setup=setup,
        guards=Guards(cfg.guard, rewards),
        watch=Watch(cfg.watch, world, lower=cfg.stop.watch == "lower"),
        path=path,
        source=source,
        held_out=held_out,
        validation=validation,
        weights=weights(setup, policy, world.accelerator),
        identity=known,
        lock=lock,
    )


def latent_cache(cfg: Config, policy: Policy) -> LatentCache | None:
    """Open the folder that keeps latents, where media are read and it is named."""
    read = cfg.data.latent_cache and (cfg.data.offline or cfg.anchor.data.weight)
    return LatentCache(cfg.data.latent_cache, policy, cfg.data.crop) if read else None


def give_teachers(cfg: Config, algorithm: Algorithm, policy: Policy) -> None:
    """Load the frozen teachers that a method's options name, if they name some, for the policy."""

    def load_model(source: str) -> Policy:
        if is_run(source):  # a run that trained all weights
            return trained(Path(source), {})
        call = conditions.loaded(call_options(cfg.model.pipeline))
        return load_policy(source, dtype=policy.dtype, device=policy.device, **call)

    policy.teachers, options = None, algorithm.config
    if getattr(options, "teachers", None):
        policy.teachers = teachers.load(policy, options, cfg.sampler.steps, load_model)


def prepare_policy(
    cfg: Config, algorithm: Algorithm, policy: Policy, rewards: RewardSet, shown: Prompts
) -> None:
    """Load the policy's teachers; check that it takes all prompts, and that readers take its
    media."""
    give_teachers(cfg, algorithm, policy)
    check_media(rewards, algorithm, policy)
    check_conditions(policy, shown, columns_read(cfg, rewards))
    check_size(cfg, policy)


def check_size(cfg: Config, policy: Policy) -> None:
    """Record the loop of evaluations at a size of their own; ValueError where the pipeline refuses
    the size."""
    evaluated: Any = policy.sized(cfg.eval.height, cfg.eval.width)
    # split weights are checked by the first evaluation, of all processes
    if evaluated is not policy and cfg.model.self_check and not cfg.train.shard:
        evaluated.self_check()


def share_networks(
    cfg: Config, world: World, policy: Policy, prompts: Prompts, guidance: float | str
) -> None:
    """Split the weights over processes, or let a team of them share the tokens of each call."""
    casts = autocast(cfg, policy.device)
    if cfg.train.shard:
        shard(policy, world, prompts, guidance=guidance, autocast=casts)
    if world.members > 1:
        from flowrl.training.split.sequence import (
            share_calls,  # imported here, because the part of diffusers that it needs loads slowly
        )

        share_calls(policy, world, prompts, guidance=guidance, autocast=casts)


def warn(cfg: Config, policy: Policy, sentences: list[str], prompts: Prompts) -> None:
    """Warn about legal settings that a user hardly intends. prompts: all that the networks read,
    those to train on first."""
    policy.say_cut(row["prompt"] for row in prompts)
    unseen = unseen_words(cfg.model.source, [row["prompt"] or "" for row in prompts])
    guidances = [cfg.sampler.guidance, cfg.data.sampler.help.guidance or "none"]
    guidances += [cfg.eval.guidance, cfg.eval.baseline_guidance or "none"]
    for sentence in (*policy.unread(guidances, prompts[0]), *filter(None, [unseen]), *sentences):
        logger.warning(sentence)


def load_rewards(cfg: Config, path: Path, live: Live) -> RewardSet:
    """Load the rewards, and the other readers of samples; ValueError if a run cannot give what they
    need."""
    rewards = replace(
        live.rewards or load_set(cfg.reward),
        seconds=cfg.guard.reward_seconds,
        domain_field=cfg.data.domain,
    )
    if cfg.diversity.features is not None:
        d = cfg.diversity
        rewards = replace(
            rewards, features=load_features(d.features, d.weights, live=live.features)
        )
    if cfg.watch.detectors:
        rewards = replace(rewards, detectors=Detectors(cfg.watch.detectors))
    for reward in rewards.rewards.values():
        reward.begin(path)
    check_needs(rewards, ("meta", "group", "source"))
    if cfg.data.eval and not rewards.pointwise().rewards:
        raise ValueError(
            "evaluation needs a reward that judges each sample by itself, and all of these compare"
            " the members of a group; add one that is only measured, as reward.clip.weight=0, or"
            " evaluate nothing with data.eval=null"
        )
    return rewards


def load_data(
    cfg: Config, rewards: RewardSet, live: Live, facts: Facts
) -> tuple[Dataset | None, Prompts, Prompts, Dataset, Dataset]:
    """Load (the dataset in place of samples or None, prompts to train on, held-out prompts, the
    media of anchor.data and the rows of data.validation, or empty datasets)."""
    source = cfg.anchor.data.source if cfg.anchor.data.weight else None
    # soft: pairs are refused by a rule, without a word about their ties
    anchored = load_dataset(source, soft=True) if source else NO_MEDIA
    facts.learn(anchored=anchored)
    data = cfg.data
    dataset, validation = (
        load_dataset(source, soft=data.labels == "soft", temperature=data.temperature)
        if source and data.offline
        else None
        for source in (data.offline, data.validation)
    )
    validation = validation or NO_MEDIA
    prompts = dataset.prompts if dataset else live.prompts or load_training(data)
    facts.learn(
        rewards=rewards,
        prompts=prompts,
        dataset=dataset,
        validation=validation,
        files=dataset.paths if dataset else references(prompts),
        masks=[*(dataset.masks if dataset else []), *validation.masks],
        # prompts beside an iteration's
        spare=(len(prompts) - cfg.batch.prompts) // facts["processes"],
    )
    held_out = live.held_out or (load_prompts(data.eval, data.columns) if data.eval else [])
    facts.learn(held_out=held_out)
    check_alike([*prompts, *held_out, *validation.prompts])
    pictured = has_source([*prompts, *held_out])
    check_needs(rewards, ("meta", "group", *["source"] * pictured))
    check_meta(
        rewards,
        {"data.train": [] if dataset else prompts, "data.eval": held_out},
        whole=not dataset,
        scored=facts["method.reads_rewards"],
    )
    if cfg.guard.check_rewards and not dataset:
        try_own(cfg, rewards, prompts)
    return dataset, prompts, held_out, anchored, validation


def helped_plan(setup: Setup, policy: Policy) -> Callable[[int], Plan] | None:
    """Return a function of the iteration that gives the plan of samples that are helped by more
    steps; None: no samples are."""
    cfg, algorithm = setup.cfg, setup.algorithm
    steps = cfg.data.sampler.help.steps
    if steps is None:
        return None
    more = cfg.model_copy(update={"sampler": cfg.sampler.model_copy(update={"steps": steps})})
    sigmas = schedule(more, policy)
    return lambda iteration: algorithm.plan(
        sigmas, sampler=cfg.sampler, iteration=iteration, seed=cfg.seed
    )


def keeps_reference(setup: Setup) -> bool:
    """Whether a run holds a frozen copy of all weights; with LoRA, the reference is the network
    with adapters switched off."""
    cfg = setup.cfg
    read = "reference" in setup.needs or cfg.sampler.rlg != 1 or cfg.eval.rlg != 1
    return read and cfg.train.mode == "full"


def weights(setup: Setup, policy: Policy, accelerator: Accelerator) -> Weights:
    """Make the copies of the trained weights that the method needs, the optimizer, and averages."""
    cfg, views = setup.cfg, [*setup.algorithm.views]
    if keeps_reference(setup):
        views.append("reference")
    for view in views:
        # an earlier run of the same live policy may have added the view
        if policy.trainable.has(view):
            policy.trainable.copy("default", view)
        else:
            policy.trainable.add_view(view)
    parameters = {name: p for part in policy.parts.values() for name, p in part.items()}
    adamw = optimizer.make(cfg.optimizer, parameters.values())
    return Weights(
        parameters=parameters,
        adamw=adamw,
        optimizer=accelerator.prepare(adamw),
        ema=Ema(parameters, decay=cfg.ema.decay, every=cfg.ema.every),
        accelerator=accelerator,
    )
