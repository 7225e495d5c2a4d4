"""`flowrl generate`: images and videos from a model, with a run's LoRA."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flowrl.cli.common import (
    MOST,
    Call,
    Model,
    app,
    call_arguments,
    console,
    one_sentence_errors,
    parse_guidance,
)
from flowrl.cli.score import meta_for


@app.command()
def generate(
    model: Model,
    prompts: Annotated[list[str], typer.Argument(help="One or more prompts.")],
    lora: Annotated[
        Path | None, typer.Option(help="A run folder, or a folder with LoRA weights.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Denoising steps.")] = 28,
    guidance: Annotated[
        str, typer.Option(help="A scale, none, or pipeline (the pipeline's own setting).")
    ] = "pipeline",
    rlg: Annotated[
        float,
        typer.Option(
            help=(
                "Reinforcement Learning Guidance: extrapolates from the base model through the"
                " LoRA."
            )
        ),
    ] = 1.0,
    best_of: Annotated[
        int,
        typer.Option(min=1, help="Candidates a prompt; the one with the highest reward is kept."),
    ] = 1,
    reward: Annotated[
        list[str] | None,
        typer.Option(help="What chooses: NAME, NAME=WEIGHT or NAME.SETTING=VALUE; once for each."),
    ] = None,
    pipeline: Call = None,
    seed: Annotated[
        int, typer.Option(min=0, max=MOST, help="Equal seeds give equal pictures.")
    ] = 0,
    output: Annotated[
        Path,
        typer.Option("-o", "--output", help="out.png, out.mp4 ...; several prompts get numbers."),
    ] = Path("out.png"),
) -> None:
    """Make images or videos."""
    from flowrl.config.build import lora_of, pipeline_of
    from flowrl.data import media
    from flowrl.policy import load_policy
    from flowrl.rewards import load_set, parse_words
    from flowrl.rollouts import generation
    from flowrl.runtime import log

    log.setup()
    with one_sentence_errors():
        scale = parse_guidance(guidance)
        if rlg != 1 and lora is None:
            raise ValueError("--rlg compares the LoRA with the base model; give --lora too")
        chooser = load_set(parse_words(reward)) if reward else None
        weights, settings = lora_of(lora) if lora else (None, None)
        call = (pipeline_of(lora) if lora else {}) | call_arguments(pipeline)
        policy = load_policy(model, lora=settings, **call)
        if weights:
            policy.load_lora(weights)
        made = generation.generate(
            policy,
            prompts,
            steps=steps,
            guidance=scale,
            seed=seed,
            rlg=rlg,
            best_of=best_of,
            reward=chooser,
            meta=meta_for(chooser, prompts),
        )
        with one_sentence_errors(disk=1):
            for i, item in enumerate(made):
                name = output if len(prompts) == 1 else output.with_stem(f"{output.stem}-{i}")
                console().print(f"{media.save(item, name)}", soft_wrap=True)
