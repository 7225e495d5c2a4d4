"""Weights that leave the device: they are back when they are used, and the numbers are the same."""

import away
import pytest
import questions
import tiny
import torch
from torch import nn

from flowrl.policy import load_policy
from flowrl.policy.replay.record import Encoding
from flowrl.policy.weights.offload import OffloadedWeights, Turns, computing_on
from flowrl.rollouts.scorer import media_of
from flowrl.runtime.ledger import Ledger

CPU = torch.device("cpu")
LEAVE = Encoding(leave=True)
NAMES = ("sd3", "wan22")


@pytest.fixture(autouse=True)
def spoilt(monkeypatch):
    away.spoil(monkeypatch)


def test_a_guest_comes_as_it_was_and_its_visits_are_counted():
    net = nn.Linear(2, 2)
    before, guest = net.weight.detach().clone(), OffloadedWeights(net.parameters(), CPU)
    for visits in (1, 2):
        guest.leave()
        assert not guest.here and net.weight.isnan().all()
        guest.come()
        guest.come()
        assert guest.here and torch.equal(net.weight, before) and guest.visits == visits


def velocities(policy):
    """v of two prompts, then of two others, and the media of one of them."""
    made, shape = [], (2, *policy.latent_shape)
    for number, prompts in enumerate((tiny.PROMPTS, ["a green circle", tiny.PROMPTS[0]])):
        cond = policy.encode(prompts)
        x = torch.randn(shape, generator=torch.Generator().manual_seed(number))
        with torch.no_grad():
            made.append(policy.velocity(x, 0.7, cond, torch.arange(2)))
    how = {"decode": 2, "ledger": Ledger()}
    (media,) = media_of(policy, made[-1], torch.zeros(2), (cond, torch.arange(2)), **how)
    return [*made, media[1]]


@pytest.mark.parametrize("name", NAMES)
def test_encoders_and_denoisers_that_leave_change_no_bit(name):
    plain = tiny.policy(name, lora={"rank": 2})
    expected = velocities(plain)
    policy = tiny.policy(name, lora={"rank": 2}, encoding=LEAVE)
    policy.turns.offload(policy.networks)
    policy.trainable.load("default", plain.state())
    for made, wanted in zip(velocities(policy), expected, strict=True):
        assert torch.equal(made, wanted)
    turns = policy.turns
    assert turns.encoders.visits > 1 and turns.denoisers.visits == 2
    assert not turns.encoders.here and not turns.denoisers.here


@pytest.mark.parametrize("kind", ["none", "int8", "nf4"])
def test_denoisers_never_meet_the_encoders_not_even_when_a_policy_is_made(kind, monkeypatch):
    """Quantised ones leave, too."""
    met, run = [], Turns._encode

    def noted(turns, module, *call):
        run(turns, module, *call)
        met.append(turns.encoders.here and turns.denoisers.here)

    monkeypatch.setattr(Turns, "_encode", noted)
    plain = tiny.policy("sd3", lora={"rank": 2}, quantize=kind)
    apart = Encoding(leave=True, offload=True)
    policy = tiny.policy("sd3", lora={"rank": 2}, encoding=apart, quantize=kind)
    policy.trainable.load("default", plain.state())
    policy.self_check()
    policy.turns.rest()
    for made, wanted in zip(velocities(policy), velocities(plain), strict=True):
        assert torch.equal(made, wanted)
    assert met and not any(met) and policy.turns.denoisers.visits > 2


def test_encoders_come_for_new_prompts_alone_and_take_the_place_of_the_denoiser():
    policy = tiny.policy("sd3", encoding=LEAVE)
    policy.trainable.freeze()
    for p in policy.networks["transformer"].parameters():
        p.requires_grad_(False)
    policy.turns.offload(policy.networks)
    turns, both = policy.turns, []
    embed = next(m for n, m in policy.pipe.text_encoder.named_modules() if "embed" in n)
    embed.register_forward_hook(lambda *call: both.append(turns.denoisers.here))
    visits = turns.encoders.visits
    policy.encode(tiny.PROMPTS)
    assert turns.encoders.visits == visits + 1 and both and not any(both)
    policy.encode(tiny.PROMPTS[::-1])
    assert turns.encoders.visits == visits + 1
    policy.encode(["a green circle"])
    assert turns.encoders.visits == visits + 2 and not turns.encoders.here
    assert policy.device == CPU and policy.prober.runner.device == CPU


def test_a_gradient_is_that_of_weights_that_never_left():
    grads = []
    for leaves in (False, True):
        policy = tiny.policy("sd3", lora={"rank": 2})
        if leaves:
            policy.turns.offload(policy.networks)
        state = {k: torch.full_like(v, 0.1) for k, v in policy.state().items()}
        policy.trainable.load("default", state)
        policy.turns.rest()
        questions.velocity(policy, 0.7).square().sum().backward()
        grads.append([p.grad for p in policy.trainable.named().values()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_an_adapter_that_is_added_while_the_weights_are_away_is_where_they_compute():
    policy = tiny.policy("sd3", lora={"rank": 2})
    policy.turns.offload(policy.networks)
    policy.turns.rest()
    policy.trainable.add_view("old")
    added = policy.trainable.tensors("old").values()
    assert all(p.device == policy.device and not p.isnan().any() for p in added)


def test_a_pipeline_computes_where_it_is_told_and_its_class_is_as_it_was():
    one, other = tiny.pipeline("sd3"), tiny.pipeline("sd3")
    kind, meta = type(one), torch.device("meta")
    before = dict(kind.__dict__)
    with computing_on(one, meta):
        with computing_on(one, meta):
            assert one.device == one._execution_device == meta
        assert one.device == one._execution_device == meta
        assert other.device == other._execution_device == CPU
    assert one.device == one._execution_device == CPU and dict(kind.__dict__) == before


@pytest.mark.parametrize("name", tiny.NAMES)
def test_networks_that_are_away_say_where_their_inputs_have_to_be(name):
    """diffusers moves token ids to the device of the text encoder."""
    policy = tiny.policy(name, encoding=Encoding(leave=True, offload=True), lora={"rank": 2})
    meta = policy.turns.device = torch.device("meta")
    movers = [*policy.prober.runner._text_encoders(), *policy.networks.values()]
    assert len(movers) > 1 and all(network.device == CPU for network in movers)
    with policy.turns.running(policy.pipe):
        assert all(network.device == meta for network in movers)
    assert all(network.device == CPU for network in movers)


class Odd(torch.Tensor):
    """Another type of weights."""


def test_what_cannot_leave_is_refused():
    policy = load_policy(tiny.ToyFlow(), shape=(2,), cond=tiny.toy_cond)
    with pytest.raises(ValueError, match="are trained, and only frozen ones are moved"):
        policy.turns.offload(policy.networks)
    odd = nn.Linear(2, 2).requires_grad_(False)
    odd.weight = nn.Parameter(torch.zeros(2, 2).as_subclass(Odd), requires_grad=False)
    with pytest.raises(ValueError, match="are Odd, and only whole ones and those of"):
        Turns(CPU).send_denoisers({"transformer": odd})
    with pytest.raises(ValueError, match="no text encoder; leave encoding .model.encoders"):
        load_policy(tiny.ToyFlow(), shape=(2,), cond=tiny.toy_cond, encoding=LEAVE)
    with pytest.raises(ValueError, match="a Policy already; give encoding .model.encoders"):
        load_policy(policy, encoding=LEAVE)
    with pytest.raises(ValueError, match="use model.encoders=stay"):
        tiny.policy("sd3", encoding=LEAVE, lora={"rank": 2}, parts=["text_encoder"])
