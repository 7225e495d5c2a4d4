"""A motion from a text: an nn.Module of one's own, aligned with a retrieval reward.

    python scripts/examples/motion.py

A motion is (T, D): D joint angles at T moments. The module is pretrained in seconds on recordings
of which half are failed takes. The reward asks a small frozen embedder which of all texts a motion
belongs to. Four of the twelve texts are never trained on. Prints the reward before and after DDPO
and NFT, three seeds, in about two minutes on one core.
"""

from __future__ import annotations

import torch
from small_flow import Example, Flow, compare, pretrain
from torch import Tensor, nn

import flowrl
from flowrl.rewards import Reward

T, D = 24, 4
KINDS = ("walk", "wave", "jump", "turn")
SPEEDS = ("slow", "steady", "fast")
TEXTS = [f"a {speed} {kind}" for kind in KINDS for speed in SPEEDS]
OTHERS = TEXTS[1::3]  # "steady": never trained on
FAILED = 0.5  # of the takes that the module was pretrained on


def motions(labels: Tensor) -> Tensor:
    """Labels (n,) of TEXTS -> motions (n, T, D): each kind has its joints and each speed its
    frequency; amplitude, phase and noise differ from motion to motion."""
    n, time = len(labels), torch.linspace(0, 1, T)[None, :, None]
    kind, speed = labels // len(SPEEDS), labels % len(SPEEDS)
    frequency = (1 + speed)[:, None, None] + 0.1 * torch.randn(n, 1, 1)
    phase = 0.5 * torch.randn(n, 1, 1) + torch.pi / 2 * torch.arange(D)
    waves = torch.sin(2 * torch.pi * frequency * time + phase)
    joints = 0.25 + 0.75 * torch.eye(D)[kind][:, None]
    amplitude = 1 + 0.2 * torch.randn(n, 1, 1)
    return amplitude * joints * waves + 0.1 * torch.randn(n, T, D)


def cond(texts: list[str]) -> Tensor:
    """Texts -> (P, 12): which of the twelve."""
    return torch.eye(len(TEXTS))[[TEXTS.index(text) for text in texts]]


def decode(x: Tensor) -> Tensor:
    """Latents (n, T, D) -> angles in radians."""
    return x / 2


def recorded(n: int) -> tuple[Tensor, Tensor]:
    """Latents of n recordings and their conditions. In failed takes all joints shake alike."""
    labels = torch.randint(len(TEXTS), (n,))
    time = torch.linspace(0, 1, T)[None, :, None]
    shaking = 0.7 * torch.sin(25 * time + 6.3 * torch.rand(n, 1, 1)).expand(n, T, D)
    failed = (torch.rand(n) < FAILED)[:, None, None]
    return 2 * torch.where(failed, shaking, motions(labels)), torch.eye(len(TEXTS))[labels]


def pretrained(seed: int, updates: int = 1000) -> Flow:
    """The module before alignment."""
    torch.manual_seed(seed)
    module = Flow(T, D, len(TEXTS))
    pretrain(module, recorded, updates=updates)
    return module


class Embedder(nn.Module):
    """Motions and texts into one space, in which a motion is near its text."""

    def __init__(self) -> None:
        super().__init__()
        self.motion = nn.Sequential(nn.Linear(T * D, 64), nn.SiLU(), nn.Linear(64, 16))
        self.text = nn.Embedding(len(TEXTS), 16)

    def forward(self, media: Tensor) -> Tensor:
        """Motions (n, T, D) -> logits (n, 12) of all texts: cosines over a temperature of 0.1."""
        motion = nn.functional.normalize(self.motion(media.flatten(1)), dim=1)
        return motion @ nn.functional.normalize(self.text.weight, dim=1).T / 0.1


def embedder(updates: int = 400) -> Embedder:
    """Trained on motions with their right texts, then frozen."""
    torch.manual_seed(99)
    model = Embedder()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(updates):
        labels = torch.randint(len(TEXTS), (256,))
        loss = nn.functional.cross_entropy(model(motions(labels)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.requires_grad_(False)


class Retrieval(Reward):
    """Probability of a motion's own text among all texts."""

    name, scale, takes, range = "retrieval", "probability of the right text", "any", (0.0, 1.0)

    def __init__(self) -> None:
        super().__init__()
        self.embedder = embedder()

    def __call__(self, media, prompts, context=None):
        """Motions (B, T, D) -> (B,)."""
        return self._right(self.embedder(media).softmax(1), prompts)

    def parts(self, media, prompts, context=None):
        """found: whether the right text comes first."""
        logits = self.embedder(media)
        first = nn.functional.one_hot(logits.argmax(1), len(TEXTS)).float()
        return {"found": self._right(first, prompts)}

    def _right(self, values: Tensor, prompts: list[str]) -> Tensor:
        """Values (B, 12) at the prompts' own texts."""
        return values[range(len(prompts)), [TEXTS.index(text) for text in prompts]]


def policy(module: nn.Module) -> flowrl.Policy:
    return flowrl.load_policy(module, shape=(T, D), cond=cond, decode=decode)


def example() -> Example:
    prompts = [{"prompt": t, "task": "others" if t in OTHERS else "trained"} for t in TEXTS]
    return Example(
        pretrained=pretrained,
        policy=policy,
        rewards={"retrieval": Retrieval()},
        prompts=prompts,
        shown=["retrieval", "retrieval/found"],
    )


if __name__ == "__main__":
    compare(example())
