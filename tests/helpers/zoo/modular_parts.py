"""Pipelines of classes that exist as blocks, or whose classic form no other file of the zoo has."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers
from diffusers import modular_pipelines
from tiny_parts import denoiser, qwen_vae, randomise, tokenizer
from torch import nn

from zoo.flows import CHAT_TEMPLATE, DECODER, flux2_vae, qwen3_text

ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}


def assembled(blocks: str, **parts: Any) -> Any:
    """Blocks by name with these components and settings."""
    pipe = getattr(modular_pipelines, blocks)().init_pipeline()
    pipe.update_components(**parts)
    return pipe


def flow(**config: Any):
    return diffusers.FlowMatchEulerDiscreteScheduler(**{"shift": 3.0, **config})


def qwen3_vl_config(tok, layers: int, **marks: int) -> Any:
    """Sizes of a tiny Qwen3-VL. marks: ids of the tokens that stand for pictures."""
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 16,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    text = {**DECODER, "num_hidden_layers": layers, "vocab_size": len(tok), "rope_scaling": ROPE}
    return transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **marks)


def qwen3_vision_text(tok, layers: int, seed: int = 31) -> nn.Module:
    """A Qwen3-VL whose language model has many layers, all tiny, since some are picked by number;
    no prompt uses its vision tower."""
    return randomise(transformers.Qwen3VLModel(qwen3_vl_config(tok, layers)), seed)


def krea2(blocks: str = "Krea2AutoBlocks"):
    """Twelve layers of 36 are read."""
    tok = tokenizer("qwen", 2048)
    return assembled(
        blocks,
        tokenizer=tok,
        text_encoder=qwen3_vision_text(tok, 36),
        vae=qwen_vae(),
        scheduler=flow(),
        transformer=denoiser(
            "Krea2Transformer2DModel",
            in_channels=16,
            num_key_value_heads=2,
            intermediate_size=32,
            timestep_embed_dim=16,
            text_hidden_dim=16,
            text_num_attention_heads=2,
            text_num_key_value_heads=2,
            text_intermediate_size=32,
            num_layerwise_text_blocks=1,
            num_refiner_text_blocks=1,
            axes_dims_rope=(4, 6, 6),
        ),
    )


def ernie_image():
    """Without its prompt enhancer, which samples a new prompt in each call."""
    tok = tokenizer("qwen", 2048)
    text = {**DECODER, "vocab_size": len(tok), "model_type": "mistral"}
    vision = {
        "model_type": "pixtral",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
        "image_size": 32,
        "patch_size": 8,
    }
    config = transformers.Mistral3Config(
        text_config=text, vision_config=vision, image_token_index=2
    )
    return assembled(
        "ErnieImageAutoBlocks",
        tokenizer=tok,
        text_encoder=randomise(transformers.Mistral3Model(config), 32),
        vae=flux2_vae(),
        scheduler=flow(),
        transformer=randomise(
            diffusers.ErnieImageTransformer2DModel(
                hidden_size=32,
                num_attention_heads=2,
                num_layers=2,
                ffn_hidden_size=32,
                in_channels=16,
                out_channels=16,
                text_in_dim=16,
                rope_axes_dim=(4, 6, 6),
            ),
            33,
        ),
    )


def anima():
    """A Cosmos network; its text is Qwen3's, read by embeddings of T5's tokens."""
    tok, t5 = tokenizer("qwen", 2048), tokenizer("t5", 64)
    return assembled(
        "AnimaAutoBlocks",
        tokenizer=tok,
        t5_tokenizer=t5,
        text_encoder=qwen3_text(tok),
        text_conditioner=randomise(
            diffusers.AnimaTextConditioner(
                source_dim=16,
                target_dim=16,
                model_dim=16,
                num_layers=1,
                num_attention_heads=2,
                target_vocab_size=len(t5),
                min_sequence_length=24,
            ),
            34,
        ),
        vae=qwen_vae(),
        scheduler=flow(),
        transformer=denoiser(
            "CosmosTransformer3DModel",
            in_channels=4,
            out_channels=4,
            text_embed_dim=16,
            adaln_lora_dim=4,
            max_size=(4, 32, 32),
            extra_pos_embed_type=None,
        ),
    )


def ideogram4():
    """Two networks, one of them without text; the text's 13 layers are read from 36."""
    tok = tokenizer("qwen", 2048)
    tok.chat_template = CHAT_TEMPLATE
    network = {
        "in_channels": 16,
        "intermediate_size": 32,
        "adaln_dim": 16,
        "llm_features_dim": 13 * 16,
        "mrope_section": (4, 2, 2),
    }
    return assembled(
        "Ideogram4AutoBlocks",
        tokenizer=tok,
        text_encoder=qwen3_vision_text(tok, 36),
        vae=flux2_vae(),
        scheduler=flow(),
        transformer=denoiser("Ideogram4Transformer2DModel", 35, **network),
        unconditional_transformer=denoiser("Ideogram4Transformer2DModel", 36, **network),
    )
