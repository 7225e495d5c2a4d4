"""In which type the VAE decodes: the network's, unless a gradient passes or it overflows."""

import long
import pytest
import small
import tiny
import torch
import zoo

from flowrl.config.build import make_algorithm, make_policy
from flowrl.config.rules import climbs
from flowrl.policy import load_policy
from flowrl.policy.replay.decode import TailProbe


@pytest.mark.parametrize(("wanted", "made"), [("bf16", torch.bfloat16), ("fp16", torch.float32)])
def test_the_decoder_has_the_type_of_the_network_unless_it_overflows(wanted, made, tmp_path):
    """AutoencoderKL's own default says that it does, in fp16."""
    cfg = small.config(tmp_path, model__dtype=wanted)
    assert make_policy(cfg, device="cpu").pipe.vae.dtype == made


def test_a_gradient_passes_where_the_method_or_a_reward_climbs(tmp_path, monkeypatch):
    monkeypatch.setitem(small.ALGORITHMS, "draft", {})
    for algorithm, changes, through in (
        ("nft", {}, False),
        ("nft", {"reward__jpeg__mode": "grad"}, True),
        ("draft", {}, True),
    ):
        cfg = small.config(tmp_path, algorithm, **changes)
        assert climbs(cfg.reward, make_algorithm(cfg).needs) is through


def test_a_narrow_decoder_decodes_alike_with_half_the_bytes():
    policy = tiny.policy("sd3", dtype=torch.bfloat16)
    x = torch.randn(2, *policy.latent_shape)

    def size():
        return sum(p.numel() * p.element_size() for p in policy.pipe.vae.parameters())

    wide, before = policy.decode(x), size()
    policy.narrow_decoder()
    narrow = policy.decode(x)
    assert size() * 2 == before and narrow.dtype == torch.float32
    assert (narrow - wide).abs().max() < 0.05


@pytest.mark.parametrize(
    ("name", "dtype", "computes"),
    [
        ("wan21", torch.bfloat16, torch.bfloat16),  # divided by the inverses of deviations
        ("sana_video", torch.float16, torch.float16),
        ("cosmos2_t2i", torch.bfloat16, torch.float32),  # latents in fp32, VAE in bf16
        pytest.param("ltx", torch.float16, torch.float32, marks=long.mark),  # multiplied
        pytest.param("chronoedit", torch.bfloat16, torch.bfloat16, marks=long.mark),
        pytest.param("qwenimage", torch.bfloat16, torch.bfloat16, marks=long.mark),
    ],
)
def test_means_and_deviations_of_channels_are_rounded_as_the_pipeline_does(name, dtype, computes):
    """What the VAE is given equals the pipeline's, to the last bit."""
    case = zoo.cases()[name]
    given = case.call | (case.conditions[0] if case.conditions else {})
    policy = load_policy(case.make().to(dtype), **given)
    before, prober = policy.decoder.before, policy.prober
    rows = prober.count + len(prober.runner.pad)
    x = torch.randn(rows, *policy.latent_shape)
    probe = TailProbe(prober, policy.steps, prober.rows(prober.count), rows)
    theirs = probe.received_for(x)
    made = before(x, before.const[0, :1].float(), dtype=policy.decoder.dtype)
    assert (policy.decoder.dtype, theirs.dtype) == (computes, dtype)
    assert torch.equal(made.to(dtype), theirs)
    # it was held in fp32 while its maps were read
    assert {p.dtype for p in policy.pipe.vae.parameters()} == {dtype}


def test_an_argument_that_is_wrong_is_named_also_beside_a_vae_of_another_type():
    pipe = tiny.pipeline("sd3").to(torch.bfloat16)
    pipe.vae.float()
    with pytest.raises(ValueError, match="in check_inputs: .*: height=17"):
        load_policy(pipe, **{**tiny.CALLS["sd3"], "height": 17})


def test_tiles_are_switched_on_where_the_decoder_has_them():
    policy = tiny.policy("sd3")
    policy.tile_decoder()
    assert policy.pipe.vae.use_tiling
    with pytest.raises(ValueError, match="model.tiling=true: this model's decoder has no tiles"):
        load_policy(tiny.ToyFlow(), shape=(2,)).tile_decoder()


def test_a_pipeline_whose_vae_alone_is_narrow_is_taken_as_it_is():
    pipe = tiny.pipeline("sd3")
    pipe.vae.to(torch.bfloat16)
    policy = load_policy(pipe, **tiny.CALLS["sd3"])
    check = policy.self_check()
    assert 1e-4 < check.errors["decode"] <= check.allowed("decode") == 4 * 2**-7
    assert policy.dtype == torch.float32 and check.allowed("loop") == 1e-4


@pytest.mark.parametrize(
    ("narrow", "types"),
    [
        (lambda net: net, "bfloat16"),
        (lambda net: net.transformer_blocks[0], "bfloat16 and float32"),
    ],
)
def test_networks_of_types_that_do_not_fit_together_are_one_sentence(narrow, types):
    pipe = tiny.pipeline("sd3")
    narrow(pipe.transformer).to(torch.bfloat16)
    said = rf"its networks are of different types .*transformer {types}\W.* give them one"
    with pytest.raises(ValueError, match=said):
        load_policy(pipe, **tiny.CALLS["sd3"])
