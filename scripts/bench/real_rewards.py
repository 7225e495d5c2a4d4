"""Rewards of real_size.py: networks of the published sizes with random weights, in the published
layouts. NAME -> a function of a folder that writes the files and returns the reward's settings."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from real_folder import SHARP, quick_weights
from real_tokenizers import clip as clip_tokenizer
from real_tokenizers import words

TOWERS = {  # width, layers and heads of picture and text, and of what they share
    "ViT-L-14": {"vision": (1024, 24, 16), "text": (768, 12, 12), "shared": 768},
    "ViT-H-14": {"vision": (1280, 32, 16), "text": (1024, 24, 16), "shared": 1024},
}
BERT = 30_522  # tokens; BLIP adds two
MED_CONFIG = {
    "vocab_size": BERT + 2,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}
BLIP = (  # names of flowrl's Blip and of BLIP's checkpoints
    ("blip.vision.embeddings.class_embedding", "blip.visual_encoder.cls_token"),
    ("blip.vision.embeddings.position_embedding", "blip.visual_encoder.pos_embed"),
    ("blip.vision.embeddings.patch_embedding.", "blip.visual_encoder.patch_embed.proj."),
    ("blip.vision.post_layernorm.", "blip.visual_encoder.norm."),
    ("blip.vision.encoder.layers.", "blip.visual_encoder.blocks."),
    (".self_attn.qkv.", ".attn.qkv."),
    (".self_attn.projection.", ".attn.proj."),
    (".layer_norm", ".norm"),
    ("blip.text.", "blip.text_encoder."),
)


def clip_folder(name: str, folder: Path) -> Path:
    """A CLIP as transformers stores it, with its tokenizer."""
    from transformers import CLIPConfig, CLIPModel

    sizes = TOWERS[name]
    towers = {
        tower: {
            "hidden_size": width,
            "intermediate_size": 4 * width,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "projection_dim": sizes["shared"],
        }
        for tower, (width, layers, heads) in ((t, sizes[t]) for t in ("vision", "text"))
    }
    config = CLIPConfig(
        vision_config={**towers["vision"], "patch_size": 14, "image_size": 224},
        text_config={**towers["text"], "bos_token_id": 49406, "eos_token_id": 49407},
        projection_dim=sizes["shared"],
    )
    with quick_weights(torch.float32):
        CLIPModel(config).save_pretrained(folder)
    clip_tokenizer(pad="<|endoftext|>").save_pretrained(folder)
    return folder


def clip(folder: Path) -> list[str]:
    return ["preset=nft", f"pretrained={clip_folder('ViT-L-14', folder)}"]


def pickscore(folder: Path) -> list[str]:
    place = clip_folder("ViT-H-14", folder)
    return [f"weights={place}", f"tokenizer={place}"]


def hpsv2(folder: Path) -> list[str]:
    import open_clip

    file = folder / "HPS_v2.1_compressed.pt"
    with quick_weights(torch.float32):
        network = open_clip.CLIP(**open_clip.get_model_config("ViT-H-14"))
    torch.save({"state_dict": network.state_dict()}, file)
    return [f"weights={file}"]


def aesthetic(folder: Path) -> list[str]:
    from flowrl.rewards.aesthetic import FILES
    from flowrl.rewards.networks.clip import linears

    file = folder / FILES["v2"]
    with quick_weights(torch.float32):
        head = torch.nn.ModuleDict({"layers": linears(768, (0, 2, 4, 6, 7))})
    torch.save(head.state_dict(), file)
    return [f"weights={file}", f"backbone={clip_folder('ViT-L-14', folder / 'clip')}"]


def imagereward(folder: Path) -> list[str]:
    from flowrl.rewards.imagereward import ImageRewardNetwork
    from flowrl.rewards.networks.blip import Blip

    shapes = {  # by which the picture tower's sizes are told
        "patch_embed.proj.weight": (1024, 3, 16, 16),
        "pos_embed": (1, 197, 1024),
        "blocks.0.mlp.fc1.weight": (4096, 1024),
        "blocks.23.norm1.weight": (1024,),
    }
    known = {
        f"visual_encoder.{k}": torch.empty(shape, device="meta") for k, shape in shapes.items()
    }
    with quick_weights(torch.float32):
        network = ImageRewardNetwork(Blip(known, MED_CONFIG))
    with torch.no_grad():  # untrained, a text looks at its picture so little that fp32 hides it
        for name, weight in network.named_parameters():
            if weight.ndim > 1 and ("crossattention" in name or name.startswith("layers.")):
                weight.mul_(SHARP)
    torch.save(
        {_published(k): v for k, v in network.state_dict().items()}, folder / "ImageReward.pt"
    )
    (folder / "med_config.json").write_text(json.dumps(MED_CONFIG))
    letters = [chr(place) for place in range(33, 127)]
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{c}" for c in letters)]
    whole = dict.fromkeys(word.lower() for word in words() if len(word) > 1)
    (folder / "vocab.txt").write_text("\n".join([*tokens, *whole][:BERT]) + "\n")
    return [f"weights={folder}", f"vocab={folder}"]


def _published(key: str) -> str:
    """The name in ImageReward.pt of a weight of flowrl's network."""
    for own, published in BLIP:
        key = key.replace(own, published)
    return f"mlp.{key}" if key.startswith("layers.") else key


REWARDS: dict[str, Callable[[Path], list[str]]] = {
    "clip": clip,
    "pickscore": pickscore,
    "hpsv2": hpsv2,
    "aesthetic": aesthetic,
    "imagereward": imagereward,
}


def pictures(folder: Path, count: int = 8) -> list[Any]:
    """Pictures that differ, 256 pixels wide, as files."""
    from torchvision.transforms.functional import to_pil_image

    places = []
    for number in range(count):
        coarse = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(number))
        places.append(folder / f"{number}.png")
        to_pil_image(torch.nn.functional.interpolate(coarse, (256, 256))[0]).save(places[-1])
    return places
