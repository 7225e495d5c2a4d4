"""Untrained parts of shapes-sd3, and how they become a real, only small, SD3 pipeline.

64x64 px -> 16x16x4 latents -> 64 image tokens; two CLIP text encoders with a vocabulary learned
from the world's own prompts.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

from flowrl.shapes.prompts import all_prompts

TEXT_TOKENS = 12  # the longest prompt has 8 words
WIDTH = 128


def _learned_merges() -> list[tuple[str, str]]:
    """Byte pairs of the prompts, most frequent first."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    learned = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    learned.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(
        vocab_size=400, end_of_word_suffix="</w>", show_progress=False, special_tokens=[]
    )
    learned.train_from_iterator((p["prompt"] for p in all_prompts()), trainer)
    return json.loads(learned.to_str())["model"]["merges"]


def tokenizer(
    merges: Iterable[tuple[str, str]] | None = None, length: int = TEXT_TOKENS
) -> CLIPTokenizer:
    """A CLIP tokenizer of these merges, which pads to `length` tokens.

    None: they are learned from the prompts of shapes, so that each word of them is one token.
    """
    merges = _learned_merges() if merges is None else list(merges)
    letters = [chr(c) for c in range(33, 127)]
    pieces = letters + [c + "</w>" for c in letters] + ["".join(m) for m in merges]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    for special in ("<|startoftext|>", "<|endoftext|>"):
        vocab[special] = len(vocab)
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder, "vocab.json"), Path(folder, "merges.txt")
        files[0].write_text(json.dumps(vocab), encoding="utf-8")
        files[1].write_text(
            "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges), encoding="utf-8"
        )
        return CLIPTokenizer.from_pretrained(folder, model_max_length=length)


def text_encoder(tok: CLIPTokenizer) -> CLIPTextModelWithProjection:
    """A three-layer CLIP text encoder; SD3 reads its second-to-last hidden state and its pooled
    projection."""
    config = CLIPTextConfig(
        vocab_size=len(tok),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=2,
        projection_dim=64,
        max_position_embeddings=TEXT_TOKENS,
        hidden_act="gelu",
        bos_token_id=tok.bos_token_id,
        eos_token_id=tok.eos_token_id,
        pad_token_id=tok.pad_token_id,
    )
    return CLIPTextModelWithProjection(config)


def vae() -> AutoencoderKL:
    """4x downsampling, 4 latent channels, 0.23 M parameters."""
    channels = (16, 32, 32)
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=channels,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=64,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
        shift_factor=0.0,
        scaling_factor=1.0,
    )


def transformer() -> SD3Transformer2DModel:
    """Four joint blocks of width 128, 2.3 M parameters."""
    return SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=4,
        attention_head_dim=32,
        num_attention_heads=WIDTH // 32,
        joint_attention_dim=WIDTH,
        caption_projection_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        pos_embed_max_size=16,
        qk_norm="rms_norm",
    )


def pipeline(
    parts: dict[str, torch.nn.Module], tok: CLIPTokenizer, *, shift: float = 1.0
) -> StableDiffusion3Pipeline:
    """Assemble the pipeline from {"vae", "transformer", "text_encoder", "text_encoder_2"} and the
    tokenizer."""
    return StableDiffusion3Pipeline(
        **parts,
        tokenizer=tok,
        tokenizer_2=tok,
        text_encoder_3=None,
        tokenizer_3=None,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=shift),
    )
