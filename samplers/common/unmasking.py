"""The step of masked generators: some masked places of a grid of tokens get a token.

A state is a grid of tokens in which MASK stands where none is known yet. The step from a state
draws a token for every masked place from the softmax of the logits, chooses some of these places,
and keeps their tokens there; the other draws are thrown away. Its probability is

    P(K, v_K) = S(K, v_K) prod over i in K of p_i(v_i)

where K are the places that are revealed and S is the probability that the draws with v_K lead to
the choice of K. With random order S is constant, and the product over the tokens is exact up to it;
where confidences choose, S depends on the weights. Subclasses give `scores` and `selection`.

Diffusers' AmusedScheduler draws and chooses in the same way, except that it may mask fewer places
where confidences are equal, and in fp16 a known token again: here places are chosen by rank, in
fp32, and a known token is never touched.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.types import Reduction

MASK = -1  # stands in a state for a token that is not known yet


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmasking:
    """The distribution p(y | x) of one unmasking step of B grids with N places, *L together."""

    log_p: Tensor  # (B, N, V) fp32 or fp64 log-probabilities of the tokens at each place
    x: Tensor  # (B, *L) tokens where the step starts, MASK where masked
    left: Tensor  # (B,) int64 number of masked places after the step
    level: Tensor  # (B,) fp64 temperature: of the tokens, or of the choice by confidence

    @property
    def masked(self) -> Tensor:
        """(B, N) bool: the places without a token."""
        return self.x.flatten(1) == MASK

    def sample(self, noise: Tensor) -> Tensor:
        """Take the step -> (B, *L) tokens of x's dtype.

        noise: (B, 2, *L) fp32, uniform on [0, 1): for the tokens and for the choice of places.
        """
        u, choice = noise.flatten(2).unbind(1)  # (B, N) each
        # inverse of the distribution function in fp64: of 8192 tokens many are rare
        cdf = self.log_p.double().exp().cumsum(-1)
        below = cdf <= u.double()[..., None] * cdf[..., -1:]
        token = below.sum(-1).to(self.x.dtype)
        # rank 0 is revealed first; masked places come before known ones, whatever their scores
        score = self.scores(token, choice).masked_fill(~self.masked, -torch.inf)
        rank = score.argsort(dim=-1, descending=True, stable=True).argsort(-1)
        revealed = self.masked & (rank < self.counts()[1][:, None])
        return torch.where(revealed, token, self.x.flatten(1)).view_as(self.x)

    def log_prob(self, y: Tensor, *, reduction: Reduction = "mean") -> Tensor:
        """Log-probability of y (B, *L), which differs from x in revealed places alone.

        "sum" -> (B,): of the step, with its choice of places. "mean" -> (B,): that over all N
        places of the grid, known ones too, so that every token counts alike, whatever the step.
        "none" -> (B, N): of each revealed token, 0 elsewhere; the choice of places has no share.
        """
        token = self.tokens(y)
        if reduction == "none":
            return token
        total = token.sum(1) + self.selection(y)
        return total / token.shape[1] if reduction == "mean" else total

    def tokens(self, y: Tensor) -> Tensor:
        """Log-probability (B, N) of each token that is revealed between x and y; 0 elsewhere."""
        y = y.flatten(1).long()
        found = self.log_p.gather(-1, y.clamp(min=0)[..., None])[..., 0]
        # chosen, not multiplied: 0 times the log of an impossible token would be NaN
        return torch.where(self.revealed(y), found, 0.0)

    def revealed(self, y: Tensor) -> Tensor:
        """(B, N) bool: the places that are masked in x and not in y."""
        return self.masked & (y.flatten(1) != MASK)

    def counts(self) -> tuple[Tensor, Tensor]:
        """Number of masked places before the step, and of those that it reveals: (B,) each."""
        masked = self.masked.sum(1)
        return masked, masked - self.left

    def kl(self, other: Unmasking, *, reduction: Reduction = "mean") -> Tensor:
        """KL(self || other) of steps from one state, with the exact sum over all tokens.

        "none" -> (B, N): of the token's distribution at each masked place, 0 elsewhere. "sum" ->
        (B,): that of the step with random order, for each masked place is revealed with probability
        k / m. Where confidences choose it is that of the tokens alone, as if both policies chose
        alike. "mean" -> (B,): the sum over N.
        """
        p, gap = self.log_p.exp(), self.log_p - other.log_p
        each = torch.where(p > 0, p * gap, 0.0).sum(-1)  # 0 times -inf - -inf would be NaN
        each = torch.where(self.masked, each, 0.0)
        if reduction == "none":
            return each
        masked, revealed = self.counts()
        total = each.sum(1) * revealed / masked
        return total / each.shape[1] if reduction == "mean" else total

    def scores(self, token: Tensor, choice: Tensor) -> Tensor:
        """Score (B, N) of each place, of which the highest masked ones are revealed.

        token: (B, N) what was drawn there; choice: (B, N) uniform on [0, 1).
        """
        raise NotImplementedError

    def selection(self, y: Tensor) -> Tensor:
        """log S (B,): log-probability that the step reveals just the places that it did."""
        raise NotImplementedError


def parts(
    logits: Tensor, x: Tensor, sigma_next: Tensor, temperature: Tensor | float
) -> dict[str, Tensor]:
    """Fields of an Unmasking, but for its level: logits (B, *L, V), x (B, *L), sigma_next (B,) or
    (), the share of places that stay masked; the logits are divided by temperature, (B,) or ()."""
    exact = torch.promote_types(logits.dtype, torch.float32)  # bf16 would round log-probs away
    flat = logits.flatten(1, -2).to(exact)  # (B, N, V)
    t = torch.as_tensor(temperature).to(flat)
    places = flat.shape[1]
    left = (torch.as_tensor(sigma_next, dtype=torch.float64) * places).round().long()
    return {
        "log_p": (flat / t.reshape(-1, 1, 1)).log_softmax(-1),
        "x": x,
        "left": left.to(x.device, non_blocking=True).expand(len(x)),
    }
