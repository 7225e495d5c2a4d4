"""Parts that the rewards of CLIP's family share: a picture and a text tower behind one interface,
and heads that are affine maps.

A picture's embedding does not depend on its batch mates, nor does a prompt's: prompts are always
padded to the full context.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.rewards.core import weights
from flowrl.rewards.core.pictures import frames_of, in_chunks, refuse_gradient
from flowrl.rewards.core.reward import Reward
from flowrl.rewards.core.tokens import warn_cut
from flowrl.types import MediaContext

logger = logging.getLogger("flowrl")


class OpenClip(nn.Module):
    """The towers of an open_clip model.

    side: pixels of a picture that it takes, (height, width); limit: most tokens of a prompt.
    """

    def __init__(self, model: nn.Module, tokenizer: Any):
        super().__init__()
        self.model, self.tokenizer = model.eval().requires_grad_(False), tokenizer
        side = model.visual.image_size
        self.side = (side, side) if isinstance(side, int) else tuple(side)
        self.limit = tokenizer.context_length

    def image(self, pixels: Tensor) -> Tensor:
        """(n, 3, height, width) normalised pixels -> (n, d) of unit length."""
        return self.model.encode_image(pixels, normalize=True)

    def text(self, prompts: list[str], device: torch.device | str) -> Tensor:
        """m prompts -> (m, d) of unit length."""
        return self.model.encode_text(self.tokenizer(prompts).to(device), normalize=True)

    def lengths(self, prompts: list[str]) -> list[int]:
        """Tokens of each prompt, with those at its ends, before anything is cut."""
        if hasattr(self.tokenizer, "encode"):
            return [len(self.tokenizer.encode(prompt)) + 2 for prompt in prompts]
        return [len(ids) for ids in self.tokenizer.tokenizer(prompts, verbose=False)["input_ids"]]


class HubClip(nn.Module):
    """The towers of a CLIP of transformers, from a folder or by a hub's name.

    Its tokenizer comes from the same place or from another.
    """

    def __init__(
        self, source: str, *, reward: str, setting: str = "weights", tokenizer: str | None = None
    ):
        super().__init__()
        from transformers import CLIPModel, CLIPTokenizer

        self.model = weights.network(CLIPModel, source, reward=reward, setting=setting)
        place, named = (source, setting) if tokenizer is None else (tokenizer, "tokenizer")
        self.tokenizer = weights.tokenizer(CLIPTokenizer, place, reward=reward, setting=named)
        config = self.model.config
        if len(self.tokenizer) != config.text_config.vocab_size:
            count = f"{len(self.tokenizer)} tokens, and the network {config.text_config.vocab_size}"
            raise ValueError(
                f"reward.{reward}.{named}={place} has {count}; give the network's own tokenizer"
            )
        self.side = (config.vision_config.image_size,) * 2
        self.limit = config.text_config.max_position_embeddings

    def image(self, pixels: Tensor) -> Tensor:
        """(n, 3, height, width) normalised pixels -> (n, d) of unit length."""
        found = self.model.get_image_features(pixel_values=pixels)
        return nn.functional.normalize(_embedding(found), dim=-1)

    def text(self, prompts: list[str], device: torch.device | str) -> Tensor:
        """m prompts -> (m, d) of unit length."""
        full = {"padding": "max_length", "truncation": True, "max_length": self.limit}
        tokens = self.tokenizer(prompts, return_tensors="pt", **full)
        found = self.model.get_text_features(**tokens.to(device))
        return nn.functional.normalize(_embedding(found), dim=-1)

    def lengths(self, prompts: list[str]) -> list[int]:
        """Tokens of each prompt, with those at its ends, before anything is cut."""
        return [len(ids) for ids in self.tokenizer(prompts, verbose=False)["input_ids"]]


def _embedding(out: Any) -> Tensor:
    """The projected embedding: transformers 4 returns it, 5 an output that holds it."""
    return out if isinstance(out, Tensor) else out.pooler_output


class TwoTowers(Reward):
    """A function of the cosine between picture and prompt; for a video, the mean over its frames.

    Subclasses set `towers`.
    """

    reads_prompt = True
    towers: OpenClip | HubClip
    prefix: str = ""  # text that is put before every prompt
    remedy: str = "rounding=False"  # settings that let the gradient through

    def __call__(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> Tensor:
        refuse_gradient(self, media, self.remedy)
        image, text = self.pictures(frames_of(media)), self.prompts(prompts, media.device)
        cosine = (image.view(len(media), -1, image.shape[-1]) * text[:, None]).sum(-1)  # (B, F)
        return self.value(cosine).mean(1).float()

    def expect(self, prompts: Sequence[str]) -> None:
        self._warn_cut([self.prefix + prompt for prompt in dict.fromkeys(prompts)], known=True)

    def pictures(self, frames: Tensor) -> Tensor:
        """(n, 3, H, W) in [0, 1] -> (n, d) of unit length."""
        chunk = self.settings.chunk
        return in_chunks(lambda part: self.towers.image(self.pixels(part)), frames, chunk=chunk)

    def prompts(self, prompts: Sequence[str], device: torch.device | str) -> Tensor:
        """n texts -> (n, d) of unit length; equal ones are embedded once."""
        place = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
        texts = [self.prefix + prompt for prompt in place]
        self._warn_cut(texts)
        chunk = self.settings.chunk
        out = in_chunks(lambda part: self.towers.text(part, device), texts, chunk=chunk)
        return out[[place[prompt] for prompt in prompts]]

    def _warn_cut(self, texts: list[str], *, known: bool = False) -> None:
        warn_cut(self.name, self.towers.lengths(texts), self.towers.limit, known=known)

    def pixels(self, frames: Tensor) -> Tensor:
        """(n, 3, H, W) in [0, 1] -> the network's normalised input."""
        raise NotImplementedError(f"{type(self).__name__} does not define pixels")

    def value(self, cosine: Tensor) -> Tensor:
        """Cosines -> scores, element by element."""
        return cosine


def linears(width: int, places: Sequence[int]) -> nn.Sequential:
    """The head width -> 1024 -> 128 -> 64 -> 16 -> 1 that three rewards have, without activations.

    places: names of its layers in a checkpoint, between which dropouts stood.
    """
    sizes = (width, 1024, 128, 64, 16, 1)
    layers = nn.Sequential()
    for place, ends in zip(places, pairwise(sizes), strict=True):
        layers.add_module(str(place), nn.Linear(*ends))
    return layers


def affine(head: nn.Module, width: int) -> nn.Linear:
    """Collapse a head of linear layers into one affine map, in fp64: (n, width) -> (n, 1).

    The map is frozen.
    """
    head = head.double()
    with torch.no_grad():
        origin = head(torch.zeros(1, width, dtype=torch.float64))
        slope = head(torch.eye(width, dtype=torch.float64)) - origin
        out = nn.Linear(width, 1)
        out.weight.copy_(slope.T)
        out.bias.copy_(origin[0])
    return out.eval().requires_grad_(False)


def probe(head: nn.Linear) -> list[float]:
    """Outputs of a head for three fixed unit vectors: all components equal, the same with signs
    that alternate from +, and the first axis."""
    width = head.in_features
    level = torch.full((width,), width**-0.5)
    alternating = level * (1 - 2 * (torch.arange(width) % 2))
    first = torch.zeros(width)
    first[0] = 1.0
    with torch.no_grad():
        return head(torch.stack([level, alternating, first]))[:, 0].tolist()


def warn_unpublished(
    reward: str, head: nn.Linear, published: tuple[float, ...], source: object
) -> None:
    """Warn where a head is not the published one: its scores are on a scale of their own."""
    found = probe(head)
    if any(abs(got - known) > 1e-4 for got, known in zip(found, published, strict=True)):
        own, known = (", ".join(f"{v:.4f}" for v in values) for values in (found, published))
        logger.warning(
            f"{reward}: {source} is not the published head (three fixed inputs give {own};"
            f" published: {known}); its scores do not compare with published ones"
        )
