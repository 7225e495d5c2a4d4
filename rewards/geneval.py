"""GenEval (arXiv:2310.11513) as a reward: are the objects there, in number, colour and place?

A detector and a colour classifier judge. Detection and arithmetic are apart: this file finds
objects, networks/detector.py judges them. References: djghosh13/geneval (benchmark) and
yifan123/reward-server (Flow-GRPO). Departures:
* the detector is transformers' Mask2Former Swin-S, COCO instances (the authors' weights), not
  mmdet's retraining of the same network; boxes and scores follow mmdet's post-processing (100 best
  (query, class) pairs, masks at full size), not transformers' (384 x 384 masks);
* everything is fp32, where the reference classifies colours under fp16 autocast;
* Flow-GRPO's server sees a JPEG of quality 75 and gives RGB to a detector that expects BGR;
  `as_server` does both, off by default.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pydantic
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torchvision.transforms import functional as TF

from flowrl.data.geneval import CLASSES, COLORS
from flowrl.data.media import from_pil, to_pil
from flowrl.rewards.core.pictures import frames_of, mean_of_frames, normalized, rounded
from flowrl.rewards.core.reward import SHOWN, Reward
from flowrl.rewards.core.settings import Settings as Base
from flowrl.rewards.core.sizes import of_open_clip, published, together
from flowrl.rewards.core.weights import fetch_open_clip, network
from flowrl.rewards.networks import detector
from flowrl.rewards.networks.detector import DetectedObject
from flowrl.types import MediaContext

CONFIDENCE = 0.3  # confidence above which an object counts
COUNTING = 0.9  # confidence above which an object counts in the task counting
MOST = 16  # most objects of a class that count; the most confident are kept
BEST = 100  # number of best (query, class) pairs of a picture that are read
SIDE, LONGEST = 800, 1333  # px of the detector's picture: its shorter side, and most of the longer
CLIP = "ViT-L-14-quickgelu"  # the model of open_clip that names colours
MULTIPLE = 32  # the detector's input is padded to multiples of this
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
TEMPLATES = (
    "a photo of a {color} {name}",
    "a photo of a {color}-colored {name}",
    "a photo of a {color} object",
)
# hub name -> number of weights
NUMBERS = {"facebook/mask2former-swin-small-coco-instance": 68_741_083}
GREY = (153, 153, 153)  # colour of the background in the crop whose object's colour is asked for


class Settings(Base):
    reading: Literal["partial", "partial_fixed", "strict", "official"] = pydantic.Field(
        "partial",
        description=(
            "How clauses become a score. partial: Flow-GRPO's reading; partial_fixed: the same"
            " without its quirks; strict: 1 if all is exactly right; official: the benchmark's own"
            " check."
        ),
    )
    weights: str = pydantic.Field(
        "facebook/mask2former-swin-small-coco-instance",
        description="Folder or hub id of a Mask2Former of COCO's 80 classes.",
    )
    clip_weights: str = pydantic.Field(
        "openai",
        description="Weights of the CLIP ViT-L/14 that names colours: an open_clip tag or a file.",
    )
    as_server: bool = pydantic.Field(
        False,
        description=(
            "See the pictures that Flow-GRPO's server sees: a JPEG, with red and blue swapped for"
            " the detector."
        ),
    )
    chunk: int = pydantic.Field(
        8, ge=1, description="Most pictures in one forward of the detector."
    )


@dataclass(frozen=True, slots=True)
class Instance:
    """A detected object with its mask."""

    label: int  # place in CLASSES
    score: float  # confidence in [0, 1]
    box: tuple[int, int, int, int]  # left, top, right, bottom in px
    mask: Tensor  # (H, W) bool, on CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """(height, width) of a picture on its way through the detector."""

    picture: tuple[int, int]  # size of the picture as it came
    seen: tuple[int, int]  # size after the resize
    padded: tuple[int, int]  # size of the network's input


class Geneval(Reward):
    """Whether the picture shows the objects of GenEval's clauses; for a video, the mean over
    frames.

    It reads meta's include, exclude and tag.
    """

    Settings = Settings
    name = "geneval"
    scale = (
        "mean of the terms of the prompt's clauses: 1 when all hold, below 0 only where more than"
        " twice as many were drawn as asked for"
    )
    needs = frozenset({"meta"})
    reads = frozenset({"include", "tag"})
    verifies = frozenset(SHOWN)

    def __init__(self, settings: Any = None):
        super().__init__(settings)
        s = self.settings
        if s.reading != "partial":
            self.scale = {
                "partial_fixed": "0 to 1: mean of the terms of the prompt's clauses",
                "strict": "1 if every clause of the prompt is exactly right, else 0",
                "official": "1 if the picture passes GenEval's own check, else 0",
            }[s.reading]
        if s.reading == "official":  # the official check accepts more objects than asked for
            self.verifies = frozenset(SHOWN) - {"count"}
        self.range = (-math.inf if s.reading == "partial" else 0.0, 1.0)
        self.detector = _load_detector(s.weights)
        self.clip, self.preprocess, self.tokenizer = _load_clip(CLIP, s.clip_weights)
        self._classifiers: dict[str, Tensor] = {}

    @classmethod
    def network_bytes(cls, settings: Any) -> float | None:
        return together(published(NUMBERS, settings.weights), of_open_clip(CLIP))

    def complaint(self, meta: Mapping[str, Any]) -> str | None:
        return detector.complaint(meta)

    def __call__(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> Tensor:
        return self.parts(media, prompts, context)[self.settings.reading]

    def parts(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> dict[str, Tensor]:
        """Every reading of the clauses: name -> (B,)."""
        assert context is not None and context.meta is not None
        for prompt, meta in zip(prompts, context.meta, strict=True):
            if complaint := self.complaint(meta):
                raise ValueError(f'the prompt "{prompt}" {complaint}')
        frames = media.shape[1] if media.ndim == 5 else 1
        metas = [meta for meta in context.meta for _ in range(frames)]
        found = self.detect(frames_of(media), metas)
        judged = [detector.readings(f, meta) for f, meta in zip(found, metas, strict=True)]
        values = {
            name: torch.tensor([reading[name] for reading in judged], device=media.device)
            for name in ("partial", "partial_fixed", "strict", "official")
        }
        return {name: mean_of_frames(value, media) for name, value in values.items()}

    @torch.no_grad()
    def detect(
        self, frames: Tensor, metas: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, list[DetectedObject]]]:
        """Objects in each of (n, 3, H, W) pictures: class -> its objects.

        Colours are named for the classes whose colour the picture's clauses ask for.
        """
        pictures = to_pil(frames)
        if self.settings.as_server:
            pictures = [_jpeg(picture) for picture in pictures]
            frames = from_pil(pictures).to(frames.device)[:, [2, 1, 0]]
        parts = rounded(frames).split(self.settings.chunk)
        objects = [found for part in parts for found in self._instances(part)]
        return [self._named(*row) for row in zip(pictures, objects, metas, strict=True)]

    def _named(
        self, picture: Image.Image, objects: Sequence[Instance], meta: Mapping[str, Any]
    ) -> dict[str, list[DetectedObject]]:
        """A picture's objects by class, with their colours where its clauses ask for one."""
        threshold = COUNTING if meta.get("tag") == "counting" else CONFIDENCE
        colored = {clause["class"] for clause in meta.get("include", []) if clause.get("color")}
        out: dict[str, list[DetectedObject]] = {}
        for name, members in _kept(objects, threshold).items():
            colors: Sequence[str | None] = [None] * len(members)
            if name in colored:
                colors = self.colors(picture, name, members)
            pairs = zip(members, colors, strict=True)
            out[name] = [DetectedObject(member.box, member.score, color) for member, color in pairs]
        return out

    def _instances(self, frames: Tensor) -> list[list[Instance]]:
        """Objects of (n, 3, H, W) pictures above the lower threshold, in no order."""
        sizes = _sizes(frames.shape[-2], frames.shape[-1])
        bilinear = TF.InterpolationMode.BILINEAR
        x = normalized(TF.resize(frames, list(sizes.seen), bilinear, antialias=True), MEAN, STD)
        bottom, right = sizes.padded[0] - sizes.seen[0], sizes.padded[1] - sizes.seen[1]
        out = self.detector(pixel_values=F.pad(x, (0, right, 0, bottom)))
        rows = zip(out.class_queries_logits, out.masks_queries_logits, strict=True)
        return [instances(labels, masks, sizes) for labels, masks in rows]

    def colors(self, picture: Image.Image, name: str, objects: Sequence[Instance]) -> list[str]:
        """The colour of each object of a class, zero-shot on its box; grey hides the background."""
        device = next(self.clip.parameters()).device
        if name not in self._classifiers:
            self._classifiers[name] = self._classifier(name, device)
        blank = Image.new("RGB", picture.size, GREY)
        crops = []
        for found in objects:
            alone = Image.composite(picture, blank, Image.fromarray(found.mask.numpy()))
            crops.append(self.preprocess(alone.crop(found.box)))
        image = self.clip.encode_image(torch.stack(crops).to(device), normalize=True)
        return [COLORS[i] for i in (image @ self._classifiers[name].to(device)).argmax(1).tolist()]

    def _classifier(self, name: str, device: torch.device) -> Tensor:
        """(d, colours): the mean of the templates' embeddings, normalised before and after."""
        texts = [
            template.format(color=color, name=name) for color in COLORS for template in TEMPLATES
        ]
        text = self.clip.encode_text(self.tokenizer(texts).to(device), normalize=True)
        return F.normalize(text.view(len(COLORS), len(TEMPLATES), -1).mean(1), dim=-1).T


def _sizes(height: int, width: int) -> Sizes:
    """Sizes with the shorter side at SIDE, unless the longer one would exceed LONGEST."""
    scale = min(SIDE / min(height, width), LONGEST / max(height, width))
    seen = max(1, round(height * scale)), max(1, round(width * scale))
    padded = math.ceil(seen[0] / MULTIPLE) * MULTIPLE, math.ceil(seen[1] / MULTIPLE) * MULTIPLE
    return Sizes(picture=(height, width), seen=seen, padded=padded)


def instances(labels: Tensor, masks: Tensor, sizes: Sizes) -> list[Instance]:
    """Mask2Former's output for one picture -> its objects, by mmdet's instance_postprocess.

    labels: (Q, classes + 1) logits, the last is "nothing". masks: (Q, h, w) logits. An object's
    score is its class probability times its mask's mean probability, and is above CONFIDENCE.
    """
    scores = labels.softmax(-1)[:, :-1]
    best, place = scores.flatten().topk(min(BEST, scores.numel()))
    # The mask's factor is at most 1, so a pair that is dropped here would be dropped later.
    place, best = place[best > CONFIDENCE], best[best > CONFIDENCE]
    if not len(place):
        return []
    logits = _at_picture_size(masks[place // scores.shape[1]], sizes)
    inside = logits > 0
    area = inside.flatten(1).sum(1)
    final = best * (logits.sigmoid() * inside).flatten(1).sum(1) / (area + 1e-6)
    found = zip((place % scores.shape[1]).tolist(), final.tolist(), inside.cpu(), strict=True)
    return [
        Instance(label, score, _box(mask), mask)
        for label, score, mask in found
        if score > CONFIDENCE
    ]


def _at_picture_size(masks: Tensor, sizes: Sizes) -> Tensor:
    """(n, h, w) mask logits of the network -> (n, H, W) of the picture, without the padding."""
    height, width = sizes.seen
    out = F.interpolate(masks[None], list(sizes.padded), mode="bilinear", align_corners=False)
    out = out[..., :height, :width]
    return F.interpolate(out, list(sizes.picture), mode="bilinear", align_corners=False)[0]


def _box(mask: Tensor) -> tuple[int, int, int, int]:
    """(left, top, right, bottom) around a mask (H, W) that is not empty.

    right and bottom are one beyond its last pixel.
    """
    rows, columns = torch.nonzero(mask.any(1)), torch.nonzero(mask.any(0))
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


def _kept(objects: Sequence[Instance], threshold: float) -> dict[str, list[Instance]]:
    """Class -> its objects above the threshold, the most confident first, at most MOST."""
    out: dict[str, list[Instance]] = {}
    for instance in sorted(objects, key=lambda found: -found.score):
        if instance.score > threshold and len(out.get(CLASSES[instance.label], [])) < MOST:
            out.setdefault(CLASSES[instance.label], []).append(instance)
    return out


def _jpeg(picture: Image.Image) -> Image.Image:
    buffer = io.BytesIO()
    picture.save(buffer, format="JPEG")
    return Image.open(buffer).convert("RGB")


def _load_detector(source: str) -> Any:
    """A Mask2Former of COCO's classes, frozen; a missing tensor is an error."""
    from transformers import Mask2FormerForUniversalSegmentation as Mask2Former

    loss = ("criterion.",)
    model = network(Mask2Former, source, reward="geneval", ignore=("",), absent=loss)
    _check_classes(model.config.id2label, source)
    return model


def _check_classes(names: Mapping[int, str], source: str) -> None:
    last = len(CLASSES) - 1
    if len(names) != len(CLASSES) or (names[0], names[last]) != (CLASSES[0], CLASSES[last]):
        raise ValueError(
            f"reward.geneval.weights={source} names {len(names)} classes, expected COCO's 80,"
            " person to toothbrush"
        )


def _load_clip(model: str, weights: str) -> tuple[Any, Any, Any]:
    """(network, its preprocessing of PIL images, tokenizer)."""
    import open_clip

    if weights in open_clip.list_pretrained_tags_by_model(model):
        fetch_open_clip(model, weights, reward="geneval", setting="clip_weights")
    try:
        clip, _, preprocess = open_clip.create_model_and_transforms(
            model, pretrained=weights, precision="fp32"
        )
    # An unknown model or tag, or no network: each library below raises its own kind.
    except Exception as error:
        raise ValueError(
            f'reward geneval names colours with CLIP "{model}" and clip_weights="{weights}", which'
            f" could not be loaded: {error} Without a network, give a file:"
            " reward.geneval.clip_weights=/path/to/weights"
        ) from error
    return clip.eval().requires_grad_(False), preprocess, open_clip.get_tokenizer(model)


REWARD = Geneval
