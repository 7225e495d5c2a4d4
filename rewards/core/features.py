"""Features of media: a vector for each sample, by which the samples of a prompt are compared.

clip    embedding of the picture by a CLIP of transformers
dino    embedding by DINOv2, which has seen no text
shapes  embedding by the tiny CLIP of the embedded world
or a function of the user's, media (n, ...) -> (n, d). For a video, the first three are the mean
over its frames, each of unit length.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from flowrl.rewards.core.failures import RewardBug
from flowrl.rewards.core.reward import load, network_bytes
from flowrl.rewards.core.sizes import published
from flowrl.runtime import registry

NETWORKS = {  # name -> its weights, unless diversity.weights names others
    "clip": "openai/clip-vit-large-patch14",
    "dino": "facebook/dinov2-base",
    "shapes": None,
}
# hub name -> number of weights
DINO = {"facebook/dinov2-base": 86_580_480, "facebook/dinov2-large": 304_368_640}


@dataclass(frozen=True, kw_only=True)
class Features:
    """Vectors by which media are compared, and the function that makes them."""

    label: str  # the setting diversity.features
    function: Callable[[Tensor], Any]  # media (n, ...) -> (n, d)
    pictures: bool  # whether it takes images and videos alone, frame by frame
    network: Any = None  # Reward or module that moves to a device

    def to(self, device: torch.device | str) -> None:
        if self.network is not None:
            self.network.to(device)

    @torch.no_grad()
    def of(self, media: Tensor, rows: Tensor) -> Tensor:
        """Compute features of the rows (n,) of media (B, ...) -> (B, d) fp32, NaN in other rows.

        The result is (B, 0) if there are no rows. Raises RewardBug for a vector that cannot be
        compared.
        """
        place = rows.to(media.device)
        if not len(rows):
            return media.new_zeros(len(media), 0)
        found = self.checked(media[place])
        out = torch.full((len(media), found.shape[1]), math.nan, device=media.device)
        out[place] = found
        return out

    def checked(self, media: Tensor) -> Tensor:
        """The vectors of media, (n, d) fp32; raises RewardBug unless each is finite and not 0."""
        found, what = self.function(media), f"diversity.features={self.label} returned"
        expected = f"a tensor of shape ({len(media)}, d) on {media.device}"
        if not isinstance(found, Tensor):
            raise RewardBug(f"{what} a {type(found).__name__}; expected {expected}")
        wrong = found.ndim != 2 or len(found) != len(media) or not found.shape[1]
        if wrong or found.device != media.device or not found.is_floating_point():
            dtype = str(found.dtype).removeprefix("torch.")
            got = f"a {dtype} tensor of shape {tuple(found.shape)} on {found.device}"
            raise RewardBug(f"{what} {got}; expected {expected}, of floating point")
        found = found.detach().float()
        usable = found.isfinite().all(1) & (found != 0).any(1)
        if bad := int((~usable).sum()):
            raise RewardBug(
                f"{what} NaN, inf or only zeros for {bad} of {len(media)} samples, which have no"
                " direction to compare; give each sample a finite vector other than 0"
            )
        return found


def load_features(
    name: str, weights: str | None = None, *, live: Callable[[Tensor], Any] | None = None
) -> Features:
    """Load the features that diversity.features names; live: the function, if a script gave one.

    An unknown name, or missing weights -> ValueError.
    """
    if live is not None or registry.is_place(name):
        function = live or registry.member(name, what=f'diversity.features="{name}"')
        label = registry.label_of(name)
        if not callable(function) or isinstance(function, type):
            raise ValueError(
                f"diversity.features={label} is a {type(function).__name__}; give a function of"
                " media (n, ...) that returns (n, d)"
            )
        network = function if isinstance(function, nn.Module) else None
        return Features(label=label, function=function, pictures=False, network=network)
    # A network of ours sees single frames; a video's vector is the mean over its frames.
    check_name(name)
    source = weights or NETWORKS[name]
    try:
        network, per_frame = _network(name, source)
    except ValueError as error:
        raise ValueError(_reworded(str(error), name)) from error

    def of_media(media: Tensor) -> Tensor:
        frames = media.reshape(-1, *media.shape[-3:])
        vectors = normalize(per_frame(frames).float(), dim=-1)
        return vectors.view(len(media), -1, vectors.shape[-1]).mean(1)

    return Features(label=name, function=of_media, pictures=True, network=network)


def features_bytes(name: str, weights: str | None = None) -> float | None:
    """Bytes that the network of diversity.features takes on a device, computed without loading it;
    None: not known."""
    if name not in NETWORKS:
        return None
    source = weights or NETWORKS[name]
    if name == "dino":
        return published(DINO, str(source))
    return network_bytes("clip", **_clip(name, source))


def check_name(name: str) -> None:
    """Raise ValueError unless the name is a network of ours, a place or a live function."""
    if name not in NETWORKS and not registry.is_place(name) and not registry.is_live(name):
        raise ValueError(
            f'"{name}" is not known; choose {", ".join(NETWORKS)}, or name a function of yours as'
            " path/to/file.py:NAME"
        )


def _network(name: str, source: str | None) -> tuple[Any, Callable[[Tensor], Tensor]]:
    """Load (the reward or module that moves to a device, function frames (n, 3, H, W) -> (n,
    d))."""
    if name == "dino":
        from flowrl.rewards.networks.dino import Dino

        assert source is not None
        dino = Dino(source)
        return dino, dino
    reward: Any = load("clip", **_clip(name, source))
    return reward, reward.pictures


def _clip(name: str, source: str | None) -> dict[str, Any]:
    """Settings of the clip reward, whose picture tower gives `clip` and `shapes`."""
    return {"preset": "shapes"} if name == "shapes" else {"model": source}


def _reworded(message: str, name: str) -> str:
    """The message of a reward's loader, in the words of the section `diversity`."""
    for setting in ("weights", "model", "pretrained"):
        for reward in ("clip", "dino"):
            message = message.replace(f"reward.{reward}.{setting}", "diversity.weights")
    return message.replace(f"reward {name} needs", f"diversity.features={name} needs")
