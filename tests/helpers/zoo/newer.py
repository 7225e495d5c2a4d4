"""Image models whose texts are read by Qwen3-VL: Qwen-Image 2.1, Nucleus."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers
from tiny_parts import MEAN, STD, qwen_vae, randomise

from zoo.case import Case
from zoo.images_parts import vision_tokenizer
from zoo.modular_parts import flow, qwen3_vl_config

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if m.content is string else m.content[0].text }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def qwen3_vl(layers: int = 2, seed: int = 81) -> dict[str, Any]:
    """The text encoder with its language head, and its processor; no prompt has a picture."""
    tok = vision_tokenizer()
    marks = {"image": "image_pad", "video": "video_pad"}
    marks |= {f"vision_{end}": f"vision_{end}" for end in ("start", "end")}
    for name, mark in marks.items():
        setattr(tok, f"{name}_token", f"<|{mark}|>")
        setattr(tok, f"{name}_token_id", tok.convert_tokens_to_ids(f"<|{mark}|>"))
    config = qwen3_vl_config(tok, layers, image_token_id=tok.image_token_id)
    processor = transformers.Qwen3VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(),
        tokenizer=tok,
        video_processor=transformers.Qwen3VLVideoProcessor(),
        chat_template=TEMPLATE,
    )
    net = transformers.Qwen3VLForConditionalGeneration(config)
    return {"text_encoder": randomise(net, seed), "processor": processor}


def qwenimage21():
    vae = diffusers.AutoencoderKLQwenImage21(
        base_dim=4,
        decoder_base_dim=4,
        z_dim=4,
        dim_mult=[1] * 5,
        num_res_blocks=1,
        latents_mean=MEAN,
        latents_std=STD,
    )
    net = diffusers.QwenImage21Transformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        context_in_dim=16,
        mlp_ratio=2,
        axes_dims_rope=(4, 6, 6),
    )
    return diffusers.QwenImage21Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=randomise(vae, 82, 0.7),
        transformer=randomise(net, 83),
        **qwen3_vl(),
    )


def nucleus():
    net = diffusers.NucleusMoEImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=5,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(4, 6, 6),
        mlp_ratio=6.0,
        num_experts=4,
        moe_intermediate_dim=16,
        capacity_factors=2.0,
    )
    return diffusers.NucleusMoEImagePipeline(
        scheduler=flow(), vae=qwen_vae(), transformer=randomise(net, 84), **qwen3_vl()
    )


def helios() -> Any:
    """One chunk of frames; several are loops one after the other."""
    from tiny_parts import t5_text, tokenizer, wan_vae

    tok = tokenizer("t5", 512)
    net = diffusers.HeliosTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=64,
        ffn_dim=32,
        num_layers=2,
        rope_dim=(4, 4, 4),
    )
    return diffusers.HeliosPipeline(
        tokenizer=tok,
        text_encoder=t5_text(tok, umt5=True),
        vae=wan_vae(),
        scheduler=flow(),
        transformer=randomise(net, 85),
    )


BIG = {"height": 64, "width": 64}
CASES: dict[str, Case] = {
    "qwenimage21": Case(
        make=qwenimage21,
        call={**BIG, "use_kv_cache": False, "true_cfg_scale": 3.0, "negative_prompt": "a circle"},
    ),
    "nucleus": Case(
        make=nucleus,
        call={"height": 16, "width": 16, "return_index": -1, "max_sequence_length": 64},
    ),
    "helios": Case(
        make=helios,
        call={
            "height": 16,
            "width": 16,
            "num_frames": 9,
            "num_latent_frames_per_chunk": 3,
            "history_sizes": [4, 2, 1],
            "max_sequence_length": 12,
        },
    ),
}
