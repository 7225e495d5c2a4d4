"""A masked language model that learns to add: tokens of text, and a reward that checks the answer.

    python scripts/examples/arithmetic.py [SEED ...] [--method diffu_grpo]

A prompt is "31+45=", a sum without carries, and the answer is two digits, "76", which a BERT-like
network fills in random order. It is pretrained on answers of which three in five are wrong, so
that it knows sums but is seldom right. The reward checks the answer; trace_rl, or diffu_grpo (d1),
trains it. Neither pretraining nor alignment sees a fifth of the sums, on which the printed shares
of right answers are measured.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import flowrl

DIGITS, MASK, PLUS, EQUALS = 10, 10, 11, 12  # numbers of tokens: the digits come first
ANSWER = 2  # places of an answer
RIGHT = 0.4  # share of right answers in the texts of pretraining
PAIRS = [(a, b) for a in range(100) for b in range(100) if a % 10 + b % 10 < 10 and a + b < 100]
HELD_OUT = {(a, b) for a, b in PAIRS if (7 * a + 13 * b) % 5 == 0}  # about a fifth of the sums


class Bert(nn.Module):
    """Logits of the answer's digits from all tokens of prompt and answer."""

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(13, width)
        self.places = nn.Parameter(0.1 * torch.randn(6 + ANSWER, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = nn.Linear(width, DIGITS)

    def forward(self, tokens: Tensor, cond: Tensor) -> Tensor:
        """tokens (n, 2) of the answer, cond (n, 6) of the prompt -> (n, 2, 10)."""
        h = self.tokens(torch.cat([cond, tokens], 1)) + self.places
        return self.out(self.layers(h)[:, -ANSWER:])


def text(a: int, b: int) -> str:
    return f"{a:02d}+{b:02d}="


def cond(texts: list[str]) -> Tensor:
    """Prompts -> tokens (P, 6)."""
    known = {"+": PLUS, "=": EQUALS}
    return torch.tensor([[known[c] if c in known else int(c) for c in text] for text in texts])


def digits(numbers: Tensor) -> Tensor:
    """Numbers (n,) below 100 -> their digits (n, 2)."""
    return torch.stack([numbers // 10, numbers % 10], 1)


def answers(sums: Tensor) -> Tensor:
    """Answers (n,) as in the texts of pretraining: two in five are right, and the others are
    any number."""
    wrong = torch.randint(100, sums.shape)
    return torch.where(torch.rand(sums.shape) < RIGHT, sums, wrong)


def pretrained(seed: int, updates: int = 2500) -> Bert:
    """The network before alignment: masked cross-entropy, with one or both of the places masked."""
    torch.manual_seed(seed)
    module = Bert()
    pairs = torch.tensor([pair for pair in PAIRS if pair not in HELD_OUT])
    prompts = cond([text(a, b) for a, b in pairs.tolist()])
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, updates)
    for _ in range(updates):
        rows = torch.randint(len(pairs), (128,))
        target = digits(answers(pairs[rows].sum(1)))
        count = torch.randint(1, ANSWER + 1, (128, 1))
        masked = torch.rand(128, ANSWER).argsort(1) < count
        logits = module(torch.where(masked, MASK, target), prompts[rows])
        loss = nn.functional.cross_entropy(logits[masked], target[masked])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return module


@flowrl.reward(scale="1 where the answer is right, else 0")
def correct(media, prompts, context=None):
    """Tokens (B, 2) as fp32 -> (B,)."""
    sums = torch.tensor([int(prompt[:2]) + int(prompt[3:5]) for prompt in prompts])
    return (media.long() == digits(sums)).all(1).float()


def policy(seed: int = 0) -> flowrl.Policy:
    return flowrl.load_policy(
        pretrained(seed), shape=(ANSWER,), kind="tokens", mask=MASK, cond=cond
    )


METHODS = {
    "trace_rl": {"name": "grpo", "sde": "random_order", "ratio": "token", "clip": [0.2, 0.2]},
    "diffu_grpo": {"name": "remask", "mask": "all", "clip": [0.5, 0.5], "std": None},
}


def settings(seed: int, output: Path, method: str = "trace_rl") -> dict:
    return {
        "algorithm": METHODS[method],
        "batch": {"prompts": 32, "group": 8, "updates": 1, "micro": 512},
        "sampler": {"steps": 2, "eta": 1.0, "guidance": "none", "init_noise": "group"},
        "eval": {"every": 0, "images": 512, "steps": 2, "guidance": "none"},
        "ema": {"decay": 0.0},
        "guard": {"check_rewards": False},
        "train": {"mode": "full"},
        "optimizer": {"lr": 1e-3},
        "iterations": 60,
        "seed": seed,
        "output": str(output),
    }


def align(
    seed: int, output: Path, module: nn.Module | None = None, method: str = "trace_rl"
) -> tuple[float, float]:
    """Share of right answers to held-out sums before and after alignment."""
    own = flowrl.load_policy(
        module or pretrained(seed), shape=(ANSWER,), kind="tokens", mask=MASK, cond=cond
    )
    order = torch.randperm(len(PAIRS), generator=torch.Generator().manual_seed(0)).tolist()
    pairs = [PAIRS[i] for i in order]
    prompts = {
        "train": [text(*pair) for pair in pairs if pair not in HELD_OUT],
        "eval": [text(*pair) for pair in pairs if pair in HELD_OUT][:512],
    }
    run = flowrl.train(
        settings(seed, output, method),
        policy=own,
        rewards={"correct": correct},
        prompts=prompts,
    )
    shares = [row["metrics"]["correct"]["mean"] for row in run.evaluation["rows"]]
    return shares[0], shares[-1]


if __name__ == "__main__":
    asked = argparse.ArgumentParser()
    asked.add_argument("seeds", nargs="*", type=int, default=[0])
    asked.add_argument("--method", choices=METHODS, default="trace_rl")
    words = asked.parse_args()
    for seed in words.seeds:
        began = time.perf_counter()
        network = pretrained(seed)
        middle = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            before, after = align(seed, Path(folder) / "run", network, words.method)
        end = time.perf_counter()
        print(
            f"seed {seed}: pretrained in {middle - began:.0f} s, {before:.3f} right;"
            f" aligned in {end - middle:.0f} s, {after:.3f} right"
        )
