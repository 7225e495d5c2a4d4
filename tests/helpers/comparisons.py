"""Flat pictures, and a judge that compares them by their brightness."""

import math

import torch

from flowrl import rewards
from flowrl.types import MediaContext


def pictures(*values):
    """One flat 4 x 4 picture a value, so that its brightness is that value."""
    return torch.tensor(values)[:, None, None, None].expand(-1, 3, 4, 4).contiguous()


def context(*group):
    return MediaContext(group=torch.tensor(group))


def brightness(media, prompts, context=None):
    return media.flatten(1).mean(1)


class Judge:
    """Prefers the brighter picture, adds `bias` to what is shown first, fails below `blind`."""

    def __init__(self, bias=0.0, blind=-1.0):
        self.bias, self.blind, self.calls = bias, blind, []

    def compare(self, media_a, media_b, prompts, context):
        a, b = brightness(media_a, prompts), brightness(media_b, prompts)
        self.calls.append((a.tolist(), b.tolist(), list(prompts), context))
        answer = 0.5 + (a - b) / 4 + self.bias
        return answer.masked_fill((a < self.blind) | (b < self.blind), math.nan)


def win_rate(judge=brightness, **settings):
    return rewards.load("win_rate", judge=judge, **settings)
