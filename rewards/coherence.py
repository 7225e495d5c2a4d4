"""Physical foresight coherence: is a video's future what a world model expects of its past?

MIND-V (arXiv:2512.06628), equations 4 and 5. A window slides over the video; the world model
predicts the features of the window's last frames from those of its first ones:

    s_i = cos(P(E(context_i)), E(target_i))
    w_i = softmax_i((1 - s_i) / tau)
    R = sum_i w_i s_i

so that the worst windows count most (tau towards 0: the worst alone; large tau: the mean). The
world model is V-JEPA 2 (transformers' VJEPA2Model). The paper states neither window, stride nor
tau, and its code is not published; window, context and stride are those of WMReward
(arXiv:2601.10553, github.com/facebookresearch/WMReward), tau is our choice. The paper leaves these
points open, and we decided:
* E(context) sees only the context frames. VJEPA2Model's own context_mask does not do that: it
  hides tokens of an encoder that has looked at the whole window, so the prediction has seen its
  target. Encoder and predictor are called one after the other instead.
* E(target) are the target's tokens in the encoded window, as in V-JEPA's training and in WMReward;
  both sides are layer-normalised, which its predictor was trained for. The cosine is over features,
  token by token, then the mean (WMReward's code takes it over tokens).
* A last window ends at the last frame, whatever the stride: otherwise a few frames would not be
  scored.

A frozen video is easy to predict and scores high: combine this with a reward that asks for motion,
and watch the part `dynamic`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pydantic
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import center_crop, resize

from flowrl.rewards.core.pictures import normalized, rounded
from flowrl.rewards.core.reward import Reward
from flowrl.rewards.core.settings import Rounding
from flowrl.rewards.core.settings import Settings as Base
from flowrl.rewards.core.weights import network
from flowrl.rewards.motion_smoothness import dynamic_degree
from flowrl.rewards.video import softmin
from flowrl.types import MediaContext

NUMBERS = {  # hub name -> number of weights in encoder and predictor
    "facebook/vjepa2-vitl-fpc64-256": 325_971_328,
    "facebook/vjepa2-vith-fpc64-256": 653_930_880,
    "facebook/vjepa2-vitg-fpc64-256": 1_034_555_264,
    "facebook/vjepa2-vitg-fpc64-384": 1_034_555_264,
}
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

# Function (windows (n, W, 3, h, w), number of context frames) -> predicted and actual features of
# the other frames, (n, tokens, features) each.
World = Callable[[Tensor, int], tuple[Tensor, Tensor]]


class Settings(Base):
    weights: str = pydantic.Field(
        "facebook/vjepa2-vitl-fpc64-256",
        description="V-JEPA 2 in transformers' layout: a folder or a hub's name.",
    )
    window: int = pydantic.Field(16, ge=2, description="Frames of a window.")
    context: int = pydantic.Field(
        8, ge=1, description="Frames at a window's start that the world model sees."
    )
    stride: int = pydantic.Field(2, ge=1, description="Frames from a window to the next.")
    tau: float = pydantic.Field(
        0.1,
        gt=0,
        description=(
            "Temperature of the weights of windows: towards 0 the worst window alone counts."
        ),
    )
    rounding: Rounding = True
    chunk: int = pydantic.Field(4, ge=1, description="Most windows in one forward.")

    @pydantic.model_validator(mode="after")
    def _something_to_predict(self) -> Settings:
        if self.context >= self.window:
            raise ValueError(
                f"context={self.context} leaves nothing of window={self.window} to predict; it must"
                " be smaller"
            )
        return self


class Coherence(Reward):
    """Cosine of predicted and actual features, weighted towards the worst windows, in [-1, 1]."""

    Settings = Settings
    name = "coherence"
    networks = NUMBERS
    scale = "cosine of predicted and actual V-JEPA 2 features, worst windows first, in [-1, 1]"
    range = (-1.0, 1.0)
    video = "only"

    def __init__(self, settings: Any = None, world: World | None = None):
        """world: another world model or an analytic one, which only Python can give."""
        super().__init__(settings)
        s = self.settings
        self.world = VJepa2(s.weights, s.window, s.context) if world is None else world

    def __call__(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> Tensor:
        return softmin(self.windows(media), self.settings.tau)

    def parts(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> dict[str, Tensor]:
        """Mean and worst of the windows' cosines; dynamic: mean change of a pixel between frames,
        0 for a frozen video."""
        scores = self.windows(media)
        return {"mean": scores.mean(1), "worst": scores.amin(1), "dynamic": dynamic_degree(media)}

    def windows(self, media: Tensor) -> Tensor:
        """s of equation 4 for each window: (B, F, 3, H, W) -> (B, windows) fp32."""
        s, frames = self.settings, media.shape[1]
        if frames < s.window:
            raise ValueError(
                f"reward.coherence.window={s.window} is longer than the videos, which have {frames}"
                f" frames; set a window of at most {frames} and a context below it"
            )
        media = rounded(media) if s.rounding else media
        starts = [*range(0, frames - s.window, s.stride), frames - s.window]
        clips = torch.stack([media[:, start : start + s.window] for start in starts], 1)
        scores = []
        for part in clips.flatten(0, 1).split(s.chunk):
            predicted, actual = self.world(part, s.context)
            scores.append(F.cosine_similarity(predicted.float(), actual.float(), dim=-1).mean(1))
        return torch.cat(scores).view(len(media), len(starts))


class VJepa2(nn.Module):
    """V-JEPA 2 as a world model; see `World`."""

    def __init__(self, weights: str, window: int, context: int):
        from transformers import VJEPA2Model

        super().__init__()
        self.model = network(VJEPA2Model, weights, reward="coherence", ignore=("",))
        self.eval()
        tube = self.model.config.tubelet_size
        if window % tube or context % tube:
            raise ValueError(
                f"this V-JEPA 2 reads {tube} frames at a time, and window={window},"
                f" context={context}; both must be multiples of it"
            )

    def forward(self, clips: Tensor, context: int) -> tuple[Tensor, Tensor]:
        """Predicted and actual tokens after the context, (n, tokens, features), layer-normalised.

        clips: (n, W, 3, h, w) in [0, 1].
        """
        pixels = self.pixels(clips)
        actual = self.model.encoder(pixel_values_videos=pixels).last_hidden_state
        seen = self.model.encoder(pixel_values_videos=pixels[:, :context]).last_hidden_state
        place = torch.arange(actual.shape[1], device=clips.device).expand(len(clips), -1)
        past, future = place[:, : seen.shape[1]], place[:, seen.shape[1] :]
        predicted = self.model.predictor(
            encoder_hidden_states=seen, context_mask=[past], target_mask=[future]
        ).last_hidden_state
        width = predicted.shape[-1:]
        return F.layer_norm(predicted, width), F.layer_norm(actual[:, seen.shape[1] :], width)

    def pixels(self, clips: Tensor) -> Tensor:
        """The input that V-JEPA 2's processor makes.

        The shortest side becomes 256 / 224 of the crop, bilinear; then centre crop, and ImageNet's
        mean and std.
        """
        side = self.model.config.crop_size
        size, frames = [int(side * 256 / 224)], clips.flatten(0, 1)
        frames = resize(frames, size, InterpolationMode.BILINEAR, antialias=True)
        frames = normalized(center_crop(frames, [side, side]), IMAGENET_MEAN, IMAGENET_STD)
        return frames.view(*clips.shape[:3], side, side)


REWARD = Coherence
