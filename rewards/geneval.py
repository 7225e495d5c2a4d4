"""GenEval (arXiv:2310.11513) as a reward: are the objects there, in number, colour and place? A
detector and a colour classifier judge.

Detection and arithmetic are apart: this file finds objects, `_geneval` judges them. References:
djghosh13/geneval (benchmark) and yifan123/reward-server (Flow-GRPO). Departures:
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
from flowrl.rewards.core import weights as core_weights
from flowrl.rewards.core.pictures import frames_of, mean_of_frames, normalized, rounded
from flowrl.rewards.core.reward import Reward
from flowrl.rewards.core.reward import Settings as Base
from flowrl.rewards.networks import detector
from flowrl.rewards.networks.detector import Found
from flowrl.types import MediaContext

CONFIDENCE, COUNTING = (
    0.3,
    0.9,
)  # an object counts above this score; when the task is counting, above the second
MOST = 16  # objects of a class, the most confident
BEST = 100  # (query, class) pairs of a picture that are looked at
ASPECT = (
    1333 / 800
)  # the longest side that the detector sees is at most this times the setting `side`
MULTIPLE = 32  # its input is padded to multiples of this
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
TEMPLATES = (
    "a photo of a {color} {name}",
    "a photo of a {color}-colored {name}",
    "a photo of a {color} object",
)
GREY = (153, 153, 153)  # what is not the object, in the crop whose colour is asked for


class Settings(Base):
    reading: Literal["partial", "partial_fixed", "strict", "official"] = pydantic.Field(
        "partial",
        description=(
            "partial: Flow-GRPO's; partial_fixed: without its quirks; strict: all exactly right;"
            " official: the benchmark's."
        ),
    )
    weights: str = pydantic.Field(
        "facebook/mask2former-swin-small-coco-instance",
        description="Folder or hub id of a Mask2Former of COCO's 80 classes.",
    )
    clip: str = pydantic.Field(
        "ViT-L-14-quickgelu", description="The open_clip model that names colours."
    )
    clip_weights: str | None = pydantic.Field(
        "openai", description="Its weights: an open_clip tag or file; null: random, for tests."
    )
    as_server: bool = pydantic.Field(
        False,
        description=(
            "See what Flow-GRPO's server sees: a JPEG, red and blue swapped for the detector."
        ),
    )
    side: int = pydantic.Field(
        800, ge=32, description="Shortest side, in px, of what the detector sees."
    )
    chunk: int = pydantic.Field(
        8, ge=1, description="Most pictures in one forward of the detector."
    )


@dataclass(frozen=True, slots=True)
class Instance:
    """A detected object with its mask: label (place in CLASSES), score, box in px, mask (H, W) bool
    on CPU."""

    label: int
    score: float
    box: tuple[int, int, int, int]
    mask: Tensor


class Geneval(Reward):
    """Does the picture show what GenEval's clauses ask for? Of a video, the mean over frames. Reads
    meta's include, exclude and tag."""

    Settings = Settings
    name = "geneval"
    scale = (
        "mean of the terms of the prompt's clauses: 1 when all hold, below 0 only where more than"
        " twice as many were drawn as asked for"
    )
    needs = frozenset({"meta"})
    reads = frozenset({"include", "tag"})

    def __init__(self, settings: Any = None):
        super().__init__(settings)
        s = self.settings
        if s.reading != "partial":
            self.scale = {
                "partial_fixed": "0 to 1: mean of the terms of the prompt's clauses",
                "strict": "1 if every clause of the prompt is exactly right, else 0",
                "official": "1 if the picture passes GenEval's own check, else 0",
            }[s.reading]
        self.range = (-math.inf if s.reading == "partial" else 0.0, 1.0)
        self.detector = _load_detector(s.weights)
        self.clip, self.preprocess, self.tokenizer = _load_clip(s.clip, s.clip_weights)
        self._classifiers: dict[str, Tensor] = {}

    def complaint(self, meta: Mapping[str, Any]) -> str | None:
        return detector.complaint(meta)

    def __call__(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> Tensor:
        return self.parts(media, prompts, context)[self.settings.reading]

    def parts(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> dict[str, Tensor]:
        """Every reading: name -> (B,)."""
        assert context is not None and context.meta is not None
        for prompt, meta in zip(prompts, context.meta, strict=True):
            if complaint := self.complaint(meta):
                raise ValueError(f'the prompt "{prompt}" {complaint}')
        frames = media.shape[1] if media.ndim == 5 else 1
        metas = [meta for meta in context.meta for _ in range(frames)]
        judged = [
            detector.readings(found, meta)
            for found, meta in zip(self.detect(frames_of(media), metas), metas, strict=True)
        ]
        return {
            name: mean_of_frames(
                torch.tensor([reading[name] for reading in judged], device=media.device), media
            )
            for name in ("partial", "partial_fixed", "strict", "official")
        }

    @torch.no_grad()
    def detect(
        self, frames: Tensor, metas: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, list[Found]]]:
        """What is in each of (n, 3, H, W) pictures; colours are named for the classes whose colour
        its clauses ask for."""
        pictures = to_pil(frames)
        if self.settings.as_server:
            pictures = [_jpeg(picture) for picture in pictures]
            frames = from_pil(pictures).to(frames.device)[:, [2, 1, 0]]
        instances = [
            found
            for part in rounded(frames).split(self.settings.chunk)
            for found in self._instances(part)
        ]
        out = []
        for picture, objects, meta in zip(pictures, instances, metas, strict=True):
            threshold = COUNTING if meta.get("tag") == "counting" else CONFIDENCE
            colored = {clause["class"] for clause in meta.get("include", []) if clause.get("color")}
            found: dict[str, list[Found]] = {}
            for name, members in _kept(objects, threshold).items():
                colors = (
                    self.colors(picture, name, members)
                    if name in colored
                    else [None] * len(members)
                )
                found[name] = [
                    Found(m.box, m.score, color) for m, color in zip(members, colors, strict=True)
                ]
            out.append(found)
        return out

    def _instances(self, frames: Tensor) -> list[list[Instance]]:
        """Objects of (n, 3, H, W) pictures above the lower threshold, in no order."""
        height, width = frames.shape[-2:]
        scale = min(
            self.settings.side / min(height, width),
            self.settings.side * ASPECT / max(height, width),
        )
        size = [max(1, round(height * scale)), max(1, round(width * scale))]
        x = normalized(
            TF.resize(frames, size, TF.InterpolationMode.BILINEAR, antialias=True), MEAN, STD
        )
        padded = [math.ceil(side / MULTIPLE) * MULTIPLE for side in size]
        x = F.pad(x, (0, padded[1] - size[1], 0, padded[0] - size[0]))
        out = self.detector(pixel_values=x)
        return [
            instances(labels, masks, padded=padded, seen=size, size=[height, width])
            for labels, masks in zip(
                out.class_queries_logits, out.masks_queries_logits, strict=True
            )
        ]

    def colors(self, picture: Image.Image, name: str, objects: Sequence[Instance]) -> list[str]:
        """The colour of each object of a class: zero-shot on its box, with grey where its mask is
        not."""
        device = next(self.clip.parameters()).device
        if name not in self._classifiers:
            self._classifiers[name] = self._classifier(name, device)
        blank = Image.new("RGB", picture.size, GREY)
        crops = [
            Image.composite(picture, blank, Image.fromarray(m.mask.numpy())).crop(m.box)
            for m in objects
        ]
        image = self.clip.encode_image(
            torch.stack([self.preprocess(crop) for crop in crops]).to(device), normalize=True
        )
        return [COLORS[i] for i in (image @ self._classifiers[name].to(device)).argmax(1).tolist()]

    def _classifier(self, name: str, device: torch.device) -> Tensor:
        """(d, colours): the mean of the templates' embeddings, normalised before and after."""
        texts = [
            template.format(color=color, name=name) for color in COLORS for template in TEMPLATES
        ]
        text = self.clip.encode_text(self.tokenizer(texts).to(device), normalize=True)
        return F.normalize(text.view(len(COLORS), len(TEMPLATES), -1).mean(1), dim=-1).T


def instances(
    labels: Tensor,
    masks: Tensor,
    *,
    padded: Sequence[int],
    seen: Sequence[int],
    size: Sequence[int],
    floor: float = CONFIDENCE,
) -> list[Instance]:
    """Mask2Former's output for one picture -> objects above `floor`, by mmdet's
    instance_postprocess.

    labels: (Q, classes + 1) logits, the last is "nothing". masks: (Q, h, w) logits. padded, seen,
    size: (height, width) of the network's input, of the picture in it, and of the picture. An
    object's score is its class probability times its mask's mean probability.
    """
    scores = labels.softmax(-1)[:, :-1]
    best, place = scores.flatten().topk(min(BEST, scores.numel()))
    place, best = (
        place[best > floor],
        best[best > floor],
    )  # the mask's part is at most 1: what falls out here would fall out later
    if not len(place):
        return []
    logits = masks[place // scores.shape[1]][None]
    logits = F.interpolate(logits, list(padded), mode="bilinear", align_corners=False)[
        ..., : seen[0], : seen[1]
    ]
    logits = F.interpolate(logits, list(size), mode="bilinear", align_corners=False)[0]
    inside = logits > 0
    area = inside.flatten(1).sum(1)
    final = best * (logits.sigmoid() * inside).flatten(1).sum(1) / (area + 1e-6)
    return [
        Instance(label, score, _box(mask), mask)
        for label, score, mask in zip(
            (place % scores.shape[1]).tolist(), final.tolist(), inside.cpu(), strict=True
        )
        if score > floor
    ]


def _box(mask: Tensor) -> tuple[int, int, int, int]:
    """(left, top, right, bottom) around a mask (H, W) that is not empty; right and bottom are one
    beyond its last pixel."""
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
    from transformers import Mask2FormerForUniversalSegmentation

    folder = core_weights.path_of(source, reward="geneval", only=["*.json", "*.safetensors"])
    load: Any = Mask2FormerForUniversalSegmentation.from_pretrained
    try:
        model, info = load(folder, output_loading_info=True, dtype=torch.float32)
    except OSError as error:
        raise ValueError(
            f"reward.geneval.weights={source} holds no Mask2Former that transformers can load:"
            f" {error}"
        ) from error
    missing = sorted(
        key for key in info["missing_keys"] if not key.startswith("criterion.")
    ) + sorted(map(str, info["mismatched_keys"]))
    if missing:
        raise ValueError(
            f"reward.geneval.weights={source} lacks {len(missing)} tensors of its Mask2Former"
            f" ({', '.join(missing[:3])}, ...)"
        )
    names = model.config.id2label
    if len(names) != len(CLASSES) or (names[0], names[len(CLASSES) - 1]) != (
        CLASSES[0],
        CLASSES[-1],
    ):
        raise ValueError(
            f"reward.geneval.weights={source} names {len(names)} classes, expected COCO's 80,"
            " person to toothbrush"
        )
    return model.eval().requires_grad_(False)


def _load_clip(model: str, weights: str | None) -> tuple[Any, Any, Any]:
    import open_clip

    if weights in open_clip.list_pretrained_tags_by_model(model):
        core_weights.fetch_open_clip(model, weights, reward="geneval", setting="clip_weights")
    try:
        clip, _, preprocess = open_clip.create_model_and_transforms(
            model, pretrained=weights, precision="fp32"
        )
    except (
        Exception
    ) as error:  # no such model, no such tag, no network: each library below raises its own kind
        raise ValueError(
            f'reward geneval names colours with CLIP "{model}" and clip_weights="{weights}", which'
            f" could not be loaded: {error} Without a network, give a file:"
            " reward.geneval.clip_weights=/path/to/weights"
        ) from error
    return clip.eval().requires_grad_(False), preprocess, open_clip.get_tokenizer(model)


REWARD = Geneval
