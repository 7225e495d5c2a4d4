"""The average follows its formula, and swapping it in leaves no trace."""

import pytest
import torch

from flowrl.training.ema import Ema, decay_at


def test_decay_rises_from_a_tenth_to_its_limit():
    assert decay_at(0, 0.9) == pytest.approx(0.1)
    assert decay_at(8, 0.9) == pytest.approx(0.5)
    assert decay_at(80, 0.9) == decay_at(10**6, 0.9) == 0.9  # (1 + 80) / (10 + 80) = 0.9


def test_two_steps_by_hand():
    """n = 0: d = 1/10, average 0.1 * 0 + 0.9 * 10 = 9. n = 1: d = 2/11, average (2 * 9 + 9 * 20) /
    11 = 18."""
    p = torch.zeros(1)
    ema = Ema({"p": p}, decay=0.9)
    for value, expected in ((10.0, 9.0), (20.0, 18.0)):
        p.fill_(value)
        ema.step()
        assert ema.average["p"].item() == pytest.approx(expected)


def test_it_averages_on_every_kth_step_only():
    """n = 0..7: nothing before n = 7, then d = 8/17."""
    p = torch.ones(1)
    ema = Ema({"p": p}, decay=0.9, every=8)
    p.fill_(18.0)
    for _ in range(7):
        ema.step()
        assert ema.average["p"].item() == 1
    ema.step()
    assert ema.average["p"].item() == pytest.approx((8 * 1 + 9 * 18) / 17)


def test_swapped_shows_the_average_and_restores_even_after_an_error():
    p = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    ema = Ema({"p": p}, decay=0.9)
    p.data.fill_(1.5)
    with pytest.raises(RuntimeError), ema.swapped():
        assert p.tolist() == [0, 0]
        raise RuntimeError
    assert (
        p.tolist() == [1.5, 1.5]
        and p.dtype == torch.bfloat16
        and ema.average["p"].dtype == torch.float32
    )


def test_its_state_continues_exactly():
    p, q = torch.randn(3), torch.zeros(3)
    ema, twin = Ema({"p": p}, decay=0.99, every=2), Ema({"p": q}, decay=0.99, every=2)
    for _ in range(3):
        p.add_(1)
        ema.step()
    twin.load_state_dict({k: v.clone() for k, v in ema.state_dict().items()})
    q.copy_(p)
    for e in (ema, twin):
        e.step()
    assert (
        torch.equal(ema.average["p"], twin.average["p"]) and ema.step_count == twin.step_count == 4
    )
    with pytest.raises(ValueError, match="differ, for example in other"):
        ema.load_state_dict({"p": p, "other": p, "step": torch.tensor(1)})


def test_decay_zero_switches_it_off():
    p = torch.ones(1)
    ema = Ema({"p": p}, decay=0.0)
    p.fill_(2.0)
    ema.step()
    with ema.swapped():
        assert p.item() == 2
    assert list(ema.state_dict()) == ["step"]
