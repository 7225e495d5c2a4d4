"""Networks, encoders and tokenizers of the pipelines of unets.py."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers
from tiny_parts import TOWER, randomise, tokenizer
from torch import nn

# ---------------------------------------------------------------------------
# text


def glm_tokenizer():
    """ChatGLM's ways: padding on the left, a position for every token."""
    import torch

    class GlmTokenizer(transformers.PreTrainedTokenizerFast):
        def __call__(self, *args: Any, **kwargs: Any):
            out = super().__call__(*args, **kwargs)
            if isinstance(seen := out["attention_mask"], torch.Tensor):
                out["position_ids"] = (seen.cumsum(-1) - 1).clamp(min=0)
            return out

    return GlmTokenizer(
        tokenizer_object=tokenizer("t5").backend_tokenizer,
        padding_side="left",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
    )


def glm_text(tok, seed: int = 51) -> nn.Module:
    """Kolors' ChatGLM."""
    from diffusers.pipelines.kolors.text_encoder import ChatGLMConfig, ChatGLMModel

    config = ChatGLMConfig(
        num_layers=2,
        padded_vocab_size=len(tok),
        hidden_size=16,
        ffn_hidden_size=32,
        kv_channels=8,
        num_attention_heads=2,
        seq_length=32,
        original_rope=True,
    )
    return randomise(ChatGLMModel(config, empty_init=False).float(), seed)


def bert_text(tok, seed: int = 52) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=len(tok),
        **TOWER,
        max_position_embeddings=tok.model_max_length,
    )
    return randomise(transformers.BertModel(config), seed)


# ---------------------------------------------------------------------------
# pictures


def clip_eyes(seed: int = 53) -> nn.Module:
    """A CLIP that sees pictures of 224 pixels as 64 patches."""
    config = transformers.CLIPVisionConfig(
        **TOWER,
        projection_dim=16,
        image_size=224,
        patch_size=28,
    )
    return randomise(transformers.CLIPVisionModelWithProjection(config), seed)


def svd_vae(seed: int = 54) -> nn.Module:
    """A VAE whose decoder mixes frames."""
    net = diffusers.AutoencoderKLTemporalDecoder(
        down_block_types=("DownEncoderBlock2D",) * 2,
        block_out_channels=(32, 32),
        latent_channels=4,
        sample_size=16,
        scaling_factor=0.5,
        force_upcast=False,
    )
    return randomise(net, seed, 0.7)


def svd_unet(seed: int = 55) -> nn.Module:
    net = diffusers.UNetSpatioTemporalConditionModel(
        sample_size=8,
        in_channels=8,
        out_channels=4,
        block_out_channels=(32, 32),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=24,
        cross_attention_dim=16,
        num_attention_heads=2,
        num_frames=4,
    )
    return randomise(net, seed)


def dc_vae(seed: int = 56) -> nn.Module:
    """Sana's autoencoder, four times smaller."""
    net = diffusers.AutoencoderDC(
        latent_channels=4,
        attention_head_dim=8,
        encoder_block_out_channels=(8, 16, 16),
        decoder_block_out_channels=(8, 16, 16),
        encoder_layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1),
        encoder_qkv_multiscales=((), (), ()),
        decoder_qkv_multiscales=((), (), ()),
        scaling_factor=0.6,
    )
    return randomise(net, seed, 0.5)


def allegro_vae(seed: int = 57) -> nn.Module:
    """Four times smaller in space and time; it works in tiles only, here one of 8 x 16 x 16."""
    net = diffusers.AutoencoderKLAllegro(
        down_block_types=("AllegroDownBlock3D",) * 3,
        up_block_types=("AllegroUpBlock3D",) * 3,
        block_out_channels=(8, 8, 8),
        temporal_downsample_blocks=(True, True, False),
        temporal_upsample_blocks=(False, True, True),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
        scaling_factor=0.6,
    )
    net.enable_slicing()
    net.enable_tiling()
    net.kernel = net.stride = (8, 16, 16)
    return randomise(net, seed, 0.7)
