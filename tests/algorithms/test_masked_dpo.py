"""DPO whose errors count within a mask of the pair: by hand, and from picture to latents."""

from dataclasses import replace

import pytest
import tiny
import torch
from torch.nn import functional as F
from torchvision.io import write_png
from toy import Fixed, ToyPolicy, in_fp64, noised, prepared, slope

from flowrl.algorithms.dpo import ALGORITHM
from flowrl.data.scored_dataset import ScoredImage
from flowrl.policy.module import ModulePolicy
from flowrl.rollouts.from_files import mask_weight, media_shape
from flowrl.types import Advantages

MASKS = torch.tensor([[2.0, 0.0], [0.5, 1.5], [1.0, 1.0]])  # of three pairs, of mean 1


def make(**options):
    return ALGORITHM(ALGORITHM.Config(**{"steps": 2, "beta": 3.0, **options}))


def pairs(algorithm, masks=None):
    """A rollout of three pairs from files, always of the same media, and its rows."""
    torch.manual_seed(0)
    total = torch.tensor([1.0, 0.0] * 3)
    _, rollout, _, _ = prepared(algorithm, ToyPolicy(0.1), reward=total, copies=2)
    stated = {"label": total, "weight": torch.ones(6)}
    stated |= {} if masks is None else {"mask": masks.repeat_interleave(2, 0)}
    rollout = replace(rollout, stated=stated)
    leaf = Advantages(leaf=2 * total - 1)
    return rollout, algorithm.columns(rollout, leaf, seed=0, iteration=0)


@pytest.mark.parametrize("options", [{}, {"limit_loser": True}, {"kl_weight": 0.1}])
def test_a_mask_of_ones_is_plain_dpo_bit_for_bit(options):
    algorithm, found = make(**options), []
    for masks in (None, torch.ones(3, 2)):
        rollout, rows = pairs(algorithm, masks)
        assert ("mask" in rows.data) == (masks is not None)
        torch.manual_seed(0)
        policy = Fixed(torch.randn(len(rows), 2, requires_grad=True), v_ref=torch.randn(12, 2))
        out = algorithm.loss(algorithm.score(policy, rollout, rows), rows)
        found.append([out.loss, *out.metrics.values(), slope(algorithm, policy, rollout, rows)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_loss_by_hand_and_no_gradient_outside(monkeypatch):
    """e = sum(mask (v - u)^2) / sum(mask); the KL is of all latents."""
    algorithm = make()
    rollout, rows = in_fp64(monkeypatch, *pairs(algorithm, MASKS))
    mask = rows.mask
    assert mask.tolist() == MASKS.repeat_interleave(4, 0).tolist()
    _, _, _, u = noised(rollout, rows)
    v, v_ref = torch.randn_like(u).requires_grad_(), torch.randn_like(u)
    e, e_ref = ((mask * (x - u) ** 2).sum(1) / mask.sum(1) for x in (v, v_ref))
    win, lose = (rows.adv > 0).nonzero().flatten(), (rows.adv < 0).nonzero().flatten()
    h = (e - e_ref)[lose] - (e - e_ref)[win]
    by_hand = -F.logsigmoid(1.5 * h).mean()
    policy = Fixed(v, v_ref=v_ref)
    loss = algorithm.loss(algorithm.score(policy, rollout, rows), rows).loss / 12
    assert loss.item() == pytest.approx(by_hand.item(), rel=1e-12)
    got = slope(algorithm, policy, rollout, rows) / 12
    torch.testing.assert_close(got, torch.autograd.grad(by_hand, v)[0], rtol=1e-9, atol=1e-12)
    assert got[:4, 1].tolist() == [0] * 4 and got[:4, 0].all()
    held = slope(make(kl_weight=0.1), policy, rollout, rows) / 12
    gap = 0.1 * (v - v_ref).detach() / 12  # of 0.1 mean((v - v_ref)^2) over two dims
    torch.testing.assert_close(held - got, gap, rtol=1e-9, atol=1e-12)


def test_a_limited_loser_is_limited_within_the_mask():
    """g = mask (v - u) is half the gradient of the errors, but for the number of dims."""
    algorithm = make(limit_loser=True)
    rollout, rows = pairs(algorithm, MASKS)
    v = torch.randn(len(rows), 2, requires_grad=True)
    residual = algorithm.score(Fixed(v), rollout, rows)["residual"]
    torch.testing.assert_close(residual, (rows.mask * (v - noised(rollout, rows)[3])).detach())


# --- from the picture to the latents


def left_half(path, size, white=255):
    """A picture whose left half is white."""
    picture = torch.zeros(3, *size, dtype=torch.uint8)
    picture[..., : size[1] // 2] = white
    write_png(picture, str(path))
    return ScoredImage(path=path, file="a.png", total=1.0, scores={}, mask=path)


@pytest.mark.parametrize("name", ["sd3", "flux", "wan21"])
def test_a_mask_is_pooled_to_the_latents_wherever_a_pipeline_puts_them(name, tmp_path):
    """Flux packs four neighbours of each channel into a token; a video has one mask for all
    frames."""
    policy = tiny.policy(name)
    shape = media_shape(policy)
    found = mask_weight(policy, left_half(tmp_path / "left.png", shape[-2:]))
    z = policy.decoder.before(found[None])  # the VAE's grid, with its scale and no shift
    whole = policy.decoder.before(torch.ones_like(found)[None])
    half = torch.zeros_like(z)
    half[..., : z.shape[-1] // 2] = 2
    torch.testing.assert_close(z / whole, half)
    assert found.shape == policy.latent_shape and found.mean().item() == 1
    assert set(found.unique().tolist()) == {0.0, 2.0}
    white = left_half(tmp_path / "white.png", (6, 6))
    write_png(torch.full((3, 6, 6), 255, dtype=torch.uint8), str(white.mask))
    assert torch.equal(mask_weight(policy, white), torch.ones(policy.latent_shape))
    assert torch.equal(
        mask_weight(policy, replace(white, mask=None)), torch.ones(policy.latent_shape)
    )


def test_latents_that_are_pixels_have_the_mask_itself(tmp_path):
    class Pictures(ModulePolicy):
        def decode(self, x, sigma=0.0, cond=None, rows=None):
            return x

    policy = Pictures(torch.nn.Linear(1, 1), (3, 4, 4))
    found = mask_weight(policy, left_half(tmp_path / "left.png", (4, 4)))
    assert found.tolist() == [[[2, 2, 0, 0]] * 4] * 3


def test_white_that_is_cropped_away_is_named(tmp_path):
    wide = torch.zeros(3, 6, 60, dtype=torch.uint8)
    wide[..., 0] = 255
    write_png(wide, str(tmp_path / "wide.png"))
    item = ScoredImage(
        path=tmp_path / "a.png", file="a.png", total=1.0, scores={}, mask=tmp_path / "wide.png"
    )
    with pytest.raises(ValueError, match=r"mask .*wide.png has no white where .*a.png, of which"):
        mask_weight(tiny.policy("sd3"), item)
