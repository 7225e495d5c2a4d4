"""A path from a start to a goal: an nn.Module of one's own, aligned with a collision reward.

    python scripts/examples/trajectory.py

A path is (T, 2), points in the plane; start and goal are in the text. The module is pretrained in
seconds on curves that know nothing of obstacles. The reward is 1 for a path that hits none of the
three, less a quarter of its detour. A third of the starts and goals are never trained on. Prints
the reward before and after DDPO and NFT, three seeds, in about two minutes on one core.
"""

from __future__ import annotations

import re

import torch
from small_flow import Example, Flow, compare, pretrain
from torch import Tensor, nn

import flowrl
from flowrl.rewards import Reward

T = 16
# x, y, radius
OBSTACLES = torch.tensor([[-0.1, 0.3, 0.25], [0.15, -0.35, 0.25], [0.55, 0.45, 0.15]])
NUMBER = re.compile(r"-?\d+\.\d+")


def ends(texts: list[str]) -> Tensor:
    """Texts -> (P, 4): x and y of the start, x and y of the goal."""
    return torch.tensor([[float(number) for number in NUMBER.findall(text)] for text in texts])


def text_of(place: Tensor) -> str:
    x0, y0, x1, y1 = place.tolist()
    return f"from ({x0:.2f}, {y0:.2f}) to ({x1:.2f}, {y1:.2f})"


def places(n: int, generator: torch.Generator | None = None) -> Tensor:
    """n starts on the left and goals on the right, (n, 4)."""
    heights = torch.rand(n, 2, generator=generator) * 1.6 - 0.8
    one = torch.ones(n)
    return torch.stack([-one, heights[:, 0], one, heights[:, 1]], 1)


def curves(n: int) -> tuple[Tensor, Tensor]:
    """Paths (n, T, 2) with bends of any size, and their ends (n, 4)."""
    found, time = places(n), torch.linspace(0, 1, T)[None, :, None]
    straight = found[:, None, :2] * (1 - time) + found[:, None, 2:] * time
    bend = 0.35 * torch.randn(n, 1, 2) * torch.sin(torch.pi * time)
    sway = 0.2 * torch.randn(n, 1, 2) * torch.sin(2 * torch.pi * time)
    return straight + bend + sway, found


def pretrained(seed: int, updates: int = 1000) -> Flow:
    """The module before alignment."""
    torch.manual_seed(seed)
    module = Flow(T, 2, 4)
    pretrain(module, curves, updates=updates)
    return module


def whole(media: Tensor, texts: list[str]) -> Tensor:
    """Paths (B, T, 2) with their start and goal -> (B, T + 2, 2)."""
    place = ends(texts).to(media)
    return torch.cat([place[:, None, :2], media, place[:, None, 2:]], 1)


def free(media: Tensor, texts: list[str]) -> Tensor:
    """1 where no point of a path, four to a segment, is in an obstacle, else 0; (B,)."""
    path = whole(media, texts)
    points = torch.cat(
        [path[:, :-1] + share * path.diff(dim=1) for share in (0, 0.25, 0.5, 0.75)], 1
    )
    obstacles = OBSTACLES.to(media)
    distance = (points[:, :, None] - obstacles[:, :2]).norm(dim=-1)
    return (distance > obstacles[:, 2]).flatten(1).all(1).float()


def detour(media: Tensor, texts: list[str]) -> Tensor:
    """Length of a path over the straight distance, minus 1; (B,)."""
    place = ends(texts).to(media)
    straight = (place[:, 2:] - place[:, :2]).norm(dim=1)
    return whole(media, texts).diff(dim=1).norm(dim=-1).sum(1) / straight - 1


class Safe(Reward):
    """No collision, and short."""

    name, takes = "safe", "any"
    scale = "1 without a collision, else 0, minus a quarter of the detour"

    def __call__(self, media, prompts, context=None):
        """Paths (B, T, 2) -> (B,)."""
        return free(media, prompts) - 0.25 * detour(media, prompts)

    def parts(self, media, prompts, context=None):
        return {"free": free(media, prompts), "detour": detour(media, prompts)}


def policy(module: nn.Module) -> flowrl.Policy:
    return flowrl.load_policy(module, shape=(T, 2), cond=ends)


def example() -> Example:
    chosen = places(18, torch.Generator().manual_seed(7))
    return Example(
        pretrained=pretrained,
        policy=policy,
        rewards={"safe": Safe()},
        prompts=[
            {"prompt": text_of(place), "task": "trained" if i % 3 else "others"}
            for i, place in enumerate(chosen)
        ],
        shown=["safe", "safe/free", "safe/detour"],
    )


if __name__ == "__main__":
    compare(example())
