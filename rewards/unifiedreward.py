"""UnifiedReward (CodeGoat24, arXiv:2503.05236, 2505.03318).

These judges score a picture or video, or say which of two is better. vLLM or sglang serves the
checkpoints; `variant` names the model generation and the question it was trained on. Prompt
texts belong to the models: give each as a text file, with {prompt} where the caption goes
(docs/rewards/judges.md says where they are found).

References: flow_grpo ac4c86e (flow_grpo/rewards.py: point_v15), MixGRPO e5cdd6a (unified_reward.py:
mix_score, mix_semantic), Pref-GRPO 3e787f6 (fastvideo/rewards: point_v2, think, flex, edit_*),
UnifiedReward ff6f520 (the other pairs and videos). MixGRPO's two texts are told apart by what they
ask for: QUESTION_TEMPLATE_SCORE has 804 characters (sha256 b691b5ff...), QUESTION_TEMPLATE_SEMANTIC
1,350 (776575c9...); lists that give them the other way round have them swapped.

Departures:
* A reply that cannot be read is NaN. The references score it 0, give it the batch's mean (point_v2)
  or count it as a tie (pairs).
* Pictures are sent as PNG, as only flow_grpo does; the others send JPEG of quality 95.
* A pair is judged by its own reply: flex weighs overall and mean category outcome of each pair,
  which is the reference's formula wherever the replies of a group name the same categories.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import pydantic
from PIL import Image
from torch import Tensor

from flowrl.rewards.core.source import Settings as SourceSettings
from flowrl.rewards.core.source import Sourced
from flowrl.rewards.judge import replies
from flowrl.rewards.judge.client import NoReply, text
from flowrl.rewards.judge.client import Settings as JudgeSettings
from flowrl.rewards.judge.completion import Reply
from flowrl.rewards.judge.reward import PairJudge, Scores, filled, needed, read_template, user
from flowrl.types import MediaContext

AXES = ("Alignment", "Coherence", "Style", "Physics")
VIDEO_AXES = (
    "visual quality",
    "temporal consistency",
    "dynamic degree",
    "text-to-video alignment",
    "factual consistency",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A model generation and the question it was trained on."""

    scale: str  # phrase that says what a score means
    range: tuple[float, float] = (0.0, 1.0)  # lowest and highest score
    origin: str  # place where the text of the question is found
    sha256: tuple[str, ...] = ()  # beginnings of the digests of that text; (): any text is taken
    pair: bool = False  # whether the question is which of two is better
    source: bool = False  # whether the picture before editing is shown first
    video: Literal["yes", "no", "only"] = "no"  # whether it takes videos, as Reward.video
    frames: int = 8  # frames of a video that are shown by default
    # whether frames go from the first to the last; False: every F/frames-th from the first
    ends: bool = True
    caption: bool = True  # whether the text must hold {prompt}
    # side of the square to which the reference resizes; None: it does not
    stretch: int | None = None


FLOW, MIX, PREF, UNIFIED = (
    f"the text in {place} of the reference's repository"
    for place in (
        "unifiedreward_score_sglang of flow_grpo/rewards.py",
        "fastvideo/models/reward_model/unified_reward.py",
        "fastvideo/rewards/templates.py",
        "the inference scripts",
    )
)
WINS = "probability that the first is better"

VARIANTS = {
    "point_v15": Variant(
        scale="Final Score 1 to 5, divided by 5",
        range=(0.2, 1.0),
        origin=FLOW,
        sha256=("d68ab1dcf4dc3a39",),
        stretch=512,
    ),
    "mix_score": Variant(
        scale="Final Score, 0 to 5", range=(0.0, 5.0), origin=MIX, sha256=("b691b5ff2d2a0a37",)
    ),
    "mix_semantic": Variant(
        scale="Alignment Score, 0 to 5", range=(0.0, 5.0), origin=MIX, sha256=("776575c9a5e4e899",)
    ),
    "point_v2": Variant(
        scale="mean of the chosen axes, 0 to 5",
        range=(0.0, 5.0),
        origin=PREF,
        video="yes",
        frames=16,
        ends=False,
    ),
    "point_video": Variant(
        scale="Final Score, 1 to 10", range=(1.0, 10.0), origin=UNIFIED, video="only"
    ),
    "edit_quality": Variant(
        scale="mean of naturalness and freedom from artifacts, 0 to 25",
        range=(0.0, 25.0),
        origin=PREF,
        caption=False,
    ),
    "edit_instruction": Variant(
        scale="mean of edit success and restraint, 0 to 25",
        range=(0.0, 25.0),
        origin=PREF,
        source=True,
    ),
    "pair_v1": Variant(scale=WINS, origin=UNIFIED, pair=True, video="yes"),
    "pair_v2": Variant(scale=WINS, origin=UNIFIED, pair=True, video="yes", ends=False),
    "think": Variant(scale=WINS, origin=PREF, pair=True, video="yes"),
    "flex": Variant(scale=WINS, origin=PREF, pair=True, video="yes"),
    "edit_pair": Variant(scale=WINS, origin=PREF, pair=True, source=True),
}


class Settings(SourceSettings, JudgeSettings):
    model: str = pydantic.Field("UnifiedReward", description="The model's name on that server.")
    variant: Literal[
        "point_v15",
        "mix_score",
        "mix_semantic",
        "point_v2",
        "point_video",
        "edit_quality",
        "edit_instruction",
        "pair_v1",
        "pair_v2",
        "think",
        "flex",
        "edit_pair",
    ] = pydantic.Field(
        "point_v15",
        description=(
            "Question that is asked and form of the replies; the variants from pair_v1 on ask"
            " about two samples at a time."
        ),
    )
    template: str | None = pydantic.Field(
        None, description="Text file with the model's question, {prompt} where the caption goes."
    )
    own_template: bool = pydantic.Field(
        False,
        description="Whether the question is your own; it is then not compared with the model's.",
    )
    axes: list[Literal["alignment", "coherence", "style", "physics"]] = pydantic.Field(
        ["alignment", "coherence", "style"],
        min_length=1,
        description="Axes that are averaged (point_v2), or that decide (pair_v2).",
    )
    frames: int | None = pydantic.Field(
        None,
        ge=1,
        description="Frames of a video that are shown; null: as many as the reference shows.",
    )
    weights: tuple[float, float] = pydantic.Field(
        (1.0, 1.0),
        description=(
            "Two weights: of the overall winner and of the categories (flex), or of the two scores"
            " (edit_quality, edit_instruction)."
        ),
    )

    @pydantic.field_validator("weights")
    @classmethod
    def check_weights(cls, value: tuple[float, float]) -> tuple[float, float]:
        if min(value) < 0 or sum(value) <= 0:
            raise ValueError("give two weights of 0 or more, not both 0")
        return value


Read = Callable[[str, Settings], Scores]


class UnifiedReward(Sourced, PairJudge):
    """Scores of the point variants; pair variants have `compare` instead, for win_rate and rank."""

    Settings = Settings
    name = "unifiedreward"
    scale = "what the model states: of the default variant Final Score 1 to 5, divided by 5"
    quality = True

    def __init__(self, settings: Any = None):
        super().__init__(settings)
        s, variant = self.settings, VARIANTS[self.settings.variant]
        self.variant, self.scale, self.reads_prompt = variant, variant.scale, variant.caption
        self.declare_source(variant.source, "a variant that sees it: edit_instruction, edit_pair")
        self.video, self.range = variant.video, variant.range
        self.template = read_template(
            s.template,
            reward=self.name,
            setting="template",
            origin=variant.origin,
            sha256=() if s.own_template else variant.sha256,
            places=variant.caption,
        )
        if variant.pair:
            self.only_compares(f"variant={s.variant}", "choose a point variant")

    def parts(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> dict[str, Tensor]:
        """The single scores of a reply: axes, or the two of an edit."""
        if self.variant.pair or self.settings.variant in ("point_v15", "mix_score"):
            return {}
        return self.parts_of(media, prompts, context)

    def asked(
        self, shown: list[Tensor], prompts: list[str], context: MediaContext | None
    ) -> list[Scores | NoReply]:
        """Ask one question about each sample: the source if the variant wants it, the pictures, the
        text."""
        before = [self.sources(shown[0], context)] if self.variant.source else []
        count, ends = self.settings.frames or self.variant.frames, self.variant.ends
        questions = []
        for row, prompt in enumerate(prompts):
            pictures = [
                part
                for media in before + shown
                for part in self.pictures(media[row], count, ends=ends)
            ]
            questions.append([user(*pictures, text(filled(self.template, prompt)))])
        return self.judge.ask_all(questions, self.read)

    def read(self, reply: Reply) -> Scores:
        return READERS[self.settings.variant](reply.finished, self.settings)

    def adapted(self, image: Image.Image) -> Image.Image:
        side = self.variant.stretch
        # PIL's default filter is bicubic, as in the reference
        return image if side is None else image.resize((side, side))


# --- readers of replies


def _semantic(reply: str, settings: Settings) -> Scores:
    found = replies.named_scores(reply, AXES[:3])
    return {"score": needed(found, ["alignment"], reply)[0], **found}


def _axes(reply: str, settings: Settings) -> Scores:
    found = replies.named_scores(reply, AXES)
    chosen = needed(found, settings.axes, reply)
    return {"score": sum(chosen) / len(chosen), **found}


def _video(reply: str, settings: Settings) -> Scores:
    found = replies.labelled_scores(reply, VIDEO_AXES, 1, 4)
    axes = {name.replace(" ", "_"): value for name, value in found.items()}
    return {"score": replies.final_score(reply, 1, 10), **axes}


def _edit(reply: str, settings: Settings, *, names: tuple[str, str]) -> Scores:
    pair, weights = replies.edit_scores(reply), settings.weights
    mean = sum(w * x for w, x in zip(weights, pair, strict=True)) / sum(weights)
    return {"score": mean, **dict(zip(names, pair, strict=True))}


def _pair_axes(reply: str, settings: Settings) -> Scores:
    found = replies.pair_scores(reply, [axis.capitalize() for axis in settings.axes])
    return {"score": sum(found.values()) / len(found), **found}


def _flex(reply: str, settings: Settings) -> Scores:
    """(w_o overall + w_d mean category) / (w_o + w_d).

    If no category can be read, it is the overall winner alone.
    """
    found = replies.flex(reply)
    categories = [p for name, p in found.items() if name != "overall" and p is not None]
    overall, (w_o, w_d) = found["overall"], settings.weights
    assert overall is not None
    if not categories:
        return {"score": overall, "overall": overall}
    score = (w_o * overall + w_d * sum(categories) / len(categories)) / (w_o + w_d)
    return {"score": score, "overall": overall}


def _one(read: Callable[[str], float]) -> Read:
    """Make a parser of one number."""
    return lambda reply, settings: {"score": read(reply)}


READERS: dict[str, Read] = {
    "point_v15": _one(lambda reply: replies.final_score(reply, 1, 5) / 5),
    "mix_score": _one(lambda reply: replies.final_score(reply, 0, 5)),
    "mix_semantic": _semantic,
    "point_v2": _axes,
    "point_video": _video,
    "edit_quality": partial(_edit, names=("naturalness", "no_artifacts")),
    "edit_instruction": partial(_edit, names=("success", "restraint")),
    "pair_v1": _one(replies.verdict),
    "pair_v2": _pair_axes,
    "think": _one(replies.tagged_verdict),
    "flex": _flex,
    "edit_pair": _one(replies.verdict),
}

REWARD = UnifiedReward
