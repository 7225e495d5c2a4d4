"""BLIP's two towers (arXiv:2201.12086, github.com/salesforce/BLIP: models/vit.py, models/med.py)
from transformers' classes.

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

# dims of an attention head in both published picture towers: base 768 = 12 x 64, large 1024 = 16 x
# 64
HEAD = 64
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
        """state: the checkpoint in BLIP's names, read for the picture tower's sizes. med_config:
        BLIP's med_config.json, for the text's."""
        super().__init__()
        from transformers import BlipTextConfig, BlipVisionConfig, BlipVisionModel
        from transformers.models.blip.modeling_blip_text import BlipTextModel

        width, patch = state["visual_encoder.patch_embed.proj.weight"].shape[::3]
        self.side = (
            isqrt(state["visual_encoder.pos_embed"].shape[1] - 1) * patch
        )  # pixels of a picture: 224
        self.vision = BlipVisionModel(
            BlipVisionConfig(
                hidden_size=width,
                intermediate_size=state["visual_encoder.blocks.0.mlp.fc1.weight"].shape[0],
                num_hidden_layers=1
                + max(
                    int(found[1])
                    for key in state
                    if (found := re.match(r"visual_encoder\.blocks\.(\d+)\.", key))
                ),
                num_attention_heads=width // HEAD,
                image_size=self.side,
                patch_size=patch,
                hidden_act="gelu",
                layer_norm_eps=1e-6,
            )
        )
        taken = (
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
        # is_decoder builds the cross attention; the call below still lets every token see every
        # other
        sizes = {key: med_config[key] for key in taken}
        self.text = BlipTextModel(
            BlipTextConfig(**sizes, encoder_hidden_size=width, is_decoder=True),
            add_pooling_layer=False,
        )

    def forward(self, pixels: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        """pixels (n, 3, side, side), normalised; ids, mask (n, L), mask 0 at padding -> hidden
        states of the text (n, L, width)."""
        picture = self.vision(pixel_values=pixels).last_hidden_state
        return self.text(
            input_ids=ids, attention_mask=mask, encoder_hidden_states=picture
        ).last_hidden_state


def renamed(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """BLIP's state dict in the names of Blip; what has no place in it keeps its name."""
    out = {}
    for key, value in state.items():
        for pattern, name in NAMES:
            key = re.sub(pattern, name, key)
        out[key] = value
    return out
