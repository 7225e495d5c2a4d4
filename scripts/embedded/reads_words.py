"""Whether a shapes model uses the words of its prompts: what the loss gains by the right ones.

    python scripts/embedded/reads_words.py [WEIGHTS ...]

For rendered scenes of two shapes in a relation, the flow-matching loss is printed at high noise,
where the layout is decided, and how much it rises when the prompt states the opposite relation,
exchanges the two shapes, or says nothing. Zero: the model does not read that. WEIGHTS are folders
of a pipeline, such as those of an older commit; the embedded ones are the default.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, SD3Transformer2DModel
from rich.table import Table
from torch import Tensor
from train_shapes import Flow
from transformers import CLIPTextModelWithProjection

from flowrl.cli.common import show
from flowrl.shapes import build, prompts
from flowrl.shapes.scenes import RELATIONS, render

EMBEDDED = Path(__file__).resolve().parents[2] / "flowrl" / "shapes" / "weights"
SCENES = 256
LEVELS = (1.0, 0.9, 0.8)
OPPOSITE = dict(zip(RELATIONS, ("right of", "left of", "below", "above"), strict=True))


def opposite(prompt: prompts.Prompt) -> str:
    relation = prompt["include"][1]["position"][0]
    return prompt["prompt"].replace(f" {relation} ", f" {OPPOSITE[relation]} ")


def exchanged(prompt: prompts.Prompt) -> str:
    second, first = (f"{c['color']} {c['shape']}" for c in prompt["include"])
    relation = prompt["include"][1]["position"][0]
    return f"a {second} {relation} a {first}"


TEXTS: dict[str, Callable[[prompts.Prompt], str]] = {
    "right": lambda prompt: prompt["prompt"],
    "opposite relation": opposite,
    "shapes exchanged": exchanged,
    "no words": lambda _: "",
}


def load(folder: Path) -> tuple[Flow, AutoencoderKL]:
    """Text encoders and transformer, and the VAE, in fp32."""
    flow = Flow(build.tokenizer()).eval()
    flow.transformer = SD3Transformer2DModel.from_pretrained(folder / "transformer").float()
    for name in ("text_encoder", "text_encoder_2"):
        encoder = CLIPTextModelWithProjection.from_pretrained(folder / name).float()
        setattr(flow, name, encoder)
    return flow, AutoencoderKL.from_pretrained(folder / "vae").float()


@torch.no_grad()
def losses(folder: Path) -> Tensor:
    """(texts, levels): of each of TEXTS at each of LEVELS, for the same scenes and noise."""
    flow, vae = load(folder)
    g = torch.Generator().manual_seed(0)
    positions = [p for p in prompts.all_prompts() if p["task"] == "position"]
    chosen = torch.randperm(len(positions), generator=g)[:SCENES].tolist()
    asked = [positions[i] for i in chosen]
    pictures = torch.stack([render(prompts.scene(p, g)) for p in asked])
    latents = vae.encode(2 * pictures - 1).latent_dist.mode()
    x0 = (latents - vae.config.shift_factor) * vae.config.scaling_factor
    eps = torch.randn(x0.shape, generator=g)
    tok = build.tokenizer()
    pad = {"padding": "max_length", "max_length": build.TEXT_TOKENS, "return_tensors": "pt"}
    out = torch.zeros(len(TEXTS), len(LEVELS))
    for i, words in enumerate(TEXTS.values()):
        ids = tok([words(p) for p in asked], **pad).input_ids
        for j, level in enumerate(LEVELS):
            x = (1 - level) * x0 + level * eps
            out[i, j] = F.mse_loss(flow(x, torch.full((SCENES,), level), ids)[0], eps - x0)
    return out


def main() -> None:
    torch.set_num_threads(1)
    for folder in [Path(word) for word in sys.argv[1:]] or [EMBEDDED]:
        right, *others = losses(folder)
        table = Table(f"loss of {folder}", *(f"noise {level:g}" for level in LEVELS))
        table.add_row("right words", *(f"{value:.4f}" for value in right))
        for name, row in zip(list(TEXTS)[1:], others, strict=True):
            table.add_row(name, *(f"{value:+.4f}" for value in row - right))
        show(table)


if __name__ == "__main__":
    main()
