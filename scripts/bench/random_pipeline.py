"""Pipelines with random weights: the real architectures, without a hub and without a download.

Networks, VAE and text encoders have the numbers of configs/architecture and are made where they
compute, in the type that they compute in. Tokenizers are files of their own; here a token is a
letter. What such a pipeline costs is what the trained one costs; what it makes is noise.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from typing import Any

import torch
from transformers import BatchEncoding

from flowrl.runtime.log import quiet
from flowrl.training.budget.architecture import Architecture, read

SCHEDULERS: dict[str, tuple[str, dict[str, Any]]] = {
    "StableDiffusion3Pipeline": ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}),
    "FluxPipeline": ("FlowMatchEulerDiscreteScheduler", {"use_dynamic_shifting": True}),
    "QwenImagePipeline": ("FlowMatchEulerDiscreteScheduler", {"use_dynamic_shifting": True}),
    "WanPipeline": (
        "UniPCMultistepScheduler",
        {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0},
    ),
    "StableDiffusionPipeline": (
        "DDIMScheduler",
        {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012},
    ),
    "StableDiffusionXLPipeline": (
        "EulerDiscreteScheduler",
        {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012},
    ),
}
EMBEDDED = ("shapes-sd3", "middle")
LONGEST = 512  # tokens of encoders that name no length of their own


class Letters:
    """A tokenizer that needs no files: a letter is a token, the last one ends the text."""

    def __init__(self, vocabulary: int, length: int) -> None:
        self.vocabulary, self.model_max_length = vocabulary, length
        self.added_tokens_encoder: dict[str, int] = {}  # words that a prompt may have learned

    def __call__(
        self,
        text: str | list[str],
        padding: Any = None,
        max_length: int | None = None,
        **unused: Any,
    ) -> BatchEncoding:
        """input_ids, attention_mask (n, length) int64; padding "max_length": to that, else to the
        longest text."""
        most, end = max_length or self.model_max_length, self.vocabulary - 1
        rows = [
            [1 + ord(letter) % (end - 1) for letter in one[: most - 1]] + [end]
            for one in ([text] if isinstance(text, str) else text)
        ]
        length = most if padding == "max_length" else max(map(len, rows))
        padded = [row + [end] * (length - len(row)) for row in rows]
        mask = [[1] * len(row) + [0] * (length - len(row)) for row in rows]
        return BatchEncoding(
            {"input_ids": torch.tensor(padded), "attention_mask": torch.tensor(mask)}
        )

    def tokenize(self, text: str) -> list[str]:
        """What is asked for by pipelines that look for learned words in a prompt."""
        return list(text)

    def batch_decode(self, ids: torch.Tensor) -> list[str]:
        return ["" for _ in ids]


def names() -> list[str]:
    """Architectures that can be built: those of configs/architecture whose pipeline has a scheduler
    above and no settings of its own, and two small ones."""
    files = (resources.files("flowrl.configs") / "architecture").iterdir()
    listed = sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith("yaml"))
    found = [name for name in listed if read(name).pipeline in SCHEDULERS]
    return [*EMBEDDED, *(name for name in found if name != "wan2.2-ti2v-5b")]


def named(word: str) -> str:
    """The architecture that a word means: dots and dashes may be left out."""

    def plain(name: str) -> str:
        return name.lower().replace(".", "").replace("-", "")

    for name in names():
        if plain(name) == plain(word):
            return name
    raise SystemExit(f"--arch {word} is not known; there are {', '.join(names())}")


def build(name: str, device: torch.device, dtype: torch.dtype) -> Any:
    """The pipeline of an architecture on a device, in eval mode, with the same weights each time.

    shapes-sd3 is the embedded one without its training; middle an SD3 of 8 blocks and width 384.
    """
    with torch.random.fork_rng(), quiet():
        torch.manual_seed(0)
        if name in EMBEDDED:
            pipe = _small(name)
            pipe.to(device, dtype)
        else:
            pipe = _assembled(read(name), device, dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _small(name: str) -> Any:
    """The embedded world's pipeline, untrained, with its own denoiser or the larger one."""
    from diffusers import SD3Transformer2DModel

    from flowrl.shapes import build as shapes

    tok = shapes.tokenizer()
    transformer = shapes.transformer()
    if name == "middle":
        larger = {"num_layers": 8, "attention_head_dim": 64, "num_attention_heads": 6}
        larger |= {"caption_projection_dim": 384, "sample_size": 32, "pos_embed_max_size": 32}
        transformer = SD3Transformer2DModel.from_config({**transformer.config, **larger})
    parts = {"vae": shapes.vae(), "transformer": transformer}
    encoders = {key: shapes.text_encoder(tok) for key in ("text_encoder", "text_encoder_2")}
    return shapes.pipeline({**parts, **encoders}, tok)


def _assembled(architecture: Architecture, device: torch.device, dtype: torch.dtype) -> Any:
    """A pipeline of published numbers."""
    import diffusers

    scheduler, options = SCHEDULERS[architecture.pipeline]
    with _default(dtype):
        given: dict[str, Any] = {
            part: architecture.build(part, dtype, device)
            for part in architecture.parts
            if part != "safety_checker"
        }
    given["scheduler"] = getattr(diffusers, scheduler)(**options)
    cls = getattr(diffusers, architecture.pipeline)
    for key, parameter in inspect.signature(cls.__init__).parameters.items():
        encoder = key.replace("tokenizer", "text_encoder")
        if key.startswith("tokenizer"):
            given[key] = _letters(architecture, encoder) if encoder in given else None
        elif key not in given and parameter.default is parameter.empty and key != "self":
            given[key] = None  # a safety checker, a feature extractor
    if "safety_checker" in given:
        given["requires_safety_checker"] = False
    return cls(**given)


def _letters(architecture: Architecture, encoder: str) -> Letters:
    """The tokenizer of a text encoder."""
    config = architecture.config(encoder)
    config |= config.get("text_config") or {}
    length = config.get("max_position_embeddings") or LONGEST
    return Letters(int(config["vocab_size"]), min(int(length), LONGEST))


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    """New weights have this type inside."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
