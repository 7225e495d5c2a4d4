"""Unmasking by confidence, the order of MaskGIT and aMUSEd: likely tokens are kept first.

The k places with the largest log p_i(v_i) + tau g_i are revealed, v_i the token drawn there and g_i
Gumbel noise. For tau > 0 that is sampling without replacement with weights w_i = p_i(v_i)^(1/tau)
(Plackett-Luce), so that the choice has the exact probability, summed over the discarded draws,

    S = integral over s > 0 of F(s) dG(s),    G(s) = prod over K of (1 - exp(-w_i s)),
    F(s) = prod over the places j that stay masked of  sum over v of p_j(v) exp(-p_j(v)^(1/tau) s)

where s is the time at which the last place of K arrives and F the chance that no other has. The
integrand vanishes at both ends, so that trapezoids in log s are exact to rounding. For tau = 0, S
is prod over j of P(p_j(v) < the least confidence that was kept), which is Mask-GRPO's first
candidate; that bound is a constant to the gradient. Of equal confidences the first place is kept.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flowrl.samplers.common.unmasking import Unmasking, parts

# How far the grid of log s reaches beyond the rates: below, the integrand falls as s, to 4e-11;
# above, as exp(-s), to 1e-23
BELOW, ABOVE = 24.0, 4.0
BOUND = 700.0  # exp of it is still a number in fp64
WIDTH = 0.25  # a trapezoid is as wide, in log s
AT_ONCE = 2**23  # most numbers of a term, 64 MiB


class Confidence(Unmasking):
    """The places whose drawn tokens are likely are revealed; `level` is tau."""

    __slots__ = ()

    def scores(self, token: Tensor, choice: Tensor) -> Tensor:
        own = self.log_p.gather(-1, token.long()[..., None])[..., 0]
        # the smallest fp32 above 0: a uniform number of 0 would have an infinite score
        gumbel = -torch.log(-torch.log(choice.clamp(min=torch.finfo(choice.dtype).tiny)))
        return own + self.level.to(own)[:, None] * gumbel

    def selection(self, y: Tensor) -> Tensor:
        kept, token = self.revealed(y), self.tokens(y)
        stay = self.masked & ~kept
        out = []
        for i, tau in enumerate(self.level.tolist()):
            if not bool(stay[i].any()):  # the step reveals all: there is one choice
                out.append(token.new_zeros(()))
                continue
            row = (token[i][kept[i]].double(), self.log_p[i][stay[i]].double())
            if tau == 0:
                places = (torch.nonzero(own[i]).flatten() for own in (kept, stay))
                out.append(certain(*row, *places).to(token))
            else:
                out.append(chosen(*row, tau).to(token))
        return torch.stack(out)


def chosen(kept: Tensor, others: Tensor, tau: float) -> Tensor:
    """log S () of a choice with Gumbel noise tau > 0.

    kept: (k,) fp64 log-probabilities of the tokens that were kept; others: (j, V) fp64 of all
    tokens at the places that stay masked.
    """
    log_w = kept / tau  # log-rates
    with torch.no_grad():
        low = -torch.maximum((others.amax(-1) / tau).logsumexp(0), log_w.max()) - BELOW
        high = -log_w.min() + ABOVE
        points = int((high - low) / WIDTH) + 2
        log_s = low + (high - low) * torch.linspace(0, 1, points, dtype=low.dtype).to(low)  # (Q,)
    # log F(s): some places at a time, recomputed in the backward, since all are (j, V, Q) large
    some = others.split(max(1, AT_ONCE // (others.shape[1] * points)))
    log_F = sum(checkpoint(staying, part, log_s, tau, use_reentrant=False) for part in some)
    # log G(s), and log of d log G / d log s = sum of r / (exp(r) - 1), r = w s
    log_r = (log_w[:, None] + log_s).clamp(-BOUND, BOUND)  # (k, Q)
    r = log_r.exp()
    each = torch.log(-torch.expm1(-r))
    slope = (log_r - r - each).logsumexp(0)
    return (log_F + each.sum(0) + slope).logsumexp(0) + torch.log((high - low) / (points - 1))


def staying(others: Tensor, log_s: Tensor, tau: float) -> Tensor:
    """The part of log F(s) (Q,) of some places (j, V), summed over tokens in log space."""
    # bounded where exp has no fp64; nothing is named that would be kept beside the next term
    stay = others[..., None] - (others[..., None] / tau + log_s).clamp(max=BOUND).exp()
    return stay.logsumexp(1).sum(0)


def certain(kept: Tensor, others: Tensor, at: Tensor, rest: Tensor) -> Tensor:
    """log S () of a choice without noise, see `chosen`; -inf where it is impossible.

    at: (k,) the places that were kept; rest: (j,) those that stay masked.
    """
    least = kept.detach().min()
    after = rest > at[kept == least].max()  # there an equal confidence is not kept
    below = (others < least) | (others == least) & after[:, None]
    return torch.where(below, others, -torch.inf).logsumexp(-1).sum()


def transition(
    logits: Tensor, x: Tensor, sigma: Tensor, sigma_next: Tensor, *, eta: Tensor | float
) -> Confidence:
    """Unmasking step by confidence (MaskGIT, arXiv:2202.04200; aMUSEd, arXiv:2401.01808).

    logits: (B, *L, V) of the tokens; x: (B, *L) tokens, MASK where masked. sigma, sigma_next:
    shares of masked places before and after, () or (B,), multiples of 1 / N. eta: tau, the size of
    the Gumbel noise on confidences, () or (B,), at least 0. Tokens have temperature 1.
    """
    level = torch.as_tensor(eta, dtype=torch.float64).to(x.device).expand(len(x))
    return Confidence(level=level, **parts(logits, x, sigma_next, 1.0))
