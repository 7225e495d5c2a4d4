"""Tiny CLIPs in the file layouts of the hub's: two layers, random weights, the real vocabulary."""

import json
from pathlib import Path

import torch
import transformers
from PIL import Image
from safetensors.torch import save_file

PROMPTS = ["a cat", "a dog", "two red circles", "a blue square"]
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 49408,
    "max_position_embeddings": 77,
    "bos_token_id": 49406,
    "eos_token_id": 49407,
}


def open_clip_name(folder: Path) -> str:
    """Registers an open_clip architecture with 32 x 32 inputs -> its name."""
    import open_clip

    vision = {"image_size": 32, "layers": 2, "width": 64, "patch_size": 8, "head_width": 32}
    text = {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2}
    (folder / "flowrl-tiny.json").write_text(
        json.dumps({"embed_dim": 32, "vision_cfg": vision, "text_cfg": text})
    )
    open_clip.add_model_config(folder)
    return "flowrl-tiny"


def clip_folder(folder: Path, *, eos: int = 49407, seed: int = 0) -> Path:
    """A CLIP as openai/clip-vit-large-patch14 is stored: config.json, model.safetensors (with the
    position_ids of its day), vocabulary.

    eos: the text configuration's eos_token_id; 2 in OpenAI's own files, which tells transformers to
    pool at the highest token.
    """
    torch.manual_seed(seed)
    config = transformers.CLIPConfig(
        text_config=TEXT | {"eos_token_id": eos, "projection_dim": 24},
        vision_config=VISION | {"projection_dim": 24},
        projection_dim=24,
        logit_scale_init_value=4.6052,
    )
    model = randomized(transformers.CLIPModel(config))
    old = {
        "text_model.embeddings.position_ids": torch.arange(77)[None],
        "vision_model.embeddings.position_ids": torch.arange(17)[None],
    }
    config.architectures = ["CLIPModel"]
    config.save_pretrained(folder)
    save_file(
        {k: v.contiguous() for k, v in model.state_dict().items()} | old,
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    vocabulary(folder)
    return folder


def siglip_folder(folder: Path) -> Path:
    """A SigLIP as google/siglip-so400m-patch14-384 is stored, both towers, under the names of its
    files."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    text = sizes | {
        "vocab_size": 64,
        "max_position_embeddings": 16,
        "bos_token_id": 1,
        "eos_token_id": 1,
    }
    config = transformers.SiglipConfig(
        vision_config=sizes | {"image_size": 28, "patch_size": 14}, text_config=text
    )
    randomized(transformers.SiglipModel(config)).save_pretrained(folder)
    return folder


def vocabulary(folder: Path) -> None:
    """CLIP's byte pairs, out of open_clip's wheel, as vocab.json and merges.txt."""
    from open_clip.tokenizer import SimpleTokenizer

    own = SimpleTokenizer()
    named = {"<start_of_text>": "<|startoftext|>", "<end_of_text>": "<|endoftext|>"}
    (folder / "vocab.json").write_text(
        json.dumps({named.get(word, word): i for word, i in own.encoder.items()})
    )
    merges = sorted(own.bpe_ranks, key=own.bpe_ranks.__getitem__)
    (folder / "merges.txt").write_text(
        "\n".join(["#version: 0.2", *(" ".join(pair) for pair in merges)]) + "\n"
    )
    settings = {
        "tokenizer_class": "CLIPTokenizer",
        "model_max_length": 77,
        "pad_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
        "bos_token": "<|startoftext|>",
        "eos_token": "<|endoftext|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def randomized(module: torch.nn.Module) -> torch.nn.Module:
    """Weights large enough that pictures and prompts matter; the temperature stays."""
    for name, p in module.named_parameters():
        if name not in ("logit_scale", "logit_bias"):
            norm = "norm" in name and p.ndim == 1 and name.endswith("weight")
            p.data = torch.randn_like(p) * (0.3 if p.ndim > 1 else 0.1) + norm
    return module.eval().requires_grad_(False)


def pil(media: torch.Tensor) -> list[Image.Image]:
    return [Image.fromarray((m * 255).round().byte().permute(1, 2, 0).numpy()) for m in media]


def processor(kind: str, side: int):
    """transformers' own picture processor (PIL's resize) of kind "clip" or "siglip"."""
    try:
        if kind == "clip":
            from transformers.models.clip.image_processing_pil_clip import (
                CLIPImageProcessorPil as Processor,
            )
        else:
            from transformers.models.siglip.image_processing_pil_siglip import (
                SiglipImageProcessorPil as Processor,
            )
    except ImportError:  # transformers 4: the plain name is PIL's
        from transformers import CLIPImageProcessor, SiglipImageProcessor

        Processor = CLIPImageProcessor if kind == "clip" else SiglipImageProcessor
    if kind == "clip":
        return Processor(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
    return Processor(size={"height": side, "width": side})


def photo() -> torch.Tensor:
    """A photograph, (1, 3, 600, 512) in [0, 1]: matplotlib's sample of Grace Hopper."""
    import matplotlib
    from torchvision.transforms.functional import to_tensor

    with Image.open(Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg") as image:
        return to_tensor(image.convert("RGB"))[None]
