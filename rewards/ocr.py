"""Is the text that a prompt asks for in the picture? (Flow-GRPO, arXiv:2505.05470)

The reward is made of text recognition and an edit distance. Reference: yifan123/flow_grpo,
flow_grpo/ocr.py, with the same formula: spaces removed, lower case; distance 0 if the target is
contained in the text that was read, else Levenshtein's, at most the target's length; reward
1 - distance / length. Departures:
* the engine is RapidOCR by default (PP-OCRv4 by onnxruntime, its models inside the package);
  engine=paddle is the reference's;
* an engine that fails makes the sample NaN, not 0; a prompt with an unclosed quote or nothing
  between its quotes is refused;
* engines get BGR arrays, as they expect (the reference gives RGB);
* a video gets the mean over its frames, by the same formula (the reference drops frames of reward 0
  and does not look for containment).
"""

from __future__ import annotations

import logging
import math
import queue
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import pydantic
import torch
from torch import Tensor

from flowrl.data.media import to_uint8
from flowrl.rewards.core.pictures import frames_of, mean_of_frames
from flowrl.rewards.core.reward import WRITTEN, Reward
from flowrl.rewards.core.settings import Settings as Base
from flowrl.types import MediaContext

logger = logging.getLogger("flowrl")

Engine = Callable[[np.ndarray], str]  # function: (H, W, 3) uint8 BGR -> all text in the picture


class Settings(Base):
    engine: Literal["rapidocr", "paddle"] = pydantic.Field(
        "rapidocr", description="The engine that reads: RapidOCR (extra ocr) or PaddleOCR."
    )
    target: Literal["quoted", "prompt"] = pydantic.Field(
        "quoted",
        description=(
            "The text that should be read: that between the first double quotes, or the whole"
            " prompt (Flow-Factory)."
        ),
    )
    threads: int = pydantic.Field(
        4,
        ge=1,
        le=256,
        description="Pictures read at the same time, each by its own engine on one core.",
    )
    every: int = pydantic.Field(
        1, ge=1, description="Read every n-th frame of a video (Flow-GRPO: 4)."
    )


class Ocr(Reward):
    """1 - distance / length of the text asked for, in [0, 1]; 1 if it was read anywhere.

    meta["text"] overrides the prompt.
    """

    Settings = Settings
    name = "ocr"
    networks = False
    scale = (
        "0 to 1: 1 if the text asked for was read, else 1 minus the edit distance over its length,"
        " at least 0"
    )
    range = (0.0, 1.0)
    verifies = frozenset(WRITTEN)

    def __init__(self, settings: Any = None):
        super().__init__(settings)
        s = self.settings
        self._make: Callable[[], Engine] = _rapidocr if s.engine == "rapidocr" else _paddle
        self._idle: queue.LifoQueue[Engine] = queue.LifoQueue()
        self._idle.put(self._make())  # made now, so that a missing package is reported at start-up
        self._pool = ThreadPoolExecutor(s.threads) if s.threads > 1 else None

    def complaint(self, meta: Mapping[str, Any]) -> str | None:
        try:
            self.target(meta.get("prompt", ""), meta)
        except ValueError as error:
            return f"cannot be judged by reading: {error}"
        return None

    def target(self, prompt: str, meta: Mapping[str, Any]) -> str:
        """The text that should be read, without spaces and in lower case; no text -> ValueError."""
        text = meta.get("text")
        if text is None:
            text = prompt if self.settings.target == "prompt" else _quoted(prompt)
        if not isinstance(text, str) or not plain(text):
            raise ValueError(
                f'the text asked for by "{prompt}" is {text!r}; give it at least one character that'
                " is not a space"
            )
        return plain(text)

    def __call__(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> Tensor:
        known = context is not None and context.meta is not None
        metas = context.meta if known else [{}] * len(prompts)
        targets = [self.target(prompt, meta) for prompt, meta in zip(prompts, metas, strict=True)]
        shown = media[:, :: self.settings.every] if media.ndim == 5 else media
        # RGB to BGR
        frames = to_uint8(frames_of(shown))[:, [2, 1, 0]].permute(0, 2, 3, 1).cpu().numpy()
        run = map if self._pool is None else self._pool.map
        texts = run(self.read, frames)
        each = len(frames) // len(targets)
        values = [
            math.nan if text is None else score(text, targets[i // each])
            for i, text in enumerate(texts)
        ]
        return mean_of_frames(torch.tensor(values, device=media.device), media)

    def read(self, picture: np.ndarray) -> str | None:
        """All text in a picture (H, W, 3) uint8 BGR; None where the engine failed."""
        try:  # an engine keeps the size of the picture while it reads: no two threads share one
            engine = self._idle.get_nowait()
        except queue.Empty:
            engine = self._make()
        try:
            return engine(np.ascontiguousarray(picture))
        except Exception as error:  # engines fail in their own ways; the sample is NaN, and counted
            logger.warning(
                f"ocr: {self.settings.engine} failed on a picture of shape {picture.shape}:"
                f" {type(error).__name__}: {error}"
            )
            return None
        finally:
            self._idle.put(engine)


def score(read: str, target: str) -> float:
    """Flow-GRPO's reward for the text that was read, given the plain target."""
    read = plain(read)
    distance = 0 if target in read else min(levenshtein(read, target), len(target))
    return 1 - distance / len(target)


def plain(text: str) -> str:
    """The text without spaces, in lower case."""
    return text.replace(" ", "").lower()


def levenshtein(a: str, b: str) -> int:
    """Fewest insertions, deletions and substitutions of one character that turn a into b."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y))
    return row[-1]


def _quoted(prompt: str) -> str:
    """The text between the first double quotes; none -> ValueError."""
    parts = prompt.split('"')
    if len(parts) < 3:
        has = "no double quotes" if len(parts) == 1 else "a double quote that is never closed"
        remedy = (
            'put the text to be drawn between two ("), give each prompt a "text", or set'
            " reward.ocr.target=prompt"
        )
        raise ValueError(f"the prompt {prompt!r} has {has}; {remedy}")
    return parts[1]


def _rapidocr() -> Engine:
    """Text lines by PP-OCRv4 on onnxruntime."""
    from rapidocr_onnxruntime import RapidOCR

    # one core for each engine, so that sums are in one order, whatever `threads` is
    engine = RapidOCR(intra_op_num_threads=1, inter_op_num_threads=1)

    def read(picture: np.ndarray) -> str:
        lines, _ = engine(picture, use_cls=False)  # no angle classifier, as in the reference
        return "".join(text for _, text, confidence in lines or [] if confidence > 0)

    return read


def _paddle() -> Engine:
    import paddleocr

    if hasattr(paddleocr.PaddleOCR, "predict"):
        return _paddle_3(paddleocr.PaddleOCR)
    return _paddle_2(paddleocr.PaddleOCR)


def _paddle_3(engine_class: Callable[..., Any]) -> Engine:
    engine = engine_class(
        lang="en",
        use_doc_orientation_classify=False,
        use_doc_unwarping=False,
        use_textline_orientation=False,
    )

    def read(picture: np.ndarray) -> str:
        return "".join(
            text
            for page in engine.predict(picture)
            for text, confidence in zip(page["rec_texts"], page["rec_scores"], strict=True)
            if confidence > 0
        )

    return read


def _paddle_2(engine_class: Callable[..., Any]) -> Engine:
    """Text lines by PaddleOCR 2; the reference has 2.9.1."""
    engine = engine_class(lang="en", use_angle_cls=False, show_log=False)

    def read(picture: np.ndarray) -> str:
        lines = engine.ocr(picture, cls=False)[0]
        return "".join(text for _, (text, confidence) in lines or [] if confidence > 0)

    return read


REWARD = Ocr
