"""How a loop combines the outputs of its branches.

The rule is fitted on random outputs, never on the network's own: equal branches would hide the
weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.policy.replay.errors import UnreplayableError

SAME_TEXT = (
    "has no effect: without a negative prompt this pipeline gives all branches the same text;"
    ' give its call negative_prompt="", or use guidance="none"'
)


@dataclass
class Guidance:
    """A rule that combines outputs, in their type and in the pipelines' order of operations, so
    that low precision rounds in the same way.

    "linear": sum of weights * outputs. "entries": the same with a weight for each entry of the
    latents (some frames or channels have other guidance). "norm": linear, rescaled to the
    conditional output's norm over the last axis (true CFG of Qwen-Image). "pipeline": the pipeline
    itself combines (slow).
    """

    rule: str  # "linear", "norm", "entries" or "pipeline", see above
    # weight of each branch's output; for the rule "entries", mean over the entries
    weights: tuple[float, ...]
    total: float  # factor by which equal outputs are multiplied, +1 or -1
    cond: int  # index of the conditional branch
    entries: Tensor | None = None  # (K, *L) weights of the rule "entries"; None: another rule
    alike: bool = False  # whether the network gets the same arguments in all branches

    def __call__(self, outs: list[Tensor], guidance: float | str) -> Tensor:
        """Combine the predictions of the branches, each (n, *L), to one (n, *L)."""
        if guidance == "none":
            return outs[0] if self.total == 1.0 else self.total * outs[0]
        if self.entries is not None and guidance == "pipeline":
            entries = self.entries.to(outs[0].device)
            return sum((w * o for w, o in zip(entries, outs, strict=True)), outs[0].new_zeros(()))
        weights = self.weights if guidance == "pipeline" else self._reweighted(float(guidance))
        if len(outs) == 2 and abs(sum(weights) - self.total) < 1e-5:
            cond, other = outs[self.cond], outs[1 - self.cond]
            mixed = self.total * (other + abs(weights[self.cond]) * (cond - other))
        else:
            mixed = weights[0] * outs[0].float()
            if len(outs) > 1:
                mixed = sum(w * o for w, o in zip(weights[1:], outs[1:], strict=True)) + mixed
        if self.rule != "norm":
            return mixed
        wanted, norm = outs[self.cond].norm(dim=-1, keepdim=True), mixed.norm(dim=-1, keepdim=True)
        return mixed * (wanted / norm)

    def branches(self, guidance: float | str) -> int:
        """Count network rows of a state; ValueError for a scale that the rule cannot have."""
        if guidance == "none" or guidance == 1:
            return 1
        if not isinstance(guidance, str):
            self.check(guidance)
        return len(self.weights)

    def check(self, g: float) -> None:
        """ValueError unless the scale can be changed to g."""
        if len(self.weights) == 1:
            raise ValueError(
                f"guidance={g} needs an unconditional branch, and none was recorded; load the"
                " policy with guidance on (guidance_scale > 1, or true_cfg_scale > 1 and"
                " negative_prompt; of modular ones, a guider with a scale), or use"
                " guidance='pipeline' or 'none'"
            )
        if self.alike:
            raise ValueError(f"guidance={g} {SAME_TEXT}")
        if self.rule in ("pipeline", "entries") or len(self.weights) > 2:
            raise ValueError(
                f"guidance={g}: this pipeline's guidance is not u + g (c - u), so g cannot be"
                " changed; use 'pipeline' or 'none'"
            )

    def _reweighted(self, g: float) -> tuple[float, ...]:
        """Compute the weights at guidance scale g; the rule "norm" rescales after them."""
        self.check(g)
        return tuple(self.total * (g if k == self.cond else 1 - g) for k in range(2))

    def describe(self) -> str:
        """Write the rule as Python source."""
        if self.rule == "pipeline":
            return "pipeline_combines(out)"
        if self.rule == "entries":
            return " + ".join(f"weights[{k}] * out[{k}]" for k in range(len(self.weights)))
        text = " + ".join(f"{w:g} * out[{k}]" for k, w in enumerate(self.weights))
        text = text.replace("+ -", "- ")
        return f"rescale_to_norm_of(out[{self.cond}], {text})" if self.rule == "norm" else text


def fit(samples: list[tuple[list[Tensor], Tensor]], forced: str | None) -> Guidance:
    """Find the rule by which outputs become predictions.

    samples: (outputs of each branch (n, *L), the pipeline's prediction) of several iterations;
    forced: the rule that a hint names.
    """
    outs = [torch.stack([s[0][k] for s in samples]).double() for k in range(len(samples[0][0]))]
    pred = torch.stack([s[1] for s in samples]).double()
    matrix = torch.stack([o.flatten() for o in outs], 1)
    weights = torch.linalg.lstsq(matrix, pred.flatten()[:, None]).solution[:, 0]
    total = float(torch.sign(weights.sum()))
    if total == 0.0 or not torch.isfinite(weights).all():
        raise UnreplayableError(
            "guidance: the prediction does not depend on the network's outputs in a way that could"
            " be fitted"
        )
    cond = int((weights / total).argmax())
    # try the rules from the fastest to the slowest, and take the first that holds
    linear = ((matrix @ weights - pred.flatten()).norm() / pred.norm()).item() < 1e-4
    if linear and forced in (None, "linear"):
        return Guidance("linear", tuple(round(w, 6) for w in weights.tolist()), total, cond)
    rescaled = _fit_norm(outs, pred, total) if forced in (None, "norm") else None
    if rescaled is not None:
        return rescaled
    by_entry = _fit_entries(outs, pred, total) if forced is None else None
    if by_entry is not None:
        return by_entry
    if forced in ("linear", "norm"):
        raise UnreplayableError(
            f"guidance: the hint says {forced!r}, but random outputs are not combined that way"
        )
    return Guidance("pipeline", tuple(weights.tolist()), total, cond)


def _fit_entries(outs: list[Tensor], pred: Tensor, total: float) -> Guidance | None:
    """Fit the rule "entries": weights of each entry of the latents, from iterations and rows."""
    count, shape = len(outs), pred.shape[2:]
    rows = pred.shape[0] * pred.shape[1]
    if count < 2 or rows < count + 2:
        return None
    # shape (D, rows, K)
    matrix = torch.stack([o.reshape(rows, -1) for o in outs], 2).transpose(0, 1)
    wanted = pred.reshape(rows, -1).T[..., None]
    weights = torch.linalg.lstsq(matrix, wanted).solution  # shape (D, K, 1)
    if ((matrix @ weights - wanted).norm() / wanted.norm()).item() > 1e-4:
        return None
    entries = weights[..., 0].T.reshape(count, *shape)
    means = tuple(entry.mean().item() for entry in entries)
    cond = max(range(count), key=lambda k: total * means[k])
    return Guidance("entries", means, total, cond, entries.float())


def _fit_norm(outs: list[Tensor], pred: Tensor, total: float) -> Guidance | None:
    """Fit the rule "norm" of two branches, whichever is conditional; None if it does not hold."""
    if len(outs) != 2:
        return None
    for cond in (0, 1):
        g = _norm_scale(outs[cond], outs[1 - cond], total * pred)
        if g is not None:
            pair = (g, 1 - g) if cond == 0 else (1 - g, g)
            return Guidance("norm", tuple(total * round(w, 6) for w in pair), total, cond)
    return None


def _norm_scale(c: Tensor, u: Tensor, pred: Tensor) -> float | None:
    """Find g with pred = m |c| / |m| over the last axis, m = u + g (c - u); None if there is none.
    g follows from the components of u and c - u at right angles to pred."""
    unit = pred / pred.norm(dim=-1, keepdim=True)
    across = [o - (o * unit).sum(-1, keepdim=True) * unit for o in (u, c - u)]
    g = (-(across[0] * across[1]).sum() / across[1].square().sum()).item()
    m = u + g * (c - u)
    rebuilt = m * (c.norm(dim=-1, keepdim=True) / m.norm(dim=-1, keepdim=True))
    return g if ((rebuilt - pred).norm() / pred.norm()).item() < 1e-4 else None
