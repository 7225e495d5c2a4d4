"""Latents of media on disk (data.latent_cache), so that the VAE encodes each file once.

A file of the folder holds the latent of one medium, fp32, as replay/prompt_cache.py writes answers
of text encoders. Its name is a hash of all that the latent depends on: the bytes of the medium and
the reader's versions, shape and crop, every bit of the VAE's weights, its configuration, type and
tiles, the maps around it, the kind of device and the versions of torch and diffusers. So a hit has
the bits that the VAE would give.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import astuple
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor

from flowrl.config.sampling import Crop
from flowrl.data import as_seen
from flowrl.data.stored import PictureCell
from flowrl.policy import Policy
from flowrl.policy.replay.decode import Decoder
from flowrl.policy.replay.prompt_cache import PromptCache, bits

FORMAT = 1  # raised when a file is read, cropped or encoded in another way
PACKAGES = ("pillow", "torchvision", "diffusers")  # with av, those that make a latent of a file


class LatentCache(PromptCache):
    """The latents in a folder; it grows by one file for each medium, and nothing is removed."""

    setting, kept = "data.latent_cache", "medium"

    def __init__(self, folder: str | Path, policy: Policy, crop: Crop = "none") -> None:
        decoder = getattr(policy, "decoder", None)
        if not isinstance(decoder, Decoder):
            raise ValueError(
                f"data.latent_cache={folder} keeps what a VAE encodes, and this model has none;"
                " leave it out"
            )
        super().__init__(folder, math.inf)
        self.vae, self.device = decoder.vae, policy.device
        maps = (*astuple(decoder.before), *astuple(decoder.after), decoder.latent)
        tiles = {k: v for k, v in vars(self.vae).items() if k.startswith(("use_", "tile_"))}
        # all that a latent depends on beside its file and the VAE's weights
        self.facts = (
            FORMAT,
            as_seen.READER,
            [*map(version, PACKAGES), find_spec("av") and version("av")],
            crop,
            [bits(value) if isinstance(value, Tensor) else value for value in maps],
            sorted(tiles.items()),
        )

    def name(self, file: Path | PictureCell) -> str:
        """Return the key of a medium's latent."""
        content = file.content() if isinstance(file, PictureCell) else file.read_bytes()
        about: Any = (hashlib.sha256(content).hexdigest(), self.facts)
        return self.key(self.vae, "encode", about, self.device)
