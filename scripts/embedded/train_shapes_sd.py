"""Pretrain shapes-sd, a latent diffusion UNet of coloured shapes, and shapes-edit, which edits
them (InstructPix2Pix, arXiv:2211.09800), after train_shapes.py.

    python scripts/embedded/train_shapes_sd.py sd          --work runs/shapes-sd  # an hour
    python scripts/embedded/train_shapes_sd.py export-sd   --work runs/shapes-sd
    python scripts/embedded/train_shapes_sd.py edit        --work runs/shapes-sd
    python scripts/embedded/train_shapes_sd.py export-edit --work runs/shapes-sd

The VAE is that of shapes-sd3, and the text encoder starts as its first one, which has learned to
name every clause of a prompt; it is trained on with the UNet. As with shapes-sd3 a third of the
pictures are pale, which no prompt says: a habit that RL can undo.

shapes-edit starts from shapes-sd's averaged weights, as train_stickers_edit.py explains.

A stage saves and goes on as those of train_stickers.py do.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    StableDiffusionInstructPix2PixPipeline,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from torch import Tensor
from train_shapes import BINDING, resume, scenes
from train_shapes import Reading as PromptReading
from train_stickers import (
    Batches,
    Reading,
    Stages,
    add_denoiser,
    encoded,
    fit,
    parser,
    run,
    scheduler,
    word_merges,
    write,
)
from train_stickers_edit import EditBatches, edit_latents, edit_reading, widened
from transformers import CLIPTextModel, CLIPTokenizer

from flowrl.scenes.shapes import EDITS, SHAPES
from flowrl.scenes.world import Scene
from flowrl.shapes import build, prompts

WEIGHTS = Path(build.__file__).parent / "weights"  # of shapes-sd3
# words of edits and motions, which the world's prompts do not have
FURTHER = "appear appears disappear disappears down grow grows move moves remove replace right"
FURTHER += " shrink shrinks the up with"


def tokenizer() -> CLIPTokenizer:
    """One token a word, for all of the world's models."""
    words = [*sorted(prompts.vocabulary(prompts.all_prompts())), *FURTHER.split()]
    return build.tokenizer(word_merges(words))


def text_encoder(tok: CLIPTokenizer) -> CLIPTextModel:
    """The first one of shapes-sd3, for another tokenizer: a word that both know keeps its row."""
    old = CLIPTokenizer.from_pretrained(WEIGHTS / "tokenizer")
    model = CLIPTextModel.from_pretrained(WEIGHTS / "text_encoder", dtype=torch.float32)
    rows = model.get_input_embeddings().weight.detach().clone()
    model.resize_token_embeddings(len(tok), mean_resizing=False)
    table = model.get_input_embeddings().weight.data.normal_(std=0.02)
    for word in prompts.vocabulary(prompts.all_prompts()):
        table[tok(word).input_ids] = rows[old(word).input_ids]  # with start and end
    model.config.bos_token_id, model.config.eos_token_id = tok.bos_token_id, tok.eos_token_id
    model.config.pad_token_id = tok.pad_token_id
    return model


def unet(channels: int = 4) -> UNet2DConditionModel:
    """Levels of 16 x 16, 8 x 8 and 4 x 4; `channels` go in, the first 4 noisy."""
    return UNet2DConditionModel(
        sample_size=16,
        in_channels=channels,
        out_channels=4,
        block_out_channels=(32, 64, 96),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=64,
        attention_head_dim=(1, 2, 3),  # diffusers' name for the number of heads
        norm_num_groups=16,
    )


class Denoiser(torch.nn.Module):
    """Text encoder and UNet as one module."""

    def __init__(self, tok: CLIPTokenizer, channels: int = 4) -> None:
        super().__init__()
        self.text_encoder, self.unet = text_encoder(tok), unet(channels)
        self.to(memory_format=torch.channels_last)  # 0.57 s of a step on one core instead of 0.78

    def forward(self, x: Tensor, t: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The noise (B, 4, 16, 16) in x (B, channels, 16, 16), and the text's pooled state
        (B, 64)."""
        text = self.text_encoder(ids)
        x = x.contiguous(memory_format=torch.channels_last)
        return self.unet(x, t, text.last_hidden_state).sample, text.pooler_output


def vae() -> AutoencoderKL:
    return AutoencoderKL.from_pretrained(WEIGHTS / "vae", torch_dtype=torch.float32).eval()


def latents(args: argparse.Namespace) -> dict[str, Any]:
    """Latents "z" (N, 4, 16, 16) fp16 of unit variance of drawn scenes, their prompts "text", and
    what they were multiplied with, "scale"; cached."""
    path = args.work / f"latents-{args.scenes}.pt"
    if not path.exists():
        images, text = scenes(args.scenes, 4, args.work, args.faded, BINDING)
        model = vae().to(args.device)

        def encode(rows: Any) -> Tensor:
            x = images[rows.start : rows.stop].to(args.device).float() / 127.5 - 1
            return model.encode(x).latent_dist.mode()

        every = encoded(path.with_suffix(".part"), len(text), encode)
        scale = 1 / every.std().item()
        torch.save({"z": (every * scale).half(), "text": text, "scale": scale}, path)
    return torch.load(path, weights_only=True)


class ShapeBatches(Batches):
    """Batches whose texts are as long as the text encoder reads them."""

    tokens = build.TEXT_TOKENS


def reading() -> Reading:
    return Reading(PromptReading.PARTS, lambda text: PromptReading.said(prompts.find(text)), 64)


def train_sd(args: argparse.Namespace) -> None:
    tok, data = tokenizer(), latents(args)
    torch.manual_seed(args.seed)
    model, reader = Denoiser(tok).to(args.device), reading().to(args.device)
    fit(args, "sd", model, reader, ShapeBatches(args, tok, reader, data["z"], data["text"]))


def scene_encoder(args: argparse.Namespace) -> Callable[[Sequence[Scene]], Tensor]:
    """Scenes to latents (N, 4, 16, 16): the posterior's mode, as pipelines take it."""
    model = vae().to(args.device)

    def encode(scenes: Sequence[Scene]) -> Tensor:
        x = torch.stack([SHAPES.render(one) for one in scenes]) * 2 - 1
        return model.encode(x.to(args.device)).latent_dist.mode()

    return encode


class ShapeEdits(EditBatches):
    """Batches of edits whose texts are as long as the text encoder reads them."""

    tokens = build.TEXT_TOKENS


def train_edit(args: argparse.Namespace) -> None:
    tok, scale = tokenizer(), latents(args)["scale"]
    data = edit_latents(args, EDITS, scene_encoder, scale)
    torch.manual_seed(args.seed)
    plain, model = Denoiser(tok), Denoiser(tok, 8)
    if resume(args.work / "sd.pt", ema=plain):
        model.load_state_dict(widened(plain.state_dict()))
    reader = edit_reading(SHAPES.language, 64).to(args.device)
    fit(args, "edit", model.to(args.device), reader, ShapeEdits(args, tok, reader, data))


def export_sd(args: argparse.Namespace) -> None:
    export(args, StableDiffusionPipeline, Denoiser(tokenizer()), "sd")


def export_edit(args: argparse.Namespace) -> None:
    kind = StableDiffusionInstructPix2PixPipeline
    export(args, kind, Denoiser(tokenizer(), 8), "edit")


def export(args: argparse.Namespace, kind: Any, model: Denoiser, stage: str) -> None:
    """Write a stage's averaged weights as a pipeline in fp16."""
    steps = resume(args.work / f"{stage}.pt", ema=model)
    model.to(memory_format=torch.contiguous_format)
    autoencoder = vae()
    # Stable Diffusion's pipelines know no shift; that of these latents is 0.03 of 0.7
    autoencoder.register_to_config(scaling_factor=latents(args)["scale"], shift_factor=None)
    pipe = kind(
        vae=autoencoder.half(),
        unet=model.unet.half(),
        text_encoder=model.text_encoder.half(),
        tokenizer=tokenizer(),
        scheduler=scheduler(),
        safety_checker=None,
        feature_extractor=None,
        image_encoder=None,
        requires_safety_checker=False,
    )
    write(args, pipe, __file__, "rendered by flowrl.shapes.scenes; no other data", steps=steps)


STAGES: Stages = {"sd": train_sd, "export-sd": export_sd}
STAGES |= {"edit": train_edit, "export-edit": export_edit}


def arguments() -> argparse.ArgumentParser:
    made = parser(__doc__ or "", STAGES, "flowrl/shapes/sd")
    add_denoiser(made, steps=5000, batch=32, scenes=60_000)
    made.add_argument("--pairs", type=int, default=8000, help="drawn edits, whose latents are kept")
    made.add_argument("--faded", type=float, default=0.35, help="share of pale pictures")
    return made


def main(words: list[str] | None = None) -> None:
    run(arguments(), STAGES, words)


if __name__ == "__main__":
    main()
