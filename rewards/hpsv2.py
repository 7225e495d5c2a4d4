"""Human Preference Score v2 and v2.1 (HPDv2, arXiv:2306.09341): a CLIP ViT-H/14 tuned on choices.

The choices are between pictures of one prompt. The score is the cosine itself: about .25 to .29
(v2), .20 to .38 (v2.1); papers print it times 100. Other toolkits take it as it is. Reference:
github.com/tgxs002/HPSv2 (img_score.py, src/open_clip/transform.py). Its preprocessing is not
CLIP's: the whole picture is kept, its longest side resized to 224 as a float tensor and zeros put
around it, which normalisation then turns into -mean/std.

That resize does not state `antialias`: torchvision before 0.17 did not antialias, later versions do
(31 against 57 dB from PIL's on a photo). That is the likeliest reason why two installations
disagree; here it is a setting, on by default as in current installations.

Departures: fp32 (the reference runs under fp16 autocast on CUDA: noise of about 1e-3). A picture
whose longest side is 224 already is padded to a square like any other, where the reference leaves
it as it is and its network refuses it.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any, Literal

import pydantic
from torch import Tensor

from flowrl.rewards.core.pictures import fitted, normalized, rounded
from flowrl.rewards.core.settings import PictureSettings
from flowrl.rewards.core.sizes import of_open_clip
from flowrl.rewards.core.weights import fill, path_of, tensors
from flowrl.rewards.networks.clip import OpenClip, TwoTowers

logger = logging.getLogger("flowrl")

FILES = {"v2": "HPS_v2_compressed.pt", "v2.1": "HPS_v2.1_compressed.pt"}
MD5 = {"v2": "fd9180de357abf01fdb4eaad64631db4", "v2.1": "4067542e34ba2553a738c5ac6c1d75c0"}


class Settings(PictureSettings):
    version: Literal["v2", "v2.1"] = pydantic.Field(
        "v2.1",
        description="Which of the two published models scores; their scores cannot be compared.",
    )
    weights: str = pydantic.Field(
        "xswu/HPSv2",
        description=(
            "Weights: HPS_v2.1_compressed.pt (v2: HPS_v2_compressed.pt), a folder that holds the"
            " file, or its hub repository."
        ),
    )
    antialias: bool = pydantic.Field(
        True,
        description=(
            "Resize as torchvision does since 0.17; false: as it did when the models were made."
        ),
    )


class Hpsv2(TwoTowers):
    """Cosine of picture and prompt under HPSv2's CLIP; for a video, the mean over its frames."""

    Settings = Settings
    name = "hpsv2"
    scale = (
        "cosine of image and prompt embeddings, about 0.20 to 0.38 (v2.1) or 0.25 to 0.29 (v2);"
        " papers print it times 100"
    )
    range = (-1.0, 1.0)
    quality = True
    architecture = "ViT-H-14"

    def __init__(self, settings: Any = None):
        super().__init__(settings)
        import open_clip

        s = self.settings
        path = path_of(s.weights, FILES[s.version], reward="hpsv2")
        _check_version(path, s.version)
        model = open_clip.CLIP(**open_clip.get_model_config(self.architecture))
        fill(model, tensors(path, under="state_dict"), path=path)
        self.towers = OpenClip(model, open_clip.get_tokenizer(self.architecture))

    @classmethod
    def network_bytes(cls, settings: Any) -> float | None:
        return of_open_clip(cls.architecture)

    def pixels(self, frames: Tensor) -> Tensor:
        frames = rounded(frames) if self.settings.rounding else frames
        return normalized(fitted(frames, self.towers.side[0], antialias=self.settings.antialias))


def _check_version(path: Path, version: str) -> None:
    """Raise ValueError for the other published model; warn about a file that is neither."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "md5").hexdigest()
    other = next((v for v, md5 in MD5.items() if md5 == found and v != version), None)
    if other:
        remedy = f"set reward.hpsv2.version={other}, or give {FILES[version]}"
        raise ValueError(f"{path} is HPS {other}, and reward.hpsv2.version={version}; {remedy}")
    if found != MD5[version]:
        logger.warning(
            f"hpsv2: {path} has md5 {found}; the published HPS {version} has {MD5[version]}: its"
            " scores may not compare with published ones"
        )


REWARD = Hpsv2
