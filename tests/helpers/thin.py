"""Real architectures with few layers, or with few of everything."""

LAYERS = ("num_layers", "num_single_layers", "num_hidden_layers")


def fewer(config):
    """What of a network's config is to be another: the last block of some has fewer layers, so that
    two are the least."""
    thin = {name: 2 for name in LAYERS if name in config}
    if "dual_attention_layers" in config:
        thin["dual_attention_layers"] = [0]
    if "cross_attention_dim" in config:  # a UNet
        thin["layers_per_block"] = 1
    if "transformer_layers_per_block" in config:
        thin["transformer_layers_per_block"] = [1, 1, 1]
    if "text_config" in config:
        thin["text_config"] = {**config["text_config"], "num_hidden_layers": 1}
    return thin


CLIP = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "projection_dim": 32,
}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
VAE = {"block_out_channels": [32, 32, 32, 32], "layers_per_block": 1}
VIDEO_VAE = {"base_dim": 8, "num_res_blocks": 1}
WAN = {
    "transformer": {"num_layers": 2, "num_attention_heads": 1, "text_dim": 32, "ffn_dim": 64},
    "vae": VIDEO_VAE,
    "text_encoder": T5,
}
NARROW = {  # name of configs/architecture -> component -> its changes; vocabularies stay
    "sd1.5": {
        "unet": {
            "block_out_channels": [32, 32, 64, 64],
            "layers_per_block": 1,
            "cross_attention_dim": 32,
        },
        "vae": VAE,
        "text_encoder": CLIP,
    },
    "sdxl": {
        "unet": {
            "block_out_channels": [32, 32, 64],
            "layers_per_block": 1,
            "cross_attention_dim": 64,
            "transformer_layers_per_block": [1, 1, 1],
            "attention_head_dim": [2, 4, 8],
            "projection_class_embeddings_input_dim": 6 * 256 + 32,
        },
        "vae": VAE,
        "text_encoder": CLIP,
        "text_encoder_2": CLIP,
    },
    "sd3.5-medium": {
        "transformer": {
            "num_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 4,
            "joint_attention_dim": 64,
            "caption_projection_dim": 32,
            "pooled_projection_dim": 64,
            "dual_attention_layers": [0],
        },
        "vae": VAE,
        "text_encoder": CLIP,
        "text_encoder_2": CLIP,
        "text_encoder_3": {**T5, "d_model": 64},
    },
    "flux.1-dev": {
        "transformer": {
            "num_layers": 1,
            "num_single_layers": 1,
            "num_attention_heads": 2,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 32,
        },
        "vae": VAE,
        "text_encoder": CLIP,
        "text_encoder_2": T5,
    },
    "qwen-image": {
        "transformer": {"num_layers": 1, "num_attention_heads": 1, "joint_attention_dim": 128},
        "vae": VIDEO_VAE,
        "text_encoder": {
            "text_config": {
                "hidden_size": 128,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 1,
                "num_key_value_heads": 1,
                "vocab_size": 152064,
            },
            "vision_config": {
                "depth": 1,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_heads": 2,
                "out_hidden_size": 128,
            },
        },
    },
    "wan2.1-1.3b": WAN,
    "wan2.1-14b": WAN,
}
