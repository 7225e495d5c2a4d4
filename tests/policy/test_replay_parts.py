"""Small parts of the replay by themselves: what encoders are asked, and what becomes of pixels."""

import pytest
import torch
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel

from flowrl.policy.replay.encoders import Answers
from flowrl.policy.replay.pixels import fit_pixels
from flowrl.policy.replay.request import together


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.line, self.asked = nn.Linear(3, 2), 0

    def forward(self, x):
        self.asked += 1
        return self.line(x)


@torch.no_grad()
def test_equal_questions_are_answered_once_and_edits_do_not_leak():
    net, answers, x = Net().requires_grad_(False), Answers(), torch.randn(2, 3)
    with answers.of({"net": net}):
        first = net(x)
        kept = first.clone()
        first.zero_()
        assert torch.equal(net(x.clone()), kept) and net.asked == 1
        net(x + 1)
        assert net.asked == 2
    net(x)
    assert net.asked == 3 and "forward" not in net.__dict__


def test_a_network_that_is_trained_is_asked_every_time():
    net, answers, x = Net(), Answers(), torch.randn(2, 3)
    with answers.of({"net": net}):
        net(x)
        net(x)
    assert net.asked == 2


@torch.no_grad()
def test_a_text_encoder_reads_each_row_once_whichever_are_beside_it(monkeypatch):
    config = CLIPTextConfig(
        vocab_size=50, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, max_position_embeddings=6,
    )  # fmt: skip
    net = CLIPTextModel(config).eval().requires_grad_(False)
    rows, real = [], net.forward
    monkeypatch.setattr(net, "forward", lambda ids, **k: rows.append(len(ids)) or real(ids, **k))
    ids = torch.randint(50, (4, 6), generator=torch.Generator().manual_seed(0))
    answers = Answers()
    with answers.of({"text_encoder": net}):
        some = net(ids[[0, 1, 0]], output_hidden_states=True)
        more = net(ids[[2, 1]], output_hidden_states=True)
        net(ids[[1, 2, 0]], output_hidden_states=True)
    assert rows == [2, 1]
    whole = real(ids, output_hidden_states=True)
    assert torch.allclose(some.last_hidden_state, whole.last_hidden_state[[0, 1, 0]], atol=1e-6)
    assert torch.allclose(more.hidden_states[-1], whole.hidden_states[-1][[2, 1]], atol=1e-6)
    assert some.pooler_output.shape == (3, 8)


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
