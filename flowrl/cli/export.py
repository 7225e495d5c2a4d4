"""`flowrl export`: a run's weights in the files of other programs."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated, Literal

import typer

from flowrl.cli.common import next_steps, one_sentence_errors, show, to_try

Format = Annotated[
    Literal["diffusers", "comfyui", "kohya", "merged"],
    typer.Option(
        "--format",
        help="A LoRA in the layout of diffusers, ComfyUI, or kohya's trainers (A1111, Forge); or"
        " the whole pipeline with the LoRA merged into its weights.",
    ),
]
Chosen = Annotated[
    str | None,
    typer.Option(
        metavar="best|N",
        help="Weights of the held-out reward's peak, or of iteration N. Default: the last.",
    ),
]
Type = Annotated[
    Literal["fp32", "bf16", "fp16"] | None,
    typer.Option(help="Type of the written weights. Default: as they are."),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        help="A folder, or a .safetensors file of a LoRA. Default: RUN-FORMAT in this folder.",
    ),
]
Push = Annotated[
    str | None,
    typer.Option(
        metavar="OWNER/NAME",
        help="Upload the folder to this repository of huggingface.co (run hf auth login before);"
        " a new one is private.",
    ),
]


def export(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    form: Format = "diffusers",
    checkpoint: Chosen = None,
    dtype: Type = None,
    output: Output = None,
    push: Push = None,
) -> None:
    """Write the weights of a run for other programs, with a model card."""
    from flowrl.export import words
    from flowrl.runtime import log

    log.setup()
    with one_sentence_errors():
        order = words.judge(run, form, checkpoint=checkpoint, dtype=dtype, output=output, push=push)
        from flowrl.export import weights

        log.hush()
        written = weights.export(order)
        show("\n".join(map(str, written)), wrap=True)
    if push:
        from flowrl.export.push import push as upload

        with one_sentence_errors(disk=1):
            show(upload(order.output, push), wrap=True)
    if form == "merged":
        next_steps(f"flowrl generate {quote(str(written[0]))} {to_try(order.cfg)}")
