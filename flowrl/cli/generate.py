"""`flowrl generate`: images and videos from a model, with a run's LoRA."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from flowrl.cli.common import (
    LARGEST_SEED,
    Call,
    Hints,
    call_arguments,
    one_sentence_errors,
    parse_guidance,
    show,
)
from flowrl.runtime.run_folder import is_run

Model = Annotated[
    str,
    typer.Argument(
        help="A run folder, a name of configs/model, a folder in diffusers layout, or a hub id."
    ),
]
Prompts = Annotated[list[str], typer.Argument(help="One or more prompts.")]
Lora = Annotated[Path | None, typer.Option(help="A run folder, or a folder with LoRA weights.")]
Steps = Annotated[int, typer.Option(min=1, help="Denoising steps.")]
Guidance = Annotated[
    str, typer.Option(help="A scale, none, or pipeline (the pipeline's own setting).")
]
Rlg = Annotated[
    float,
    typer.Option(
        help="Reinforcement Learning Guidance: extrapolates from the base model through the LoRA."
    ),
]
BestOf = Annotated[
    int, typer.Option(min=1, help="Candidates a prompt; the one with the highest reward is kept.")
]
Chooser = Annotated[
    list[str] | None,
    typer.Option(help="What chooses: NAME, NAME=WEIGHT or NAME.SETTING=VALUE; once for each."),
]
Seed = Annotated[
    int, typer.Option(min=0, max=LARGEST_SEED, help="Equal seeds give equal pictures.")
]
Output = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        help="out.png, out.mp4, out.npy ...; several prompts get numbers. Default: out, with the"
        " suffix that suits.",
    ),
]


def generate(
    model: Model,
    prompts: Prompts,
    lora: Lora = None,
    steps: Steps = 28,
    guidance: Guidance = "pipeline",
    rlg: Rlg = 1.0,
    best_of: BestOf = 1,
    reward: Chooser = None,
    pipeline: Call = None,
    hints: Hints = None,
    seed: Seed = 0,
    output: Output = None,
) -> None:
    """Make images or videos."""
    from flowrl.data.media import check_output
    from flowrl.rewards import load_set, parse_words
    from flowrl.rollouts import generation
    from flowrl.runtime import log

    log.setup()
    with one_sentence_errors():
        if output:
            check_output(output)
        how: dict[str, Any] = {"steps": steps, "seed": seed, "rlg": rlg, "best_of": best_of}
        how["guidance"] = parse_guidance(guidance)
        if rlg != 1 and lora is None and not is_run(model):
            raise ValueError("--rlg compares the LoRA with the base model; give --lora too")
        chooser = load_set(parse_words(reward)) if reward else None
        how |= {"reward": chooser, "meta": _meta_of(chooser, prompts)}
        made = generation.generate(_load(model, lora, pipeline, hints), prompts, **how)
        with one_sentence_errors(disk=1):
            _save(made, output)


def _load(model: str, lora: Path | None, pipeline: list[str] | None, hints: str | None) -> Any:
    """The policy, as a run trained it, or with its LoRA; with the run's arguments of the call,
    which `pipeline` overrides."""
    from flowrl.config.build import lora_of, pipeline_of, trained
    from flowrl.policy import load_policy

    if is_run(model):
        if lora:
            raise ValueError(f"{model} is a run and has weights of its own; leave --lora out")
        return trained(Path(model), call_arguments(pipeline), hints)
    weights, settings = lora_of(lora) if lora else (None, {})
    call = (pipeline_of(lora) if lora else {}) | call_arguments(pipeline)
    if hints:
        call["hints"] = hints
    policy: Any = load_policy(model, **settings, **call)
    if weights:
        policy.load_lora(weights)
    return policy


def _meta_of(rewards: Any, prompts: list[str]) -> list[dict[str, Any]] | None:
    """What the shapes reward, if it is in the set, reads about prompts of its world."""
    if rewards is None or not any(reward.name == "shapes" for reward in rewards.rewards.values()):
        return None
    from flowrl.shapes.prompts import find

    return [find(prompt) for prompt in prompts]


def _save(made: Any, output: Path | None) -> None:
    """Write each item; several get numbers. What was made is not lost to a suffix."""
    from flowrl.data import media
    from flowrl.runtime import files
    from flowrl.runtime.log import logger

    wanted = output or Path("out.png")
    output = media.fitting(wanted, made[0])
    if output != wanted and wanted != Path("out.png"):
        logger.warning(f"{wanted.name} does not suit what was made; it is saved as {output.name}")
    files.clean(output.parent)
    for i, item in enumerate(made):
        name = output if len(made) == 1 else output.with_stem(f"{output.stem}-{i}")
        show(f"{media.save(item, name)}", wrap=True)
