"""An affine map read off chosen inputs: out[row] = const[row] + scale * in[row].flatten()[index].

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
    """out viewed as (blocks, rows, D): copies of the batch, in which each row has `repeats` entries
    of shape `shape` that follow one another."""

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
            y = y.index_select(1, self.index.to(x.device))
        if self.scale.ndim or self.scale.item() != 1.0:
            y = y * self.scale.to(x)
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
            z = z.index_select(1, self.index.argsort().to(y.device))
        return z.reshape(-1, *shape)

    def invertible(self, numel: int) -> bool:
        """Whether each of the `numel` entries of an input row is in the output, once."""
        index = torch.arange(numel) if self.index is None else self.index.cpu()
        if index.numel() != numel or not bool((self.scale != 0).all()):
            return False
        return bool((index.sort().values == torch.arange(numel)).all())


def solve(out: dict[str, Tensor], rows: int, shape: tuple[int, ...], what: str) -> Affine:
    """Infer the map from its outputs for each of `patterns(rows, shape)`. Raises UnreplayableError
    naming `what`."""
    out = {k: v.detach().double().cpu() for k, v in out.items()}
    if any(v.shape != out["zero"].shape for v in out.values()):
        raise UnreplayableError(f"{what}: its shape depends on the latents' values")
    # what each element of out holds of the input: 0 where it does not depend on it
    slope, numel = out["one"] - out["zero"], torch.Size(shape).numel()
    on = slope.abs() > 1e-6 * slope.abs().max().clamp(min=1e-30)
    safe = torch.where(on, slope, 1.0)
    read = {k: torch.where(on, (v - out["zero"]) / safe, 0.0) for k, v in out.items()}
    if (read["two"][on] - 2).abs().max() > 0.1:
        raise UnreplayableError(f"{what}: it is not linear in the latents")
    row = read["row"].round().long() - 1
    index = sum(read[k].round().long() * BASE ** int(k[5:]) for k in read if k.startswith("digit"))
    blocks, repeats = layout(row, on, rows, what)
    index, on, slope = (t.reshape(blocks, rows, -1) for t in (index, on, slope))
    _check_rows_alike(index, on, slope, numel, what)
    index, scale = torch.where(on, index, 0)[0, 0], torch.where(on, slope, 0.0)[0, 0]
    # the map that was read off must also hold for noise
    x = patterns(rows, shape)["noise"].double().reshape(rows, -1)
    expected, got = scale * x[:, index], read["noise"].reshape(blocks, rows, -1) * slope
    if (expected - got).abs().max() > 2e-2 * expected.abs().max():  # bf16 pipelines round to 2^-9
        raise UnreplayableError(f"{what}: it is not linear in the latents")
    const = out["zero"].reshape(blocks, rows, -1)
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


def _check_rows_alike(index: Tensor, on: Tensor, slope: Tensor, numel: int, what: str) -> None:
    """UnreplayableError unless each row (blocks, rows, D) reads the same entries with one scale."""
    alike = all(bool((t == t[0, 0]).all()) for t in (torch.where(on, index, 0), on))
    inside = alike and index[on].min() >= 0 and index[on].max() < numel
    if not inside or not torch.allclose(slope, slope[0, 0].expand_as(slope), rtol=1e-3):
        raise UnreplayableError(f"{what}: rows of the batch are not treated alike")


def layout(row: Tensor, on: Tensor, rows: int, what: str) -> tuple[int, int]:
    """(blocks, repeats) of the leading axis, from the row number that each element holds."""
    lead = row.shape[0]
    owner = torch.where(on, row, -1).reshape(lead, -1).amax(1)
    each = owner.reshape(-1, *[1] * (row.ndim - 1))
    mixed = torch.where(on, row, each) != each
    if bool(mixed.any()) or lead % rows:
        raise UnreplayableError(
            f"{what}: its first axis of {lead} does not enumerate the {rows} rows of the batch"
        )
    repeats = int((owner.roll(-1) != owner).nonzero()[0]) + 1 if rows > 1 else lead
    blocks = lead // (rows * repeats)
    expected = torch.arange(rows).repeat_interleave(repeats).repeat(max(1, blocks))
    if expected.numel() != lead or not bool((owner == expected).all()):
        raise UnreplayableError(
            f"{what}: rows are ordered {owner.tolist()}, which is not blocks x rows x repeats"
        )
    return blocks, repeats
