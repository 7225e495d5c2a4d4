"""ImageReward (arXiv:2304.05977): BLIP-large's text encoder reads the prompt while it looks at the
picture; a linear head gives the reward.

After github.com/THUDM/ImageReward at 6d863e1, ImageReward/ImageReward.py: [CLS] of the last hidden
state, five linear layers without any activation, then (x - mean) / std with the two constants of
that file. The network is transformers' (see _blip). Differences: the tokenizer is built from
bert-base-uncased's vocab.txt; every key of the checkpoint is checked, where the reference loads
with strict=False; with rounding=False pictures are resized as tensors (antialiased bicubic, about
55 dB from PIL's), so that a gradient passes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pydantic
import torch
from torch import Tensor, nn

from flowrl.rewards.core import weights as core_weights
from flowrl.rewards.core.pictures import (
    cropped,
    frames_of,
    mean_of_frames,
    normalized,
    pil_cropped,
    refuse_gradient,
)
from flowrl.rewards.core.reward import Reward
from flowrl.rewards.core.reward import Settings as Base
from flowrl.rewards.core.tokens import warn_cut
from flowrl.rewards.networks.blip import Blip, renamed
from flowrl.types import MediaContext

TOKENS = 35  # of a prompt, [CLS] and [SEP] among them
MEAN, STD = 0.16717362830052426, 1.0333394966054072  # of the head's output over the training set
UNUSED = (
    "blip.vision_proj.",
    "blip.text_proj.",
    "blip.text.embeddings.position_ids",
)  # BLIP's contrastive heads, and a buffer


class Settings(Base):
    weights: str = pydantic.Field(
        "THUDM/ImageReward",
        description="Folder with ImageReward.pt and med_config.json, or a hub id.",
    )
    vocab: str = pydantic.Field(
        "google-bert/bert-base-uncased",
        description="Folder with bert-base-uncased's vocab.txt, or a hub id.",
    )
    rounding: bool = pydantic.Field(
        True,
        description="Score what a saved PNG would show, by PIL; false lets the gradient through.",
    )
    chunk: int = pydantic.Field(32, ge=1, description="Most pictures in one forward.")


class ImageReward(Reward):
    """Human preference for picture and prompt, z-scored over the training set: about -2.3 to 2; of
    a video, the mean over frames."""

    Settings = Settings
    name = "imagereward"
    scale = "human preference, z-scored over ImageReward's training set: about -2.3 to 2"
    quality = True
    reads_prompt = True

    def __init__(self, settings: Any = None):
        super().__init__(settings)
        from tokenizers import BertWordPieceTokenizer

        s = self.settings
        checkpoint = core_weights.path_of(
            s.weights, "ImageReward.pt", reward="imagereward", beside="med_config.json"
        )
        source = str(checkpoint.parent) if Path(s.weights).expanduser().is_file() else s.weights
        config = core_weights.path_of(
            source, "med_config.json", reward="imagereward", beside="ImageReward.pt"
        )
        self.model = load_network(checkpoint, json.loads(config.read_text()))
        vocab = core_weights.path_of(s.vocab, "vocab.txt", reward="imagereward", setting="vocab")
        self.tokenizer = BertWordPieceTokenizer(str(vocab), lowercase=True)
        self.tokenizer.add_special_tokens(
            ["[DEC]", "[ENC]"]
        )  # BLIP's, read only where a prompt spells them
        self.differentiable = not s.rounding

    def __call__(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> Tensor:
        refuse_gradient(self, media)
        frames, s = frames_of(media), self.settings
        ids, mask = (rows.to(media.device) for rows in self._tokens(prompts))
        owner = torch.arange(len(prompts), device=media.device).repeat_interleave(
            len(frames) // len(prompts)
        )
        values = []
        for part, rows in zip(frames.split(s.chunk), owner.split(s.chunk), strict=True):
            pixels = (
                pil_cropped(part, self.model.blip.side)
                if s.rounding
                else cropped(part, self.model.blip.side)
            )
            values.append(self.model(normalized(pixels), ids[rows], mask[rows]))
        return mean_of_frames(torch.cat(values), media)

    def expect(self, prompts: Sequence[str]) -> None:
        self._encoded(list(dict.fromkeys(prompts)), known=True)

    def _encoded(self, prompts: list[str], *, known: bool = False) -> list[list[int]]:
        """[CLS] prompt [SEP] of each, uncut."""
        found = [encoding.ids for encoding in self.tokenizer.encode_batch(prompts)]
        warn_cut("imagereward", [len(ids) for ids in found], TOKENS, known=known)
        return found

    def _tokens(self, prompts: list[str]) -> tuple[Tensor, Tensor]:
        """ids and mask (B, 35): [CLS] prompt [SEP], cut so that [SEP] stays, padded with [PAD]."""
        found = self._encoded(prompts)
        ids, mask = torch.zeros(2, len(found), TOKENS, dtype=torch.long)  # bert's [PAD] is 0
        for row, tokens in enumerate(found):
            tokens = [*tokens[: TOKENS - 1], tokens[-1]] if len(tokens) > TOKENS else tokens
            ids[row, : len(tokens)], mask[row, : len(tokens)] = torch.tensor(tokens), 1
        return ids, mask


class Network(nn.Module):
    """BLIP and the head 768 -> 1024 -> 128 -> 64 -> 16 -> 1, dropouts between and no activation:
    affine when it scores."""

    def __init__(self, blip: Blip):
        super().__init__()
        self.blip = blip
        sizes = (blip.text.config.hidden_size, 1024, 128, 64, 16, 1)
        linears = [nn.Linear(*pair) for pair in zip(sizes, sizes[1:], strict=False)]
        dropouts = [nn.Dropout(p) for p in (0.2, 0.2, 0.1)]
        first = [module for pair in zip(linears, dropouts, strict=False) for module in pair]
        self.layers = nn.Sequential(*first, *linears[3:])  # linears at 0, 2, 4, 6, 7

    def forward(self, pixels: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        """-> rewards (n,)."""
        return (self.layers(self.blip(pixels, ids, mask)[:, 0])[:, 0] - MEAN) / STD


def load_network(path: Path, med_config: dict[str, Any]) -> Network:
    """ImageReward.pt: keys blip.visual_encoder.*, blip.text_encoder.*, mlp.layers.* -> the network,
    frozen."""
    state = core_weights.tensors(path)
    blip = {
        key.removeprefix("blip."): value for key, value in state.items() if key.startswith("blip.")
    }
    rest = {
        key.removeprefix("mlp."): value
        for key, value in state.items()
        if not key.startswith("blip.")
    }
    try:
        network = Network(Blip(blip, med_config))
    except KeyError as error:  # sizes are read off the tensors and the config
        raise ValueError(
            f"{path} is no ImageReward checkpoint, or med_config.json not its config: no"
            f" {error.args[0]}"
        ) from error
    return core_weights.fill(
        network,
        {**{f"blip.{key}": value for key, value in renamed(blip).items()}, **rest},
        path=path,
        ignore=UNUSED,
    )


REWARD = ImageReward
