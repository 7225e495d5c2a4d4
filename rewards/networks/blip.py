"""BLIP's two towers (arXiv:2201.12086) from transformers' classes.

Source: github.com/salesforce/BLIP, models/vit.py and models/med.py.

Checkpoints trained with that code differ from transformers' in names and in two defaults only:
LayerNorm of the picture tower has epsilon 1e-6 there, and masked tokens get -10000 before the
softmax, minus infinity here; both are 0 after it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isqrt
from typing import Any

from torch import Tensor, nn

# Width of an attention head in both published picture towers: 768 = 12 x 64, 1024 = 16 x 64.
HEAD = 64
# Keys of BLIP's med_config.json that the text tower reads.
TEXT = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "hidden_act",
    "layer_norm_eps",
    "pad_token_id",
)
NAMES = (
    (r"^visual_encoder\.cls_token$", "vision.embeddings.class_embedding"),
    (r"^visual_encoder\.pos_embed$", "vision.embeddings.position_embedding"),
    (r"^visual_encoder\.patch_embed\.proj\.", "vision.embeddings.patch_embedding."),
    (r"^visual_encoder\.norm\.", "vision.post_layernorm."),
    (r"^visual_encoder\.blocks\.(\d+)\.norm(\d)\.", r"vision.encoder.layers.\1.layer_norm\2."),
    (r"^visual_encoder\.blocks\.(\d+)\.attn\.qkv\.", r"vision.encoder.layers.\1.self_attn.qkv."),
    (
        r"^visual_encoder\.blocks\.(\d+)\.attn\.proj\.",
        r"vision.encoder.layers.\1.self_attn.projection.",
    ),
    (r"^visual_encoder\.blocks\.(\d+)\.mlp\.", r"vision.encoder.layers.\1.mlp."),
    (r"^text_encoder\.", "text."),
)


class Blip(nn.Module):
    """Picture tower and the text encoder that attends to its tokens."""

    def __init__(self, state: Mapping[str, Tensor], med_config: Mapping[str, Any]):
        """state: the checkpoint in BLIP's names, which gives the picture tower's sizes. med_config:
        BLIP's med_config.json, which gives the text tower's."""
        super().__init__()
        from transformers import BlipTextConfig, BlipVisionModel
        from transformers.models.blip.modeling_blip_text import BlipTextModel

        config = _vision_config(state)
        self.side = config.image_size  # pixels a side of a picture: 224
        self.vision = BlipVisionModel(config)
        # is_decoder builds the cross attention; every token still sees all others in `forward`
        text = BlipTextConfig(
            **{key: med_config[key] for key in TEXT},
            encoder_hidden_size=config.hidden_size,
            is_decoder=True,
        )
        self.text = BlipTextModel(text, add_pooling_layer=False)

    def forward(self, pixels: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        """Hidden states of the text (n, L, width).

        pixels: (n, 3, side, side), normalised. ids, mask: (n, L), mask 0 at padding.
        """
        picture = self.vision(pixel_values=pixels).last_hidden_state
        read = self.text(input_ids=ids, attention_mask=mask, encoder_hidden_states=picture)
        return read.last_hidden_state


def _vision_config(state: Mapping[str, Tensor]) -> Any:
    """transformers' BlipVisionConfig with the sizes of a checkpoint in BLIP's names."""
    from transformers import BlipVisionConfig

    width, patch = state["visual_encoder.patch_embed.proj.weight"].shape[::3]
    blocks = [re.match(r"visual_encoder\.blocks\.(\d+)\.", key) for key in state]
    return BlipVisionConfig(
        hidden_size=width,
        intermediate_size=state["visual_encoder.blocks.0.mlp.fc1.weight"].shape[0],
        num_hidden_layers=1 + max(int(found[1]) for found in blocks if found),
        num_attention_heads=width // HEAD,
        image_size=isqrt(state["visual_encoder.pos_embed"].shape[1] - 1) * patch,
        patch_size=patch,
        hidden_act="gelu",
        layer_norm_eps=1e-6,
    )


def renamed(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """BLIP's state dict in the names of Blip; keys that it does not have keep their names."""
    out = {}
    for key, value in state.items():
        for pattern, name in NAMES:
            key = re.sub(pattern, name, key)
        out[key] = value
    return out
