"""Read an affine map off chosen inputs: out[row] = const[row] + scale * in[row].flatten()[index].

The inputs are zeros, ones, twos, the row number, the flat index in base-64 digits and noise. Digits
are exact in bf16, whose significand holds integers to 256. One map covers guidance doubling,
packing, permutation, channel and token concatenation, masks and per-channel normalisation without a
special case.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.policy.replay.arguments import Affine
from flowrl.policy.replay.errors import UnreplayableError

BASE = 64


def patterns(rows: int, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Make the inputs (rows, *shape) fp32, by name."""
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
    return out


def solve(out: dict[str, Tensor], rows: int, shape: tuple[int, ...], what: str) -> Affine:
    """Infer the map from its outputs for each of `patterns(rows, shape)`. UnreplayableError, which
    names `what`."""
    out = {k: v.detach().double().cpu() for k, v in out.items()}
    if any(v.shape != out["zero"].shape for v in out.values()):
        raise UnreplayableError(f"{what}: its shape depends on the latents' values")
    # slope of each element of out in the input: 0 where it does not depend on the input
    slope, numel = out["one"] - out["zero"], torch.Size(shape).numel()
    on = slope.abs() > 1e-6 * slope.abs().max().clamp(min=1e-30)
    if not on.any() or not slope.isfinite().all():
        raise UnreplayableError(f"{what}: it does not follow the latents")
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
    # a map that was read off the patterns must also hold for noise
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
    """Find (blocks, repeats) of the leading axis from the row number in each element."""
    lead = row.shape[0]
    owner = torch.where(on, row, -1).reshape(lead, -1).amax(1)
    each = owner.reshape(-1, *[1] * (row.ndim - 1))
    mixed = torch.where(on, row, each) != each
    if bool(mixed.any()) or lead % rows:
        raise UnreplayableError(
            f"{what}: its first axis of {lead} does not enumerate the {rows} rows of the batch"
        )
    repeats = int((owner.roll(-1) != owner).nonzero()[0]) + 1 if rows > 1 else 1
    blocks = lead // (rows * repeats)
    expected = torch.arange(rows).repeat_interleave(repeats).repeat(max(1, blocks))
    if expected.numel() != lead or not bool((owner == expected).all()):
        raise UnreplayableError(
            f"{what}: rows are ordered {owner.tolist()}, which is not blocks x rows x repeats"
        )
    return blocks, repeats
