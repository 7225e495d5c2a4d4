"""Small parts of the replay by themselves: what becomes of pixels and of parts of a prediction."""

import pytest
import torch

from flowrl.policy.replay.call import together
from flowrl.policy.replay.pixels import fit_pixels


@pytest.mark.parametrize(
    ("image", "axes"),
    [((3, 4, 4), (0, 1, 2)), ((3, 5, 4, 6), (1, 0, 2, 3)), ((3, 1, 4, 4), (0, 2, 3, 1))],
)
def test_the_order_and_range_of_pixels_are_found_and_inverted(image, axes):
    out = torch.rand(2, *image, generator=torch.Generator().manual_seed(0))
    media = out.permute(0, *(a + 1 for a in axes)) * 0.5 + 0.5
    media = media.squeeze(-1) if image[1] == 1 else media
    found = fit_pixels(out, media)
    assert found.scale == pytest.approx(0.5) and found.shift == pytest.approx(0.5)
    assert torch.allclose(found(out), media, atol=1e-6)
    assert torch.allclose(found.inverse(media), out, atol=1e-5)


def test_pixels_that_are_changed_otherwise_are_not_taken_for_a_line():
    out = torch.rand(2, 3, 4, 4)
    assert fit_pixels(out, out.square()) is None
    assert fit_pixels(out, out.flip(-1)) is None
    assert fit_pixels(out, out[..., :3]) is None


def test_parts_of_a_prediction_come_back_in_order():
    parts = [(torch.tensor([2, 0]), (torch.tensor([[2.0], [0.0]]), 4)),
             (torch.tensor([1]), (torch.tensor([[1.0]]), 2))]  # fmt: skip
    made, rows = together(parts)
    assert made.flatten().tolist() == [0, 1, 2] and rows == 6
