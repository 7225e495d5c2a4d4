"""Pretrain shapes-masked, which draws coloured shapes as 8 x 8 tokens: a VQ autoencoder, then a
masked transformer (MaskGIT, arXiv:2202.04200), in the classes of aMUSEd (arXiv:2401.01808).

    python scripts/embedded/train_shapes_masked.py vq     --work runs/shapes-masked  # 20 minutes
    python scripts/embedded/train_shapes_masked.py masked --work runs/shapes-masked  # an hour
    python scripts/embedded/train_shapes_masked.py export --work runs/shapes-masked

Where checkpoints are lost, `restore` makes them from the weights that ship, and `masked` goes on.

The autoencoder starts from the VAE of shapes-sd3, whose grid is twice as fine: one level is added.
The text encoder starts as the first one of shapes-sd3 and is trained on with the transformer.

A stage saves and goes on as those of train_stickers.py do.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AmusedPipeline, AmusedScheduler, UVit2DModel, VQModel
from torch import Tensor
from train_shapes import BINDING, descend, learning_rate, resume, save, scenes
from train_shapes_sd import WEIGHTS, ShapeBatches, reading, vae
from train_stickers import (
    Stages,
    add_denoiser,
    edges,
    encoded,
    fit,
    generator_of,
    optimizers_of_kernels,
    parser,
    remember,
    run,
    write,
)
from transformers import CLIPTextModelWithProjection, CLIPTokenizer

CODES = 256  # of the codebook; the next number is the mask token
SIDE = 8  # of the grid of tokens
# width, height, place of the crop, aesthetic score: as the pipeline's own
MICRO = (64, 64, 0, 0, 6)
IDLE = 100  # steps without use after which a code is put somewhere else
UNSEEN = -100  # a target that does not count


def vq() -> VQModel:
    """64 x 64 px in [0, 1] to 8 x 8 codes of 8 numbers, 0.35 M parameters."""
    return VQModel(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(16, 32, 32, 32),
        layers_per_block=1,
        latent_channels=8,
        vq_embed_dim=8,
        num_vq_embeddings=CODES,
        norm_num_groups=8,
        sample_size=64,
        mid_block_add_attention=False,
        lookup_from_codebook=True,
        scaling_factor=1.0,
    )


@torch.no_grad()
def like_the_vae(model: VQModel) -> VQModel:
    """Start with the weights of the VAE's layers, all that work on grids of 16 x 16 and finer. Its
    pixels are in [-1, 1]."""
    known, own = vae().state_dict(), model.state_dict()
    for level in (2, 1, 0):  # the decoder's coarsest level is the new one
        for name in [name for name in known if f"up_blocks.{level}." in name]:
            known[name.replace(f"blocks.{level}", f"blocks.{level + 1}")] = known.pop(name)
    known["encoder.conv_in.bias"] -= known["encoder.conv_in.weight"].sum((1, 2, 3))
    known["encoder.conv_in.weight"] *= 2
    known["decoder.conv_out.weight"] /= 2
    known["decoder.conv_out.bias"] = (known["decoder.conv_out.bias"] + 1) / 2
    same = {name: w for name, w in known.items() if name in own and own[name].shape == w.shape}
    model.load_state_dict(same, strict=False)
    return model


class Quantised(torch.nn.Module):
    """The autoencoder, and how many steps ago each code was used."""

    idle: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.vq = like_the_vae(vq()).to(memory_format=torch.channels_last)
        self.register_buffer("idle", torch.zeros(CODES))

    def forward(self, x: Tensor, g: torch.Generator) -> tuple[Tensor, Tensor]:
        """Pictures (B, 3, 64, 64) -> (pictures, the codes' loss). A code that was not used for long
        moves to what the others describe worst."""
        z = self.vq.encode(x).latents
        found, loss, (_, _, index) = self.vq.quantize(z)
        self.idle += 1
        self.idle[index.flatten()] = 0
        lost = (self.idle >= IDLE).nonzero().flatten()
        if len(lost):
            flat = z.detach().permute(0, 2, 3, 1).flatten(0, 2)
            error = (flat - self.vq.quantize.embedding.weight[index.flatten()]).square().sum(1)
            rows = torch.multinomial(error + 1e-8, len(lost), replacement=True, generator=g)
            self.vq.quantize.embedding.weight.data[lost] = flat[rows]
            self.idle[lost] = 0
        return self.vq.decoder(self.vq.post_quant_conv(found)), loss


def drawn(args: argparse.Namespace) -> tuple[Tensor, list[str]]:
    """Scenes (N, 3, 64, 64) uint8 and their prompts; none is pale."""
    return scenes(args.scenes, 6, args.work, 0.0, BINDING)


def train_vq(args: argparse.Namespace) -> None:
    images, _ = drawn(args)
    torch.manual_seed(args.seed)
    model = Quantised().to(args.device)
    optimizers = optimizers_of_kernels(model, muon=True)
    path = args.work / "vq.pt"
    for step in range(resume(path, model=model, **optimizers), args.vq_steps):
        g = generator_of(args, step)
        rows = torch.randint(len(images), (args.vq_batch,), generator=g)
        x = images[rows].to(args.device, torch.float32) / 255
        y, codes = model(x.contiguous(memory_format=torch.channels_last), g)
        error = y - x
        loss = error.abs().mean() + error.square().mean() + edges(error).abs().mean() + codes
        descend(loss, model, optimizers.values(), learning_rate(step, args.vq_steps, args.vq_lr))
        if step % 50 == 0:
            mse, used = error.square().mean().item(), int((model.idle < IDLE // 2).sum())
            print(f"vq {step} loss {loss.item():.4f} mse {mse:.5f} {used} codes", flush=True)
        if (step + 1) % args.save == 0 or step + 1 == args.vq_steps:
            save(path, step + 1, model=model, **optimizers)


@torch.no_grad()
def tokens(args: argparse.Namespace) -> dict[str, Any]:
    """Tokens "z" (N, 8, 8) int16 of drawn scenes, and their prompts "text"; cached."""
    path = args.work / f"tokens-{args.scenes}.pt"
    if not path.exists():
        images, text = drawn(args)
        model = Quantised()
        resume(args.work / "vq.pt", model=model)

        def encode(rows: Sequence[int]) -> Tensor:
            x = images[rows[0] : rows[-1] + 1].float() / 255
            index = model.vq.quantize(model.vq.encode(x).latents)[2][2]
            return index.unflatten(0, (-1, SIDE, SIDE)).short()

        every = encoded(path.with_suffix(".part"), len(text), encode)
        torch.save({"z": every, "text": text}, path)
    return torch.load(path, weights_only=True)


def transformer() -> UVit2DModel:
    """Three blocks of width 96 on 8 x 8 places, 0.8 M parameters."""
    return UVit2DModel(
        hidden_size=96,
        cond_embed_dim=64,
        micro_cond_encode_dim=16,
        micro_cond_embed_dim=16 * len(MICRO),
        encoder_hidden_size=64,
        vocab_size=CODES + 1,
        codebook_size=CODES,
        in_channels=64,
        block_out_channels=64,
        num_res_blocks=1,
        block_num_heads=2,
        num_hidden_layers=3,
        num_attention_heads=3,
        intermediate_size=192,
        sample_size=SIDE,
    )


class Generator(torch.nn.Module):
    """Text encoder and transformer as one module."""

    def __init__(self) -> None:
        super().__init__()
        folder = WEIGHTS / "text_encoder"
        kind = CLIPTextModelWithProjection
        self.text_encoder = kind.from_pretrained(folder, dtype=torch.float32)
        self.transformer = transformer()

    def forward(self, x: Tensor, t: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, CODES, 8, 8) of tokens x (B, 8, 8), and the text's pooled state (B, 64). t is
        not read: the mask tokens say how far a grid is."""
        text = self.text_encoder(ids, output_hidden_states=True)
        micro = torch.tensor(MICRO, dtype=torch.float32, device=x.device).expand(len(x), -1)
        logits = self.transformer(x, text.hidden_states[-2], text.text_embeds, micro)
        return logits, text.text_embeds


class TokenBatches(ShapeBatches):
    """Batches of grids of which a share is masked: cos(pi r / 2) for r uniform on [0, 1]."""

    def __call__(self, step: int) -> list[Tensor]:
        """(x, t, target, tokens of the prompt, labels), a tenth of them without their prompt. The
        target is UNSEEN where a token is shown."""
        count, g = self.args.batch, generator_of(self.args, step)
        rows = torch.randint(len(self.z), (count,), generator=g)
        tokens = self.z[rows].long().flatten(1)
        u, dropped = torch.rand(2, count, 1, generator=g)
        hidden = (tokens.shape[1] * torch.cos(u * math.pi / 2)).round().clamp(min=1)
        rank = torch.rand(tokens.shape, generator=g).argsort(1).argsort(1)
        masked = rank < hidden
        x, target = tokens.where(~masked, CODES), tokens.where(masked, UNSEEN)
        text = torch.where(dropped < 0.1, self.empty, self.ids[rows])
        labels = torch.where(dropped < 0.1, UNSEEN, self.labels[rows])
        grid = (SIDE, SIDE)
        out = (x.unflatten(1, grid), u[:, 0], target.unflatten(1, grid), text, labels)
        return [tensor.to(self.args.device) for tensor in out]


def train_masked(args: argparse.Namespace) -> None:
    tok, data = CLIPTokenizer.from_pretrained(WEIGHTS / "tokenizer"), tokens(args)
    torch.manual_seed(args.seed)
    model, reader = Generator().to(args.device), reading().to(args.device)
    batches = TokenBatches(args, tok, reader, data["z"], data["text"])
    fit(args, "masked", model, reader, batches, F.cross_entropy)


def export(args: argparse.Namespace) -> None:
    """Write the averaged weights as an AmusedPipeline in fp16."""
    autoencoder, model = Quantised(), Generator()
    vq_steps = resume(args.work / "vq.pt", model=autoencoder)
    steps = resume(args.work / "masked.pt", ema=model)
    pipe = AmusedPipeline(
        vqvae=autoencoder.vq.to(memory_format=torch.contiguous_format).half(),
        tokenizer=CLIPTokenizer.from_pretrained(WEIGHTS / "tokenizer"),
        text_encoder=model.text_encoder.half(),
        transformer=model.transformer.half(),
        scheduler=AmusedScheduler(mask_token_id=CODES),
    )
    data = "rendered by flowrl.shapes.scenes; no other data"
    write(args, pipe, __file__, data, vq_steps=vq_steps, steps=steps)


def restore(args: argparse.Namespace) -> None:
    """Write checkpoints of what --out holds: weights alone, so that optimizers start anew."""
    pipe = AmusedPipeline.from_pretrained(args.out, dtype=torch.float32)
    known = remember(args)
    autoencoder, model = Quantised(), Generator()
    autoencoder.vq.load_state_dict(pipe.vqvae.state_dict())
    model.text_encoder.load_state_dict(pipe.text_encoder.state_dict())
    model.transformer.load_state_dict(pipe.transformer.state_dict())
    save(args.work / "vq.pt", known["vq_steps"], model=autoencoder)
    save(args.work / "masked.pt", known["steps"], model=model, ema=model)


STAGES: Stages = {"vq": train_vq, "masked": train_masked, "export": export, "restore": restore}


def arguments() -> argparse.ArgumentParser:
    made = parser(__doc__ or "", STAGES, "flowrl/shapes/masked")
    add_denoiser(made, steps=12_000, batch=32, scenes=24_000)
    made.add_argument("--vq-steps", type=int, default=3500)
    made.add_argument("--vq-batch", type=int, default=16)
    made.add_argument("--vq-lr", type=float, default=2e-3, help="peak learning rate")
    return made


def main(words: list[str] | None = None) -> None:
    run(arguments(), STAGES, words)


if __name__ == "__main__":
    main()
