"""Pretrain stickers-edit, which edits a picture as an instruction says (InstructPix2Pix,
arXiv:2211.09800), after the stages vae and sd of train_stickers.py.

    python scripts/embedded/train_stickers_edit.py edit        --work runs/stickers   # hours
    python scripts/embedded/train_stickers_edit.py export-edit --work runs/stickers

The UNet sees the source's latents beside the noisy ones. It starts from sd's averaged weights where
sd.pt lies in --work; weights of the source's channels start at zero, as in the paper (3.2). Source
and target are scenes before and after an edit of one object, or of the background.

A stage saves and goes on as those of train_stickers.py do.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from diffusers import StableDiffusionInstructPix2PixPipeline
from torch import Tensor
from train_shapes import resume
from train_stickers import (
    WIDTH,
    Batches,
    Denoiser,
    Reading,
    Stages,
    add_denoiser,
    encoded,
    encoder,
    export_stable,
    fit,
    latents,
    parser,
    run,
    tokenizer,
)

from flowrl.scenes import grammar
from flowrl.scenes.edits import SHARES, Edits
from flowrl.scenes.stickers.prompts import WORLD
from flowrl.scenes.stickers.world import EDITS

CHANNELS = 32  # 16 of noisy latents and 16 of the source's


def edit_reading(language: grammar.Language = WORLD, width: int = WIDTH) -> Reading:
    """What an instruction does, to which object, and what comes of it."""
    nouns = (None, *language.nouns)
    results = (*nouns, *language.backgrounds, *grammar.DIRECTIONS)

    def words(text: str) -> tuple[object, ...]:
        said = grammar.read(text, language, grammar.Edit)
        return said.action, said.noun, said.to

    return Reading((tuple(SHARES), nouns, results), words, width)


def instructions(count: int, seed: int, edits: Edits = EDITS) -> list[str]:
    """Drawn instructions, the actions in the proportions of SHARES."""
    g = torch.Generator().manual_seed(seed + 2)
    by_action: dict[str, list[str]] = {}
    for row in edits.all_prompts():
        by_action.setdefault(row["task"], []).append(row["prompt"])
    shares = torch.tensor([SHARES[action] for action in by_action])
    actions = torch.multinomial(shares, count, True, generator=g).tolist()
    lists = [by_action[list(by_action)[action]] for action in actions]
    places = torch.rand(count, generator=g).tolist()
    return [texts[int(u * len(texts))] for texts, u in zip(lists, places, strict=True)]


@torch.no_grad()
def edit_latents(
    args: argparse.Namespace, edits: Edits, encoder_of: Any, scale: float
) -> dict[str, Any]:
    """Latents "source" and "target" (N, ...) fp16 of drawn edits in sd's unit, their instructions
    "text", and "scale", that unit; cached. encoder_of(args) encodes scenes."""
    path = args.work / f"edit-latents-{args.pairs}.pt"
    if not path.exists():
        text, encode = instructions(args.pairs, args.seed, edits), encoder_of(args)

        def both(rows: Any) -> Tensor:
            before, after = zip(*(edits.pair(text[row], row) for row in rows), strict=True)
            return torch.stack([encode(before), encode(after)], 1)

        every = (encoded(path.with_suffix(".part"), len(text), both) * scale).half()
        pairs = {"source": every[:, 0].clone(), "target": every[:, 1].clone()}
        torch.save(pairs | {"text": text, "scale": scale}, path)
    return torch.load(path, weights_only=True)


class EditBatches(Batches):
    """Batches of noisy targets, with their sources in further channels."""

    def __init__(
        self, args: argparse.Namespace, tok: Any, reading: Reading, data: dict[str, Any]
    ) -> None:
        super().__init__(args, tok, reading, data["target"], data["text"])
        # the pipeline multiplies what it draws with the VAE's scaling factor, never the source
        self.source, self.scale = data["source"], data["scale"]

    def seen(self, x: Tensor, rows: Tensor, u: Tensor) -> Tensor:
        """(B, 32, 8, 8). A twentieth loses its instruction, a twentieth its source, which is zero
        then, and a twentieth both, as in the paper (3.2.1)."""
        source = self.source[rows].float() / self.scale
        lost = (u >= 0.05) & (u < 0.15)  # no instruction: u < 0.1
        return torch.cat([x, source.masked_fill(lost[:, None, None, None], 0)], 1)


def widened(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of sd for a UNet of twice its channels, which does not see the further ones yet."""
    weight = state["unet.conv_in.weight"]
    further = torch.zeros_like(weight)
    return state | {"unet.conv_in.weight": torch.cat([weight, further], 1)}


def train_edit(args: argparse.Namespace) -> None:
    tok, scale = tokenizer(), latents(args)["scale"]
    data = edit_latents(args, EDITS, encoder, scale)
    torch.manual_seed(args.seed)
    plain, model = Denoiser(tok), Denoiser(tok, CHANNELS)
    if resume(args.work / "sd.pt", ema=plain):
        model.load_state_dict(widened(plain.state_dict()))
    reading = edit_reading().to(args.device)
    fit(args, "edit", model.to(args.device), reading, EditBatches(args, tok, reading, data))


def export_edit(args: argparse.Namespace) -> None:
    kind = StableDiffusionInstructPix2PixPipeline
    export_stable(args, kind, Denoiser(tokenizer(), CHANNELS), "edit", __file__)


STAGES: Stages = {"edit": train_edit, "export-edit": export_edit}


def arguments() -> argparse.ArgumentParser:
    made = parser(__doc__ or "", STAGES, "flowrl/scenes/stickers/edit")
    add_denoiser(made, steps=10_000)  # --scenes: as in sd, whose unit of latents is kept
    made.add_argument("--pairs", type=int, default=30_000, help="drawn edits, likewise")
    return made


def main(words: list[str] | None = None) -> None:
    run(arguments(), STAGES, words)


if __name__ == "__main__":
    main()
