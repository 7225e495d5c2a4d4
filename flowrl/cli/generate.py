"""`flowrl generate`: images and videos from a model, with a run's LoRA."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from flowrl.cli.common import (
    LARGEST_SEED,
    Call,
    call_arguments,
    one_sentence_errors,
    parse_guidance,
    show,
)

Model = Annotated[
    str, typer.Argument(help="A name of configs/model, a folder in diffusers layout, or a hub id.")
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
    Path, typer.Option("-o", "--output", help="out.png, out.mp4 ...; several prompts get numbers.")
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
    seed: Seed = 0,
    output: Output = Path("out.png"),
) -> None:
    """Make images or videos."""
    from flowrl.rewards import load_set, parse_words
    from flowrl.rollouts import generation
    from flowrl.runtime import log

    log.setup()
    with one_sentence_errors():
        how: dict[str, Any] = {"steps": steps, "seed": seed, "rlg": rlg, "best_of": best_of}
        how["guidance"] = parse_guidance(guidance)
        if rlg != 1 and lora is None:
            raise ValueError("--rlg compares the LoRA with the base model; give --lora too")
        chooser = load_set(parse_words(reward)) if reward else None
        how |= {"reward": chooser, "meta": _meta_of(chooser, prompts)}
        made = generation.generate(_load(model, lora, pipeline), prompts, **how)
        with one_sentence_errors(disk=1):
            _save(made, output)


def _load(model: str, lora: Path | None, pipeline: list[str] | None) -> Any:
    """The policy, with a run's LoRA and arguments of the call, which `pipeline` overrides."""
    from flowrl.config.build import lora_of, pipeline_of
    from flowrl.policy import load_policy

    weights, settings = lora_of(lora) if lora else (None, None)
    call = (pipeline_of(lora) if lora else {}) | call_arguments(pipeline)
    policy: Any = load_policy(model, lora=settings, **call)
    if weights:
        policy.load_lora(weights)
    return policy


def _meta_of(rewards: Any, prompts: list[str]) -> list[dict[str, Any]] | None:
    """What the shapes reward, if it is in the set, reads about prompts of its world."""
    if rewards is None or not any(reward.name == "shapes" for reward in rewards.rewards.values()):
        return None
    from flowrl.shapes.prompts import find

    return [find(prompt) for prompt in prompts]


def _save(made: Any, output: Path) -> None:
    """Write each item; several get numbers."""
    from flowrl.data import media
    from flowrl.runtime import files

    files.clean(output.parent)
    for i, item in enumerate(made):
        name = output if len(made) == 1 else output.with_stem(f"{output.stem}-{i}")
        show(f"{media.save(item, name)}", wrap=True)
