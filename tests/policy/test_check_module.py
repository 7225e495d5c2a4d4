"""A module policy's own check: what passes, and each mistake in one sentence."""

import pytest
import torch
from torch import nn

from flowrl.policy import load_policy
from flowrl.policy.check import SelfCheck


class Net(nn.Module):
    """v of motions (5, 3)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.into, self.out = nn.Linear(15 + 1 + 2, 16), nn.Linear(16, 15)

    def forward(self, x, t, cond):
        h = torch.cat([x.flatten(1), t[:, None], cond], 1)
        return self.out(torch.tanh(self.into(h))).view(x.shape)


def cond(texts):
    return torch.tensor([[float(len(text)), 1.0] for text in texts])


def policy(net=None, **options):
    return load_policy(net or Net(), **{"shape": (5, 3), "cond": cond, **options})


def changed(change):
    """A Net whose prediction passes through change(prediction, x, t)."""

    class Changed(Net):
        def forward(self, x, t, cond):
            return change(super().forward(x, t, cond), x, t)

    return Changed()


@pytest.mark.parametrize("lora", [None, {"rank": 2, "alpha": 2}], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ["flow", "x0"])
def test_a_sound_module_passes_and_says_what_was_compared(kind, lora):
    found = policy(kind=kind, lora=lora, decode=lambda x: x.flatten(1) / 2).self_check(["a", "bb"])
    assert isinstance(found, SelfCheck) and max(found.errors.values()) < found.tolerance == 1e-4
    assert list(found.errors) == ["repeat", "rows", "mixed", "decode"] and found.wrong_rows > 1e-3
    assert not found.notes and "wrong rows" in str(found) and "Net: tried at 4 sigmas" in str(found)


def test_without_conditions_and_with_unused_weights_it_passes_with_a_note():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.spare = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x, t, cond):
            assert cond is None
            return self.used(x) * t[:, None]

    found = load_policy(Plain(), shape=(2,)).self_check()
    assert "wrong rows" not in str(found)
    assert found.notes == ["no gradient reaches 2 trained weights, module.spare.weight first"]
    assert "swapping" in policy().self_check(["a", "b"]).notes[0]  # of equal lengths


def test_statistics_of_batches_are_as_before():
    class Normed(Net):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(15)

        def forward(self, x, t, cond):
            return self.norm(super().forward(x, t, cond).flatten(1)).view(x.shape)

    net = Normed()
    with pytest.raises(ValueError, match="Normed"):
        policy(net).self_check()
    assert net.norm.num_batches_tracked == 0 and not net.norm.running_mean.any()
    assert policy(net.eval()).self_check().errors["rows"] < 1e-5


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda v, x, t: v.flatten(1), r"made \(4, 15\) of x \(4, 5, 3\)"),
        (lambda v, x, t: v[:1], r"made \(1, 5, 3\) of x"),
        (lambda v, x, t: (v, x), "made a tuple of x"),
        (lambda v, x, t: v + x.mean(0), "row alone.*nothing but itself"),
        (lambda v, x, t: v * t[0], r"one sigma for each row: t \(n,\)"),
        (lambda v, x, t: nn.functional.dropout(v), r"two equal calls.*module.eval\(\)"),
        (lambda v, x, t: v / (1 - t)[:, None, None], "velocity at sigma 1 is not finite"),
        (lambda v, x, t: v.detach(), "no gradient reaches the 4 trained weights"),
    ],
    ids=["shape", "rows", "tuple", "mixes", "sigma", "dropout", "infinite", "detached"],
)
def test_a_module_that_training_could_not_rely_on_is_refused(change, said):
    with pytest.raises(ValueError, match=said) as error:
        policy(changed(change)).self_check()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("decode", "said"),
    [
        (lambda x: x - x.mean(0), "media of a row alone.*but itself"),
        (lambda x: x[:1], r"made \(1, 5, 3\) of latents \(4, 5, 3\)"),
        (lambda x: x.flatten(1).sum(1), r"made \(1,\) of latents"),
        (lambda x: x.double(), "should be fp32"),
        (lambda x: x.numpy(), "decode made ndarray"),
    ],
)
def test_a_decode_that_mixes_rows_or_changes_their_number_is_refused(decode, said):
    with pytest.raises(ValueError, match=said):
        policy(decode=decode).self_check()


def test_what_it_is_given_is_checked():
    with pytest.raises(ValueError, match='cond failed on the prompts "a", "b" .KeyError'):
        policy(cond=lambda texts: {"walk": 1}[texts[0]]).self_check()
    with pytest.raises(ValueError, match=r"cond returned \(2,\) for 1 prompts"):
        policy(cond=lambda texts: torch.zeros(2)).encode(["a"])
    with pytest.raises(ValueError, match="cond returned a list"):
        policy(cond=lambda texts: [1.0]).encode(["a"])
    with pytest.raises(ValueError, match="decode is a int; it should be a function"):
        policy(decode=3)
    with pytest.raises(ValueError, match="so predict the flow or x0"):
        policy(kind="eps").self_check()
    with pytest.raises(ValueError, match="no way back"):
        policy(decode=lambda x: x).encode_media(torch.zeros(1, 5, 3))
