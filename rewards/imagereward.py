"""ImageReward (arXiv:2304.05977): a linear head on BLIP-large's reading of prompt and picture.

Reference: github.com/THUDM/ImageReward at 6d863e1, ImageReward/ImageReward.py. BLIP's text encoder
reads the prompt while it attends to the picture; [CLS] of its last hidden state goes through five
linear layers without any activation, then (x - mean) / std with the two constants of that file. The
network is transformers' (see networks/blip.py). Departures: the tokenizer is built from
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

from flowrl.rewards.core.pictures import cropped, normalized, pil_cropped, rated
from flowrl.rewards.core.reward import Reward
from flowrl.rewards.core.settings import PictureSettings
from flowrl.rewards.core.tokens import warn_cut
from flowrl.rewards.core.weights import fill, path_of, tensors
from flowrl.rewards.networks.blip import Blip, renamed
from flowrl.rewards.networks.clip import linears
from flowrl.runtime.paths import located
from flowrl.types import MediaContext

TOKENS = 35  # most tokens of a prompt, with [CLS] and [SEP]
# mean and std of the head's output over the training set
MEAN, STD = 0.16717362830052426, 1.0333394966054072
# hub name -> number of weights in BLIP-large and the head
NUMBERS = {"THUDM/ImageReward": 446_206_689}
# Beginnings of the checkpoint's keys that are not used: BLIP's contrastive heads, and a buffer.
UNUSED = ("blip.vision_proj.", "blip.text_proj.", "blip.text.embeddings.position_ids")


class Settings(PictureSettings):
    weights: str = pydantic.Field(
        "THUDM/ImageReward",
        description="Folder with ImageReward.pt and med_config.json, or a hub id.",
    )
    vocab: str = pydantic.Field(
        "google-bert/bert-base-uncased",
        description="Folder with bert-base-uncased's vocab.txt, or a hub id.",
    )
    chunk: int = pydantic.Field(32, ge=1, description="Most pictures in one forward.")


class ImageReward(Reward):
    """Human preference for picture and prompt, z-scored over the training set: about -2.3 to 2.

    The score of a video is the mean over its frames.
    """

    Settings = Settings
    name = "imagereward"
    networks = NUMBERS
    scale = "human preference, z-scored over ImageReward's training set: about -2.3 to 2"
    quality = True
    reads_prompt = True

    def __init__(self, settings: Any = None):
        super().__init__(settings)
        from tokenizers import BertWordPieceTokenizer

        s = self.settings
        self.model = load_network(*_files(s.weights))
        vocab = path_of(s.vocab, "vocab.txt", reward="imagereward", setting="vocab")
        self.tokenizer = BertWordPieceTokenizer(str(vocab), lowercase=True)
        # BLIP added these tokens; they are read only where a prompt spells them.
        self.tokenizer.add_special_tokens(["[DEC]", "[ENC]"])

    def __call__(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> Tensor:
        ids, mask = (rows.to(media.device) for rows in self._tokens(prompts))
        resize = pil_cropped if self.settings.rounding else cropped

        def rate(frames: Tensor, rows: Tensor) -> Tensor:
            pixels = normalized(resize(frames, self.model.blip.side))
            return self.model(pixels, ids[rows], mask[rows])

        return rated(self, media, rate)

    def expect(self, prompts: Sequence[str]) -> None:
        self._encoded(list(dict.fromkeys(prompts)), known=True)

    def _encoded(self, prompts: list[str], *, known: bool = False) -> list[list[int]]:
        """Token ids [CLS] prompt [SEP] of each prompt, uncut."""
        found = [encoding.ids for encoding in self.tokenizer.encode_batch(prompts)]
        warn_cut("imagereward", [len(ids) for ids in found], TOKENS, known=known)
        return found

    def _tokens(self, prompts: list[str]) -> tuple[Tensor, Tensor]:
        """ids and mask (B, 35): [CLS] prompt [SEP], cut so that [SEP] stays, padded with [PAD]."""
        found = self._encoded(prompts)
        # zeros, because bert's [PAD] is 0
        ids, mask = torch.zeros(2, len(found), TOKENS, dtype=torch.long)
        for row, tokens in enumerate(found):
            tokens = [*tokens[: TOKENS - 1], tokens[-1]] if len(tokens) > TOKENS else tokens
            ids[row, : len(tokens)], mask[row, : len(tokens)] = torch.tensor(tokens), 1
        return ids, mask


def _files(weights: str) -> tuple[Path, dict[str, Any]]:
    """Path of ImageReward.pt, and the contents of the med_config.json beside it."""
    names = "ImageReward.pt", "med_config.json"
    checkpoint = path_of(weights, names[0], reward="imagereward", beside=names[1])
    source = str(checkpoint.parent) if located(weights).is_file() else weights
    config = path_of(source, names[1], reward="imagereward", beside=names[0])
    return checkpoint, json.loads(config.read_text(encoding="utf-8"))


class ImageRewardNetwork(nn.Module):
    """BLIP and the head 768 -> 1024 -> 128 -> 64 -> 16 -> 1, without activations."""

    def __init__(self, blip: Blip):
        super().__init__()
        self.blip = blip
        self.layers = linears(blip.text.config.hidden_size, (0, 2, 4, 6, 7))

    def forward(self, pixels: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        """pixels (n, 3, s, s), ids and mask (n, L) -> rewards (n,)."""
        return (self.layers(self.blip(pixels, ids, mask)[:, 0])[:, 0] - MEAN) / STD


def load_network(path: Path, med_config: dict[str, Any]) -> ImageRewardNetwork:
    """Load ImageReward.pt (blip.visual_encoder.*, blip.text_encoder.*, mlp.layers.*), frozen."""
    blip: dict[str, Tensor] = {}
    head: dict[str, Tensor] = {}
    for key, value in tensors(path).items():
        if key.startswith("blip."):
            blip[key.removeprefix("blip.")] = value
        else:
            head[key.removeprefix("mlp.")] = value
    try:
        network = ImageRewardNetwork(Blip(blip, med_config))
    except KeyError as error:  # sizes are read off the tensors and the config
        raise ValueError(
            f"{path} is not an ImageReward checkpoint, or med_config.json is not its config: no"
            f" {error.args[0]}"
        ) from error
    state = {f"blip.{key}": value for key, value in renamed(blip).items()} | head
    return fill(network, state, path=path, ignore=UNUSED)


REWARD = ImageReward
