"""A Bradley-Terry head on CLIP features: P(a is preferred to b) = sigmoid(score(a) - score(b)).

Sources: Bradley & Terry 1952; on pictures ImageReward (arXiv:2304.05977), with one score for each
aspect VisionPrefer (arXiv:2404.15100).

The published models tune a whole vision-language backbone; here it stays frozen, and a linear layer
or a small network learns from its embeddings. A head is a folder: config.json (`HeadConfig`) and
head.safetensors. scripts/embedded/train_preference.py makes one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pydantic
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowrl.rewards.clip import Clip, bytes_of
from flowrl.rewards.clip import Settings as ClipSettings
from flowrl.rewards.core.settings import Settings, parse
from flowrl.rewards.core.weights import fill, tensors
from flowrl.shapes import clip as shapes_clip

CONFIG, WEIGHTS = "config.json", "head.safetensors"
EMBEDDED = shapes_clip.FOLDER.parent / "preference"


class HeadConfig(Settings):
    """The settings of a head's config.json."""

    aspects: list[str] = pydantic.Field(
        min_length=1, description="Names of the scores, in the order of the head's outputs."
    )
    model: str = pydantic.Field(
        "shapes", description='The CLIP, given as clip.model is; "shapes": the embedded CLIP.'
    )
    pretrained: str | None = pydantic.Field(
        None,
        description=(
            "Weights of the CLIP, given as clip.pretrained is; null where the model has its own"
            " weights."
        ),
    )
    width: int = pydantic.Field(ge=1, description="Length of the model's embeddings.")
    features: list[Literal["image", "product", "text"]] = pydantic.Field(
        ["image", "product"],
        min_length=1,
        description=(
            "Inputs: the picture's embedding, its product with the prompt's (which adds up to the"
            " cosine), the prompt's embedding."
        ),
    )
    hidden: int = pydantic.Field(
        0, ge=0, description="Width of a hidden layer; 0: the head is linear."
    )
    notes: dict[str, Any] = pydantic.Field(
        {}, description="How it was trained and how well it does; nothing reads it."
    )


class ScoreHead(nn.Module):
    """Embeddings of pictures and their prompts -> scores, in log-odds.

    Scores of a linear head are relative to the average training picture.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, config: HeadConfig):
        super().__init__()
        self.features, self.width = tuple(config.features), config.width
        dim, outputs = config.width * len(config.features), len(config.aspects)
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("std", torch.ones(dim))
        layers = [nn.Linear(dim, config.hidden), nn.GELU()] if config.hidden else []
        self.layers = nn.Sequential(*layers, nn.Linear(config.hidden or dim, outputs, bias=False))

    def inputs(self, image: Tensor, text: Tensor) -> Tensor:
        """Inputs of the head: image and text (n, width), of length 1 each -> (n, dim)."""
        parts = {"image": image, "product": image * text, "text": text}
        return torch.cat([parts[name] for name in self.features], -1)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of inputs: (n, dim) -> (n, aspects)."""
        return self.layers((x - self.mean) / self.std)


class Backbone(Clip):
    """The clip reward's towers and preprocessing, for their embeddings."""

    name = "preference"

    def __init__(
        self, model: str, pretrained: str | None = None, *, rounding: bool = True, chunk: int = 64
    ):
        """model: a CLIP as for clip.model, or "shapes" for the embedded CLIP."""
        name = _source(model)
        if pretrained is None and ":" not in name and "/" not in name:
            raise ValueError(
                f'the CLIP "{model}" needs weights: give pretrained=TAG or a file, or a model with'
                " weights of its own"
            )
        super().__init__(
            ClipSettings(model=name, pretrained=pretrained, rounding=rounding, chunk=chunk)
        )
        with torch.no_grad():
            self.width = self.towers.text([model], "cpu").shape[-1]


def backbone_bytes(model: str) -> float | None:
    """Bytes of a Backbone on a device, computed without its weights; None: not known."""
    return bytes_of(_source(model))


def _source(model: str) -> str:
    return shapes_clip.SOURCE if model == "shapes" else model


def loss(difference: Tensor, preference: Tensor) -> Tensor:
    """-p log sigmoid(d) - (1 - p) log sigmoid(-d), mean over values that are not NaN -> ().

    difference d: score(a) - score(b); preference p: 1 where a was preferred, 0 where b was, 0.5 a
    tie, NaN where nobody was asked.
    """
    asked = ~preference.isnan()
    return F.binary_cross_entropy_with_logits(difference[asked], preference[asked])


def fit(
    head: ScoreHead, a: Tensor, b: Tensor, preference: Tensor, *, l2: float = 0.01, steps: int = 200
) -> float:
    """Fit the head to pairs, in place -> the final loss with its penalty, over all aspects.

    a, b: (N, dim) of `ScoreHead.inputs`; preference: (N, aspects) as in `loss`; l2: weight of the
    sum of squares. Full-batch L-BFGS, so that the same pairs give the same head.
    """
    _standardise(head, torch.cat([a, b]))
    weights = [p for p in head.layers.parameters() if p.ndim == 2]
    optimizer = torch.optim.LBFGS(
        head.layers.parameters(), max_iter=steps, line_search_fn="strong_wolfe", tolerance_grad=1e-6
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        total = loss(head(a) - head(b), preference) + l2 * sum(w.square().sum() for w in weights)
        total.backward()
        return total

    return optimizer.step(closure).item()


def _standardise(head: ScoreHead, x: Tensor) -> None:
    """Let the head subtract the mean of x (N, dim) and divide by its deviation."""
    with torch.no_grad():
        head.mean.copy_(x.mean(0))
        head.std.copy_(x.std(0).clamp_min(1e-6))


def save_head(head: ScoreHead, config: HeadConfig, folder: str | Path) -> None:
    """Write config.json and head.safetensors into a folder."""
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = {key: value.contiguous() for key, value in head.state_dict().items()}
    save_file(state, str(folder / WEIGHTS))
    (folder / CONFIG).write_text(json.dumps(config.model_dump(), indent=2) + "\n", encoding="utf-8")


def load_head(folder: Path) -> tuple[ScoreHead, HeadConfig]:
    """Load a folder that `save_head` wrote; raise ValueError with the file and its fault
    otherwise."""
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(
            f"{folder} holds no {CONFIG}; give one that scripts/embedded/train_preference.py wrote"
        )
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not (folder / WEIGHTS).is_file():
        raise ValueError(
            f"{folder} holds a {CONFIG} and no {WEIGHTS}; copy both files that"
            " scripts/embedded/train_preference.py wrote"
        )
    given = found if isinstance(found, Mapping) else {"config": found}
    config = parse(HeadConfig, given, what=str(path))
    head = fill(ScoreHead(config), tensors(folder / WEIGHTS), path=folder / WEIGHTS)
    return head, config  # type: ignore[return-value]
