"""What the tests of judge rewards share: pictures, prompts, and texts in place of the models'."""

import numpy as np
import torch
from judge_server import pictures

from flowrl import rewards

PROMPTS = ["a cat", "a {prompt} of <image>", "two red circles"]
LEVELS = [51, 102, 153]  # grey, in bytes: 0.2, 0.4 and 0.6
FLAT = torch.stack([torch.full((3, 8, 12), level / 255) for level in LEVELS])
TEXTS = {
    "question": "Judge [{prompt}]. Thanks.",
    "critique": "Request {prompt}: see <image>. Judge.",
    "system": "You judge.",
    "edit": "Request {prompt}: <image> became <image>.",
    "quality": "How natural is it?",
}


def loader(folder):
    """A function that loads a judge with texts of our own, written to folder."""
    for name, content in TEXTS.items():
        (folder / name).write_text(content)

    def load(name, server, *, template="question", **settings):
        if name in ("unifiedreward", "rationalrewards"):
            settings |= {"template": str(folder / template), "own_template": True}
        if name == "rationalrewards":
            settings |= {"system": str(folder / "system")}
        return rewards.load(name, **server.settings(), **settings)

    return load


def levels(body):
    """The grey level of each picture in a request: which ones they are, in their order."""
    return [int(np.asarray(image)[0, 0, 0]) for image in pictures(body)]
