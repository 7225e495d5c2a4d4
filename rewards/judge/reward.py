"""Base classes of rewards that ask a judge: scores, frames of a video, prompt texts."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from flowrl.data.media import to_pil
from flowrl.rewards.core import weights
from flowrl.rewards.core.failures import Problem
from flowrl.rewards.core.reward import Reward
from flowrl.rewards.judge import client
from flowrl.rewards.judge.client import JudgeClient, Message, NoReply, picture, text
from flowrl.rewards.judge.completion import Reply
from flowrl.rewards.judge.replies import UnreadableReply
from flowrl.types import MediaContext

# places of the caption in a prompt text: {prompt}, or {} as in some references
PLACE = re.compile(r"\{(?:prompt|request|instruction)?\}")
Scores = dict[str, float]


class JudgeReward(Reward):
    """Scores that a judge states; a sample without a readable reply is NaN.

    A subclass says in `ask` what the judge is asked and how replies are read. fields: fields of its
    requests besides the question. problem: the first failure of the last call.
    """

    Settings = client.Settings
    reads_prompt = True
    networks = False  # the judge's network is on a server
    fields: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, settings: Any = None):
        super().__init__(settings)
        self.judge = JudgeClient(self.settings, reward=self.name, fields=self.fields)

    def ask(
        self, media: Tensor, prompts: list[str], context: MediaContext | None
    ) -> list[Scores | NoReply]:
        """The scores of each sample, "score" among them, or why there are none."""
        raise NotImplementedError

    def __call__(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> Tensor:
        return self.scores(self.ask(media, prompts, context), media)

    def scores(self, found: Sequence[Scores | NoReply], media: Tensor) -> Tensor:
        """The "score" of every sample -> (B,) fp32, NaN where there is none; `problem` says why."""
        failures = [scores for scores in found if isinstance(scores, NoReply)]
        kinds = Counter(failure.kind for failure in failures)
        self.problem = Problem(str(failures[0]), kinds) if failures else None
        return column(found, "score", media)

    def begin(self, run: Path) -> None:
        """A run asks nothing of a judge that is not there."""
        super().begin(run)
        self.judge.greet()

    def uncached(self) -> AbstractContextManager[None]:
        return self.judge.uncached()

    def parts_of(
        self, media: Tensor, prompts: list[str], context: MediaContext | None
    ) -> dict[str, Tensor]:
        """The other scores, for `parts`; kept replies are not asked for again."""
        found = self.ask(media, prompts, context)
        readable = [scores for scores in found if isinstance(scores, dict)]
        names = dict.fromkeys(name for scores in readable for name in scores)
        return {name: column(found, name, media) for name in names if name != "score"}

    def pictures(self, media: Tensor, count: int = 1, *, ends: bool = True) -> list[dict[str, Any]]:
        """An image (3, H, W), or frames of a video (F, 3, H, W), as parts of a message.

        count, ends: how many frames of a video, and which, as for `spaced`.
        """
        frames = media[None] if media.ndim == 3 else media[spaced(len(media), count, ends=ends)]
        return [picture(self.adapted(image), self.settings.side) for image in to_pil(frames)]

    def adapted(self, image: Image.Image) -> Image.Image:
        """A picture as this judge's reference shows it."""
        return image


class WritingJudge(JudgeReward):
    """A judge that writes its verdict; a subclass says in `read` how its texts are read."""

    def read(self, reply: Reply) -> Scores | None:
        """Scores that a reply states; None: the reply is not final. UnreadableReply: it states no
        score."""
        raise NotImplementedError

    def read_reply(self, reply: str) -> float:
        """The score that a reply of this text gives; for a judge of pairs, the preference.

        NaN if the reply gives none.
        """
        try:
            found = self.read(Reply(text=reply, tokens=None))
        except UnreadableReply:
            return math.nan
        return math.nan if found is None else found["score"]


class PairJudge(WritingJudge):
    """A judge that scores samples, or says which of two is better: `compare`, for win_rate.

    A subclass says in `asked` what the judge is asked. alone: why it scores no sample alone, as
    loaded.
    """

    alone: str | None = None

    def only_compares(self, setting: str, remedy: str) -> None:
        """Declare that this judge only compares; a subclass calls it where its settings ask about
        two at a time."""
        self.alone = (
            f"{self.name} with {setting} says which of two is better and scores none alone; make it"
            f" the judge of win_rate, or {remedy}"
        )
        self.compare = self._compare

    def asked(
        self, shown: list[Tensor], prompts: list[str], context: MediaContext | None
    ) -> list[Any]:
        """The scores of each sample, or why there are none (NoReply).

        shown: the media that are judged, one or two of (n, 3, H, W) or (n, F, 3, H, W).
        """
        raise NotImplementedError

    def ask(
        self, media: Tensor, prompts: list[str], context: MediaContext | None
    ) -> list[Scores | NoReply]:
        if self.alone:
            raise ValueError(self.alone)
        return self.asked([media], prompts, context)

    def _compare(
        self,
        media_a: Tensor,
        media_b: Tensor,
        prompts: list[str],
        context: MediaContext | None = None,
    ) -> Tensor:
        """(n, 3, H, W) or (n, F, 3, H, W) twice -> (n,) fp32 probability that a is better.

        It is 1, 0.5, 0 or between; NaN where comparing failed.
        """
        with torch.no_grad():
            return self.scores(self.asked([media_a, media_b], prompts, context), media_a)


def column(found: Sequence[Scores | NoReply], name: str, media: Tensor) -> Tensor:
    """One score of every sample -> (B,) fp32 on media's device, NaN where there is none."""
    values = [
        scores.get(name, math.nan) if isinstance(scores, dict) else math.nan for scores in found
    ]
    return torch.tensor(values, dtype=torch.float32, device=media.device)


def spaced(total: int, count: int, *, ends: bool = True) -> list[int]:
    """Places of `count` of `total` frames, all if there are fewer.

    ends: frames from the first to the last; otherwise every total/count-th from the first.
    """
    if total <= count:
        return list(range(total))
    if ends:
        return np.linspace(0, total - 1, count).astype(int).tolist()
    return [i * total // count for i in range(count)]


def user(*parts: dict[str, Any]) -> Message:
    return {"role": "user", "content": list(parts)}


def filled(template: str, prompt: str) -> str:
    """A text with the prompt at every {prompt}, {}, {request} or {instruction}; others stay."""
    return PLACE.sub(lambda _: prompt, template)


def interleaved(
    template: str, prompt: str, pictures: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The parts of a text with a picture at every <image>; an <image> in the prompt stays text."""
    pieces = template.split("<image>")
    parts = [text(filled(pieces[0], prompt))]
    for shown, piece in zip(pictures, pieces[1:], strict=True):
        parts += [shown, text(filled(piece, prompt))]
    return [part for part in parts if part.get("text") != ""]


def read_template(
    path: str | None,
    *,
    reward: str,
    setting: str,
    origin: str,
    sha256: Sequence[str] = (),
    places: bool = True,
    images: int | None = None,
) -> str:
    """A judge's prompt text from a user's file.

    sha256: beginnings of the digests that are allowed; (): any text. places: whether the text must
    have a place for the caption. images: how many <image> marks it must have.
    """
    found = _first_that_fits(path, sha256 or ("",), reward=reward, setting=setting, origin=origin)
    name = f"reward.{reward}.{setting}={path}"
    if places and not PLACE.search(found):
        raise ValueError(f"{name} does not say where the caption goes: write {{prompt}} there")
    if images is not None and (marks := found.count("<image>")) != images:
        raise ValueError(
            f"{name} has {marks} <image> marks; {images} pictures are shown, so write <image>"
            f" {images} times"
        )
    return found


def _first_that_fits(path: str | None, sha256: Sequence[str], **said: str) -> str:
    """The text of a file whose sha256 starts with one of these; else the error of the last one."""
    for place, prefix in enumerate(sha256, 1):
        try:
            return weights.template(path, sha256=prefix, **said)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"reward.{said['reward']}.{said['setting']}={path} is not a text file: {error}"
            ) from error
        except ValueError:
            if place == len(sha256):
                raise
    raise AssertionError("no sha256")


def needed(found: Mapping[str, float], names: Sequence[str], reply: str) -> list[float]:
    """The scores of these names; a missing one -> UnreadableReply."""
    missing = [name for name in names if name not in found]
    if missing:
        raise UnreadableReply(f"no {', '.join(missing)} score in the reply {reply[:80]!r}")
    return [found[name] for name in names]
