"""The attention backend by name."""

import logging

import pytest
import questions
import tiny
import torch

from flowrl.policy.weights.attention import set_attention


def velocity(policy):
    with torch.no_grad():
        return questions.velocity(policy, 0.5, prompts=tiny.PROMPTS[:1])


def test_native_by_name_computes_what_the_default_does_and_none_takes_it_away():
    policy = tiny.policy("wan21")
    networks = list(policy.networks.values())
    own = velocity(policy)
    asked = [m.processor for n in networks for m in n.modules() if hasattr(m, "processor")]
    for name in ("native", "_native_math", None):
        set_attention(networks, name)
        assert {p._attention_backend for p in asked} == {name}
        off = (velocity(policy) - own).abs().max() / own.abs().max()
        # another kernel rounds otherwise: by 9e-7 on some CPUs
        assert off < 5e-6 if name == "_native_math" else off == 0


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("natve", 'train.attention="natve" is no attention backend of diffusers; did you mean'),
        ("xformers", "train.attention=xformers does not work here, on cpu in float32: .*xformers"),
        ("flash", "train.attention=flash does not work here, on cpu in float32: .*flash"),
        ("sage", "train.attention=sage does not work here, on cpu in float32: .*[Ss]age"),
    ],
)
def test_a_name_that_is_unknown_or_whose_package_is_missing_is_one_sentence(name, sentence):
    policy = tiny.policy("wan21")
    with pytest.raises(ValueError, match=sentence) as caught:
        set_attention(policy.networks.values(), name)
    assert "\n" not in str(caught.value)


def test_networks_with_older_processors_are_said_to_keep_theirs(heard, caplog):
    with caplog.at_level(logging.WARNING, logger="flowrl"):
        set_attention(tiny.policy("sd3").networks.values(), "native")
    assert "has no effect on SD3Transformer2DModel" in caplog.text


@pytest.mark.parametrize(("device", "stays"), [("cuda", False), ("cpu", True)])
def test_cudnns_attention_is_off_on_a_gpu(device, stays):
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        set_attention(tiny.policy("flux").networks.values(), None, torch.device(device))
        assert torch.backends.cuda.cudnn_sdp_enabled() == stays
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
