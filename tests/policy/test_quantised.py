"""A denoiser in 8 or 4 bits under LoRA: the gradient of a widened copy, and everything else as it
is without."""

import pytest
import questions
import tiny
import torch
from torch import nn

import flowrl
from flowrl.policy.weights import quantised
from flowrl.policy.weights.masters import Master
from flowrl.policy.weights.quantised import held_bytes, is_quantised, kind_of, layers, quantise

LORA = {"rank": 2, "alpha": 4}
# bytes of a weight, with a scale for 64 of them or for a row
BITS = {"int8": 8, "nf4": 4}


@pytest.fixture(autouse=True)
def backends():
    for package in quantised.BACKENDS.values():
        pytest.importorskip(package)


def loaded(kind, dtype=torch.float32, name="sd3"):
    how = {"lora": LORA, "dtype": dtype, "quantize": kind, **tiny.CALLS[name]}
    return questions.stirred(flowrl.load_policy(tiny.pipeline(name), **how))


def velocity(policy):
    return questions.velocity(policy, torch.tensor([0.7, 0.4]))


def gradients(policy):
    velocity(policy).square().mean().backward()
    return questions.gradients(policy)


def widened(policy):
    """The policy with plain layers whose weights are those that the quantised ones stand for."""
    for network in policy.networks.values():
        for parent in network.modules():
            for key, layer in list(parent.named_children()):
                if isinstance(layer, nn.Linear) and is_quantised(layer.weight):
                    plain = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None)
                    plain.weight.data = wide(layer.weight)
                    plain.bias = layer.bias
                    setattr(parent, key, plain.requires_grad_(False))
    return policy


def wide(weight):
    if hasattr(weight, "quant_state"):
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(weight.data, weight.quant_state)
    return weight.dequantize()


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_outputs_and_gradients_are_those_of_the_widened_weights(kind):
    policy = loaded(kind)
    own, v = gradients(policy), velocity(policy).detach()
    for p in policy.trainable.named().values():
        p.grad = None
    expected = gradients(widened(policy))
    torch.testing.assert_close(v, velocity(policy).detach(), rtol=1e-4, atol=1e-5)
    assert own.keys() == expected.keys()
    assert sum(bool(grad.any()) for grad in own.values()) > 20
    for name, grad in own.items():
        assert grad.dtype == torch.float32
        torch.testing.assert_close(grad, expected[name], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_only_the_frozen_layers_of_blocks_are_quantised_and_the_pipeline_replays(kind):
    policy = loaded(kind, torch.bfloat16)
    network = policy.pipe.transformer
    assert kind_of(network) == kind and policy.dtype == torch.bfloat16
    few = [name for name, p in network.named_parameters() if is_quantised(p)]
    assert few and all("transformer_blocks" in name and "lora_" not in name for name in few)
    assert all(p.dtype == torch.float32 for p in policy.trainable.named().values())
    assert all(isinstance(m, Master) for m in policy.trainable.matrices["default"])
    assert not any(kind_of(part) != "none" for part in (policy.pipe.vae, policy.pipe.text_encoder))
    policy.self_check()


def test_the_reference_is_the_quantised_base_and_a_LoRA_file_fits_either(tmp_path):
    policy = loaded("nf4")
    with torch.no_grad(), policy.view("reference"):
        base = velocity(policy)
    assert not torch.allclose(base, velocity(policy).detach(), atol=1e-3)
    policy.save_lora(tmp_path)
    other = loaded("none")
    other.load_lora(tmp_path)
    for name, p in other.trainable.named().items():
        assert torch.equal(p, policy.trainable.named()[name])
    with pytest.raises(ValueError, match="is quantised, and a LoRA is not added"):
        policy.pipe.transformer.save_pretrained(tmp_path)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_bytes_are_those_of_the_bits_and_the_scales(kind):
    network = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(2)))
    quantise({"transformer": network}, kind, "cpu")
    weights = 2 * 256 * 256
    held = held_bytes(network) / weights
    # int8: two rows of 256, fp32 scale and int8 zero; nf4: fp32 for 64 weights, and its table
    assert BITS[kind] / 8 < held < BITS[kind] / 8 + {"int8": 0.02, "nf4": 0.08}[kind]


def test_a_quantised_pipeline_is_taken_as_it_is():
    pipe = tiny.pipeline("sd3")
    quantise({"transformer": pipe.transformer}, "int8", "cpu")
    before = {id(layer.weight) for *_, layer in every_linear(pipe.transformer)}
    policy = flowrl.load_policy(pipe, lora=LORA, quantize="int8", **tiny.CALLS["sd3"])
    assert before == {id(layer.weight) for *_, layer in every_linear(policy.pipe.transformer)}
    other = tiny.pipeline("sd3")
    quantise({"transformer": other.transformer}, "int8", "cpu")
    with pytest.raises(ValueError, match="the transformer is quantised as int8 already"):
        flowrl.load_policy(other, lora=LORA, quantize="nf4", **tiny.CALLS["sd3"])
    full = flowrl.load_policy(other, **tiny.CALLS["sd3"])  # to sample from
    with pytest.raises(ValueError, match="are quantised, and cannot all be trained"):
        _ = full.parts


def every_linear(network):
    for module in network.modules():
        if isinstance(module, nn.Linear) and is_quantised(module.weight):
            yield "", module


def test_what_cannot_be_quantised_is_a_sentence(monkeypatch):
    with pytest.raises(ValueError, match="has no Linear layers of a floating-point type"):
        quantise({"unet": nn.Sequential(nn.Conv2d(3, 3, 1))}, "int8", "cpu")
    with pytest.raises(ValueError, match="should be one of none, int8, nf4"):
        flowrl.load_policy("shapes-sd3", quantize="int4")
    with pytest.raises(ValueError, match="is for the denoiser of a pipeline"):
        flowrl.load_policy(nn.Linear(2, 2), shape=(2,), quantize="int8")
    monkeypatch.setattr(quantised, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"needs torchao, which is not installed; .*pip install -e"
    ):
        flowrl.load_policy("shapes-sd3", quantize="int8")


def test_a_backend_that_does_not_work_is_a_sentence(monkeypatch):
    monkeypatch.setattr(quantised, "_quantised", lambda *a: nn.Identity().register_buffer("x"))
    with pytest.raises(ValueError, match=r"model.quantize=nf4 \(bitsandbytes\) does not work here"):
        quantised.try_out("nf4", "cpu", torch.float32)


def test_the_layers_of_a_network_without_blocks_are_all_its_linear_ones():
    network = nn.Sequential(nn.Linear(4, 4), nn.Conv2d(3, 3, 1), nn.Sequential(nn.Linear(4, 2)))
    assert [layer.out_features for *_, layer in layers(network)] == [4, 2]


@pytest.mark.parametrize("name", ["sd3", "flux"])
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_weights_are_frozen_and_thawed_but_for_those_that_are_quantised(kind, name):
    """As in a run that trains no weight of the network's own (dsrl)."""
    pipe = tiny.pipeline(name)
    policy = flowrl.load_policy(pipe, quantize=kind, **tiny.CALLS[name])
    own = dict(pipe.transformer.named_parameters())
    few = {key for key, p in own.items() if is_quantised(p)}
    assert few and few < own.keys()
    for on in (True, False, True):
        policy.trainable.freeze(on)
        assert {key for key, p in own.items() if p.requires_grad} == (
            set() if on else own.keys() - few
        )
