"""Unmasking in random order: the places that a step reveals are drawn without regard to tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.samplers.common.unmasking import Unmasking, parts


class RandomOrder(Unmasking):
    """Each set of k masked places is revealed with the same probability 1 / C(m, k)."""

    __slots__ = ()

    def scores(self, token: Tensor, choice: Tensor) -> Tensor:
        return choice

    def selection(self, y: Tensor) -> Tensor:
        m, k = (n.double() for n in self.counts())
        ways = torch.lgamma(m + 1) - torch.lgamma(k + 1) - torch.lgamma(m - k + 1)
        return -ways.to(self.log_p.dtype)


def transition(
    logits: Tensor, x: Tensor, sigma: Tensor, sigma_next: Tensor, *, eta: Tensor | float
) -> RandomOrder:
    """Unmasking step in random order (MaskGIT's loop, arXiv:2202.04200, without confidences).

    logits: (B, *L, V) of the tokens; x: (B, *L) tokens, MASK where masked. sigma, sigma_next:
    shares of masked places before and after, () or (B,), multiples of 1 / N. eta: temperature of
    the tokens, () or (B,), above 0; at 1 they follow the model's own distribution.
    """
    level = torch.as_tensor(eta, dtype=torch.float64).to(x.device).expand(len(x))
    return RandomOrder(level=level, **parts(logits, x, sigma_next, level))
