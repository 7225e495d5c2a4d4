"""Real architectures with few layers."""

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
