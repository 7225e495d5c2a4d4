"""Small models in place of the weights that configs/model names: the same classes, other sizes.

Every component is built from its published numbers in configs/architecture with the entries of
SIZES replaced, so that kinds of attention, norms, block types, guidance embeddings and channels of
latents are those of the real model; schedulers have their published settings. Widths are such that
quantised weights, 8-bit moments and tiles of a decoder act. Vocabularies and weights are random.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.config.compose import options
from flowrl.runtime.log import quiet
from flowrl.training.budget.architecture import Architecture, read

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "helpers"))

from tiny_parts import tokenizer

CLIP = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "projection_dim": 32,
}
T5 = {"d_model": 64, "d_kv": 32, "d_ff": 128, "num_layers": 2, "num_heads": 2}
VIDEO_VAE = {"base_dim": 8, "num_res_blocks": 1}
QWEN_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rope_scaling": {"mrope_section": [4, 6, 6], "rope_type": "default", "type": "default"},
}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
}
SIZES: dict[str, dict[str, Any]] = {  # by class
    "SD3Transformer2DModel": {
        "sample_size": 8,
        "num_layers": 2,
        "attention_head_dim": 32,
        "num_attention_heads": 4,
        "joint_attention_dim": 64,
        "caption_projection_dim": 128,
        "pooled_projection_dim": 64,
        "pos_embed_max_size": 16,
        "dual_attention_layers": [0],
    },
    "FluxTransformer2DModel": {
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 32,
        "num_attention_heads": 2,
        "joint_attention_dim": 64,
        "pooled_projection_dim": 32,
        "axes_dims_rope": [8, 12, 12],
    },
    "QwenImageTransformer2DModel": {
        "num_layers": 2,
        "attention_head_dim": 32,
        "num_attention_heads": 2,
        "joint_attention_dim": 64,
        "axes_dims_rope": [8, 12, 12],
    },
    "WanTransformer3DModel": {
        "num_attention_heads": 2,
        "attention_head_dim": 64,
        "text_dim": 64,
        "ffn_dim": 256,
        "num_layers": 2,
    },
    "AutoencoderKL": {
        "block_out_channels": [32, 32, 32, 32],
        "layers_per_block": 1,
        "sample_size": 32,
    },
    "AutoencoderKLQwenImage": VIDEO_VAE,
    "AutoencoderKLWan": VIDEO_VAE,
    "CLIPTextModel": CLIP,
    "CLIPTextModelWithProjection": CLIP,
    "T5EncoderModel": T5,
    "UMT5EncoderModel": T5,
    "Qwen2_5_VLForConditionalGeneration": {
        "text_config": QWEN_TEXT,
        "vision_config": QWEN_VISION,
    },
}
UNETS: dict[str, dict[str, Any]] = {  # two models share their class
    "sd1.5": {
        "sample_size": 8,
        "block_out_channels": [32, 64, 128, 128],
        "layers_per_block": 1,
        "cross_attention_dim": 32,
    },
    "sdxl": {
        "sample_size": 8,
        "block_out_channels": [32, 64, 128],
        "layers_per_block": 1,
        "transformer_layers_per_block": [1, 1, 2],
        "attention_head_dim": [1, 2, 4],
        "cross_attention_dim": 64,
        "addition_time_embed_dim": 32,
        "projection_class_embeddings_input_dim": 32 + 6 * 32,
    },
}
LARGER = {"num_attention_heads": 4, "attention_head_dim": 32, "ffn_dim": 384, "num_layers": 3}
# as the repositories' scheduler_config.json have them
NOISE = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
OFFSET = {"steps_offset": 1}
SCHEDULERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sd1.5": ("PNDMScheduler", {**NOISE, **OFFSET, "skip_prk_steps": True}),
    "sdxl": ("EulerDiscreteScheduler", {**NOISE, **OFFSET, "timestep_spacing": "leading"}),
    "sd3.5-medium": ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}),
    "flux.1-dev": (
        "FlowMatchEulerDiscreteScheduler",
        {"shift": 3.0, "use_dynamic_shifting": True},
    ),
    "qwen-image": (
        "FlowMatchEulerDiscreteScheduler",
        {
            "use_dynamic_shifting": True,
            "max_shift": 0.9,
            "max_image_seq_len": 8192,
            "shift_terminal": 0.02,
        },
    ),
    **dict.fromkeys(
        ("wan2.1-1.3b", "wan2.1-14b"),
        (
            "UniPCMultistepScheduler",
            {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0},
        ),
    ),
}
TOKENIZERS = {"CLIP": ("clip", 77), "T5": ("t5", 512), "UMT5": ("t5", 512), "Qwen": ("qwen", 2048)}
PICTURE = {"height": 64, "width": 64}
CALLS: dict[str, dict[str, int]] = {  # decoders of videos cut pictures of more than 256 px in tiles
    "shapes-sd3": {},
    "qwen-image": {"height": 32, "width": 272},
    **dict.fromkeys(("wan2.1-1.3b", "wan2.1-14b"), {"height": 16, "width": 272, "num_frames": 5}),
}


def names() -> list[str]:
    """Models of configs/model that have a small model here."""
    return [name for name in options("model") if name in {*SCHEDULERS, "shapes-sd3"}]


def call_of(name: str) -> dict[str, int]:
    """Height, width and frames that a model is called with."""
    return CALLS.get(name, PICTURE)


def save(name: str, folder: Path) -> Path:
    """The small model of a name of configs/model as a folder in diffusers layout, fp32."""
    target = folder / name
    if not (target / "model_index.json").is_file():
        with quiet(), torch.random.fork_rng():
            torch.manual_seed(0)
            made = _embedded() if name == "shapes-sd3" else _assembled(name)
            made.save_pretrained(target)
    return target


def _embedded() -> Any:
    """The embedded pipeline with a wider denoiser, untrained, and smaller tiles."""
    from diffusers import AutoencoderKL, SD3Transformer2DModel

    from flowrl.shapes import build

    tok = build.tokenizer()
    wider = {"num_layers": 2, "num_attention_heads": 8, "caption_projection_dim": 256}
    parts = {
        "transformer": SD3Transformer2DModel.from_config({**build.transformer().config, **wider}),
        "vae": AutoencoderKL.from_config({**build.vae().config, "sample_size": 32}),
        **{key: build.text_encoder(tok) for key in ("text_encoder", "text_encoder_2")},
    }
    return build.pipeline(_redrawn(parts), tok)


def _assembled(name: str) -> Any:
    import diffusers

    architecture = published_of(name)
    kind, settings = SCHEDULERS[name]
    given: dict[str, Any] = {"scheduler": getattr(diffusers, kind)(**settings)}
    parts: dict[str, nn.Module] = {}
    for part, published in architecture.parts.items():
        cls = str(published["_class_name"])
        if part == "safety_checker":
            given |= _safety()
            continue
        if part.startswith("text_encoder"):
            tok = _tokenizer(cls)
            given[part.replace("text_encoder", "tokenizer")] = tok
            parts[part] = _encoder(cls, published, tok)
            continue
        small = replace(architecture, parts={part: config_of(name, part)})
        parts[part] = small.build(part, torch.float32, "cpu")
    return getattr(diffusers, architecture.pipeline)(**given, **_redrawn(parts))


@cache
def published_of(name: str) -> Architecture:
    """The real model's numbers."""
    return read(name)


def sizes_of(name: str, part: str) -> dict[str, Any]:
    """What of a component's published config is to be another; nested as that is."""
    if part == "unet":
        return UNETS[name]
    cls = str(published_of(name).parts[part]["_class_name"])
    return {**SIZES[cls], **LARGER} if (name, part) == ("wan2.1-14b", "transformer") else SIZES[cls]


def config_of(name: str, part: str) -> dict[str, Any]:
    """A component's published config with other sizes."""
    return {**published_of(name).parts[part], **sizes_of(name, part)}


def _tokenizer(cls: str) -> Any:
    """A word-level tokenizer with the special tokens and the longest text of an encoder's own."""
    return tokenizer(*next(kind for key, kind in TOKENIZERS.items() if cls.startswith(key)))


def _encoder(cls: str, published: Mapping[str, Any], tok: Any) -> nn.Module:
    """A text encoder with the vocabulary of a tokenizer."""
    import transformers

    made = getattr(transformers, cls)
    own = {key: value for key, value in published.items() if not key.startswith("_")}
    vocabulary = {"vocab_size": len(tok)}
    if cls.startswith("Qwen"):
        tokens = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
        own["text_config"] = {**own["text_config"], **QWEN_TEXT, **vocabulary, **tokens}
        own["vision_config"] = {**own["vision_config"], **QWEN_VISION}
    elif cls.startswith("CLIP"):
        tokens = {"bos_token_id": tok.bos_token_id, "eos_token_id": tok.eos_token_id}
        own |= {**SIZES[cls], **vocabulary, **tokens, "pad_token_id": 1}
    else:
        own |= {**SIZES[cls], **vocabulary}
    return made(made.config_class(**own))


def _safety() -> dict[str, Any]:
    """SD1.5's safety checker and what it reads pictures with."""
    from diffusers.pipelines.stable_diffusion import StableDiffusionSafetyChecker
    from transformers import CLIPConfig, CLIPImageProcessor

    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "patch_size": 14,
    }
    config = CLIPConfig(vision_config=vision, projection_dim=32)
    return {
        "safety_checker": StableDiffusionSafetyChecker(config).eval(),
        "feature_extractor": CLIPImageProcessor(),
    }


def _redrawn(parts: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Networks with all their weights redrawn: fresh ones have gates and outputs of zero."""
    generator = torch.Generator().manual_seed(0)
    for name, part in sorted(parts.items()):
        for module in part.modules():
            for key, p in module.named_parameters(recurse=False):
                p.data = _values(p, key, module, generator) * (0.7 if name == "vae" else 1.0)
        part.eval().requires_grad_(False)
    return dict(parts)


def _values(p: nn.Parameter, key: str, module: nn.Module, generator: torch.Generator) -> Tensor:
    """Matrices with variance 1 / fan_in, tables of embeddings with variance 1, vectors near one
    (scales) or zero (biases)."""
    noise = torch.randn(p.shape, generator=generator)
    if p.ndim < 2:
        return 0.1 * noise + (1.0 if key == "weight" else 0.0)
    return noise if isinstance(module, nn.Embedding) else noise / math.sqrt(p[0].numel())
