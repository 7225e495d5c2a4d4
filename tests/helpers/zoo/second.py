"""Other arguments for the cases of the zoo: what a pipeline is asked for decides what its loop
does, and one that passes with some may be refused with others.

wide: twice as wide, about twice the frames, another guidance scale beside a negative prompt, longer
texts. still: twice as high, one frame, without guidance, shorter texts.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from PIL import Image

from zoo import cases
from zoo.case import Case

SETS = ("wide", "still")
FRAMES = ("num_frames", "frames", "video_length")
SCALES = ("true_cfg_scale", "guidance_scale")
LONGEST = 512  # tokens; after so many, some pipelines look for those of a picture
SIZE = ("height", "width")
# arguments that a class, or these tiny parts of it, take in one way alone
FIXED: dict[str, tuple[str, ...]] = {
    "hidream": ("max_sequence_length",),  # positions of CLIP's texts
    "auraflow": SIZE,  # its table of positions
    "hunyuandit": SIZE,  # its network is made for one size
    "latte": ("video_length",),  # its network is made for one length
    "allegro": ("num_frames", *SIZE),  # its VAE takes tiles of 8 frames, its network one size
    "framepack": ("num_frames",),  # more frames are a second window, which is refused
    "helios": ("num_frames",),  # more frames are a second chunk, which has a loop of its own
    "nucleus": ("max_sequence_length",),  # a multiple of 8
}
# cases that are refused with other arguments, though they pass with their own
REFUSED = {
    "ltx2_i2v/wide": "with guidance, each token has a time in both branches; set guidance_scale=1",
}


def second() -> list[str]:
    """NAME/SET of both sets, for each case of a classic pipeline that passes with its own
    arguments."""
    names = [n for n, case in cases().items() if not case.refused and not n.startswith("modular_")]
    return [f"{name}/{kind}" for name in names for kind in SETS]


def changed(name: str, pipe: Any) -> Case:
    """The case NAME/SET, for a pipeline that it made."""
    name, _, kind = name.partition("/")
    case, fixed, wide = cases()[name], FIXED.get(name, ()), kind == "wide"
    taken = inspect.signature(type(pipe).__call__).parameters
    call, given = dict(case.call), case.conditions[0] if case.conditions else {}
    side = "width" if wide else "height"
    if side in call and side not in fixed:
        call[side] *= 2
    for frames in (key for key in FRAMES if key in call and key not in fixed):
        n = call[frames]
        if wide or not given:  # one frame alone is the picture
            call[frames] = 2 * n - n % 2 if wide else 1
    length = call.get("max_sequence_length", LONGEST)
    if length < LONGEST and "max_sequence_length" not in fixed:
        call["max_sequence_length"] = length + (4 if wide else -4)
    if scale := next((key for key in SCALES if key in taken), None):
        call[scale] = 2.5 if wide else 1.0
    call.pop("negative_prompt", None)
    if wide and "negative_prompt" in taken:
        call["negative_prompt"] = "a yellow square"
    frames = next((call[key] for key in FRAMES if key in call), None)
    conditions = tuple(
        {
            key: value if side in fixed else _resized(value, wide, frames)
            for key, value in own.items()
        }
        for own in case.conditions
    )
    return dataclasses.replace(case, call=call, conditions=conditions)


def _resized(value: Any, wide: bool, frames: int | None) -> Any:
    """A picture, or a clip of so many frames, for media of twice the width or the height."""
    if isinstance(value, list):
        count = frames if frames and len(value) > 1 else len(value)
        return [_resized(value[k % len(value)], wide, None) for k in range(count)]
    assert isinstance(value, Image.Image)
    w, h = value.size
    return value.resize((2 * w, h) if wide else (w, 2 * h), Image.BICUBIC)
