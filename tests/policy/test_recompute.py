"""Gradient checkpointing of a share of the blocks."""

import pytest
import torch
from torch import nn

from flowrl.policy.weights.recompute import Recompute


class Counted(nn.Module):
    """A block that counts its forwards."""

    def __init__(self):
        super().__init__()
        self.inner, self.calls = nn.Linear(3, 3), 0

    def forward(self, x):
        self.calls += 1
        return self.inner(x).tanh()


@pytest.mark.parametrize(
    ("share", "twice"),
    [(1.0, [0, 1, 2, 3, 4, 5]), (0.5, [1, 3, 5]), (0.34, [2, 5]), (0.75, [1, 2, 3, 5])],
)
def test_a_share_of_the_blocks_is_computed_again_in_the_backward(share, twice):
    body, recompute = [Counted() for _ in range(6)], Recompute(share)
    for _ in range(2):  # the same ones in every forward
        x = torch.randn(2, 3, requires_grad=True)
        for block in body:
            x = recompute(block, x)
        before = [block.calls for block in body]
        x.sum().backward()
        again = [block.calls - n for block, n in zip(body, before, strict=True)]
        assert [k for k, n in enumerate(again) if n] == twice and max(again) == 1


@pytest.mark.parametrize("share", [0, -0.5, 1.5])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(ValueError, match=f"share={share} .* above 0, up to 1"):
        Recompute(share)
