"""A masked generator of sixteen tokens, small enough to train in seconds."""

from types import SimpleNamespace

import torch
from torch import nn

import flowrl
from flowrl.rollouts.roll_out import roll_out as rolled_out
from flowrl.runtime.ledger import Ledger
from flowrl.types import PromptBatch

PLACES, VALUES = (4, 4), 5  # the mask token is 5
PROMPTS = ["zero", "one", "two"]


class TokenNet(nn.Module):
    """Logits of every place from all tokens and the prompt."""

    def __init__(self, width=16):
        super().__init__()
        self.tokens = nn.Embedding(VALUES + 1, width)
        self.prompt = nn.Embedding(len(PROMPTS) + 1, width)
        self.places = nn.Parameter(torch.randn(16, width) / 4)
        self.mix = nn.Linear(width, width)
        self.out = nn.Linear(width, VALUES)

    def forward(self, tokens, cond):
        """tokens (n, 4, 4) int64, cond (n,) -> logits (n, 4, 4, 5)."""
        h = self.tokens(tokens.flatten(1)) + self.places
        h = h + self.prompt(cond)[:, None] + self.mix(h.mean(1, keepdim=True)).tanh()
        return self.out(h.tanh()).unflatten(1, PLACES)


class Table(nn.Module):
    """Two places of two values, whose probabilities the tests know by hand."""

    def __init__(self):
        super().__init__()
        self.rest = nn.Parameter(torch.zeros(1))

    def forward(self, tokens, cond):
        """tokens (n, 2), 2 where masked -> logits (n, 2, 2)."""
        first = torch.tensor([[0.7, 0.3], [0.6, 0.4]]).expand(len(tokens), 2, 2).clone()
        after_0 = torch.tensor([[0.9, 0.1], [0.2, 0.8]])  # of place 1
        after_1 = torch.tensor([[0.8, 0.2], [0.1, 0.9]])  # of place 0
        known_0, known_1 = tokens[:, 0] < 2, tokens[:, 1] < 2
        first[known_0, 1] = after_0[tokens[known_0, 0]]
        first[known_1, 0] = after_1[tokens[known_1, 1]]
        return first.log() + self.rest


def table():
    return flowrl.load_policy(Table(), shape=(2,), kind="tokens", mask=2)


def texts():
    """The prompts of runs whose config names this file."""
    return PROMPTS


def cond(texts):
    """P texts -> (P,); the empty text has a number of its own."""
    return torch.tensor([PROMPTS.index(text) if text else len(PROMPTS) for text in texts])


def policy(seed=0, **options):
    torch.manual_seed(seed)
    return flowrl.load_policy(
        TokenNet(), shape=PLACES, kind="tokens", mask=VALUES, cond=cond, empty="", **options
    )


def roll_out(own, algorithm, *, copies=2, prompts=3, sampler=None, steps=3):
    """A rollout of the first prompts in iteration 0, `copies` samples of each."""
    sampler = sampler or SimpleNamespace(eta=1.0, init_noise="group")
    path = algorithm.plan(own.schedule(steps).sigmas, sampler=sampler, iteration=0, seed=0)
    batch = PromptBatch(text=PROMPTS[:prompts], ids=torch.arange(prompts), meta=[{}] * prompts)
    how = {"guidance": "none", "seed": 0, "iteration": 0, "micro": 64, "ledger": Ledger()}
    return rolled_out(own, batch, path, group=copies, **how)


@flowrl.reward(scale="share of the tokens that are the prompt's number")
def counted(media, prompts, context=None):
    """Grids (B, 4, 4) of tokens -> (B,)."""
    wanted = torch.tensor([PROMPTS.index(text) for text in prompts])
    return (media == wanted[:, None, None]).float().mean((1, 2))
