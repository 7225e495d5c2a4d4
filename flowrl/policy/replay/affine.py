"""Read an affine map off chosen inputs: out[row] = const[row] + scale * in[row].flatten()[index].

The inputs are zeros, ones, twos, the row number, the flat index in base-64 digits and noise. Digits
are exact in bf16, whose significand holds integers to 256. One map covers guidance doubling,
packing, permutation, channel and token concatenation, masks and per-channel normalisation without a
special case.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.policy.replay.record import UnreplayableError

BASE = 64


def patterns(rows: int, shape: tuple[int, ...], unit: float = 1.0) -> dict[str, Tensor]:
    """Inputs (rows, *shape) fp32 by name. unit scales all of them (1/64 keeps them below one, for
    maps that clamp)."""
    numel = torch.Size(shape).numel()
    index = torch.arange(numel).reshape(1, *shape).expand(rows, *shape)
    row = torch.arange(rows).reshape(-1, *[1] * len(shape)).expand(rows, *shape)
    out = {
        "zero": torch.zeros(rows, *shape),
        "one": torch.ones(rows, *shape),
        "two": 2 * torch.ones(rows, *shape),
        "row": row + 1.0,
    }
    digits = 1
    while BASE**digits < numel:
        digits += 1
    for k in range(digits):
        out[f"digit{k}"] = (index // BASE**k % BASE).float()
    out["noise"] = (BASE - 1) * torch.rand(rows, *shape, generator=torch.Generator().manual_seed(0))
    return {k: unit * v for k, v in out.items()}


@dataclass
class Affine:
    """out viewed as (blocks, rows, D): blocks copies of the batch, each row repeats entries of
    shape `shape` that follow one another."""

    blocks: int
    repeats: int
    shape: tuple[int, ...]  # of one entry of out
    index: Tensor | None  # (D,) into the flattened input row; None: the input row as it is
    scale: Tensor  # (D,) fp64, 0 where out does not depend on the input; () where it is one number
    const: Tensor | None  # (blocks, rows, D) of the recorded run; None: zero

    def __call__(
        self, x: Tensor, const: Tensor | None = None, factor: Tensor | None = None
    ) -> Tensor:
        """One block: x (n, *L) -> (n * repeats, *shape). const (n, D) replaces the recorded one;
        factor (n, 1) or () multiplies the scale."""
        y = x.reshape(x.shape[0], -1)
        if self.index is not None:
            y = y.index_select(1, self._at(self.index, x))
        if self.scale.ndim or self.scale.item() != 1.0:
            y = y * self._at(self.scale, x).to(x.dtype)
        if factor is not None:
            y = y * factor
        if const is not None:
            y = y + const
        return y.reshape(x.shape[0] * self.repeats, *self.shape)

    def inverse(self, y: Tensor, shape: tuple[int, ...], const: Tensor | None = None) -> Tensor:
        """Solve for the input row, (n, *shape); needs a bijection (`invertible`)."""
        z = y.reshape(y.shape[0], -1)
        if const is not None:
            z = z - const
        z = z / self.scale.to(z)
        if self.index is not None:
            z = z.index_select(1, self._at(self.index.argsort(), y))
        return z.reshape(-1, *shape)

    def invertible(self, numel: int) -> bool:
        index = torch.arange(numel) if self.index is None else self.index.cpu()
        return (
            index.numel() == numel
            and bool((self.scale != 0).all())
            and bool((index.sort().values == torch.arange(numel)).all())
        )

    @staticmethod
    def _at(t: Tensor, x: Tensor) -> Tensor:
        return t if t.device == x.device else t.to(x.device)


def solve(out: dict[str, Tensor], rows: int, shape: tuple[int, ...], what: str) -> Affine:
    """Infer the map from its outputs for each of `patterns(rows, shape)`. Raises UnreplayableError
    naming `what`."""
    out = {k: v.detach().double().cpu() for k, v in out.items()}
    if any(v.shape != out["zero"].shape for v in out.values()):
        raise UnreplayableError(f"{what}: its shape depends on the latents' values")
    slope, numel = out["one"] - out["zero"], torch.Size(shape).numel()
    on = slope.abs() > 1e-6 * slope.abs().max().clamp(min=1e-30)
    read = {
        k: torch.where(on, (v - out["zero"]) / torch.where(on, slope, 1.0), 0.0)
        for k, v in out.items()
    }
    if (read["two"][on] - 2).abs().max() > 0.1:
        raise UnreplayableError(f"{what}: it is not linear in the latents")
    row = read["row"].round().long() - 1
    index = sum(read[k].round().long() * BASE ** int(k[5:]) for k in read if k.startswith("digit"))
    blocks, repeats = layout(row, on, rows, what)
    row, index, on, slope = (t.reshape(blocks, rows, -1) for t in (row, index, on, slope))
    same = all(bool((t == t[0, 0]).all()) for t in (torch.where(on, index, 0), on))
    if (
        not same
        or index[on].min() < 0
        or index[on].max() >= numel
        or not torch.allclose(slope, slope[0, 0].expand_as(slope), rtol=1e-3)
    ):
        raise UnreplayableError(f"{what}: rows of the batch are not treated alike")
    index, scale = torch.where(on, index, 0)[0, 0], torch.where(on, slope, 0.0)[0, 0]
    x = patterns(rows, shape)["noise"].double().reshape(rows, -1)
    const = out["zero"].reshape(blocks, rows, -1)
    expected, got = scale * x[:, index], read["noise"].reshape(blocks, rows, -1) * slope
    if (
        expected - got
    ).abs().max() > 2e-2 * expected.abs().max():  # loose: bf16 pipelines round to 2^-9
        raise UnreplayableError(f"{what}: it is not linear in the latents")
    identity = index.numel() == numel and bool((index == torch.arange(numel)).all())
    flat = torch.allclose(scale, scale[0].expand_as(scale), rtol=1e-5, atol=0)
    return Affine(
        blocks=blocks,
        repeats=repeats,
        shape=tuple(out["zero"].shape[1:]),
        index=None if identity else index,
        scale=scale[0] if flat else scale,
        const=const if bool(const.any()) else None,
    )


def layout(row: Tensor, on: Tensor, rows: int, what: str) -> tuple[int, int]:
    """(blocks, repeats) of the leading axis, from the row number that each element holds."""
    lead = row.shape[0]
    owner = torch.where(on, row, -1).reshape(lead, -1).amax(1)
    mixed = torch.where(on, row, owner.reshape(-1, *[1] * (row.ndim - 1))) != owner.reshape(
        -1, *[1] * (row.ndim - 1)
    )
    if bool(mixed.any()) or lead % rows:
        raise UnreplayableError(
            f"{what}: its first axis of {lead} does not enumerate the {rows} rows of the batch"
        )
    repeats = int((owner.roll(-1) != owner).nonzero()[0]) + 1 if rows > 1 else lead
    expected = (
        torch.arange(rows).repeat_interleave(repeats).repeat(max(1, lead // (rows * repeats)))
    )
    if expected.numel() != lead or not bool((owner == expected).all()):
        raise UnreplayableError(
            f"{what}: rows are ordered {owner.tolist()}, which is not blocks x rows x repeats"
        )
    return lead // (rows * repeats), repeats
