"""What is trained, its views, and LoRA files."""

import json
import os
import stat

import long
import pytest
import questions
import tiny
import torch
from questions import velocity
from safetensors import safe_open

from flowrl.policy import load_policy
from flowrl.policy.weights import lora
from flowrl.policy.weights.recompute import recompute

LORA = {"rank": 2, "alpha": 4}


def stirred(name):
    return questions.stirred(tiny.policy(name, lora=LORA))


@pytest.mark.parametrize("name", tiny.NAMES)
def test_gradient_reaches_the_lora_of_every_network_and_nothing_else(name):
    """Rows at .95 and .3 go through both networks of Wan 2.2."""
    policy = stirred(name)
    parts = policy.parts["denoiser"]
    assert {k.split(".")[0] for k in parts} == set(policy.modules)
    velocity(policy, torch.tensor([0.95, 0.3])).square().mean().backward()
    silent = [k for k, p in parts.items() if p.grad is None or p.grad.abs().max() == 0]
    unread = (
        "add_q_proj",
        "to_add_out",
    )  # the last block of SD3 and Qwen-Image computes a text stream that nothing reads
    assert all(
        f"_blocks.1.attn.{u}." in k or f"_blocks.1.attn.{u}" in k
        for k in silent
        for u in unread
        if u in k
    ), silent
    assert all(any(u in k for u in unread) for k in silent), silent
    others = [
        k
        for m in policy.pipe.components.values()
        if isinstance(m, torch.nn.Module)
        for k, p in m.named_parameters()
        if p.requires_grad
    ]
    assert len(others) == len(parts) and all("lora_" in k for k in others)


def test_a_fresh_adapter_changes_nothing_and_its_gradient_is_on_lora_b():
    policy, plain = tiny.policy("sd3", lora=LORA), tiny.policy("sd3")
    assert torch.allclose(velocity(policy), velocity(plain), atol=1e-6)
    velocity(policy).sum().backward()
    reached = {
        k
        for k, p in policy.parts["denoiser"].items()
        if p.grad is not None and p.grad.abs().max() > 0
    }
    assert reached and all("lora_B" in k for k in reached)


@pytest.mark.parametrize("name", ["sd3", "wan22"])
def test_reference_is_the_untrained_network_and_old_is_a_frozen_copy(name):
    policy = stirred(name)
    with torch.no_grad():
        now = velocity(policy)
        policy.trainable.add_view("old")
        with policy.view("old"):
            assert torch.equal(velocity(policy), now)
        for p in policy.parts["denoiser"].values():
            p.mul_(0.5)
        with policy.view("old"):
            assert torch.equal(velocity(policy), now)
            with policy.view("reference"):
                assert torch.allclose(velocity(policy), velocity(tiny.policy(name)), atol=1e-5)
            assert torch.equal(velocity(policy), now), (
                "leaving an inner view must restore the outer one"
            )
        assert not torch.allclose(velocity(policy), now, atol=1e-2)
    assert all(p.requires_grad for p in policy.parts["denoiser"].values())
    assert not any(p.requires_grad for p in policy.trainable.named("old").values())
    velocity(policy).sum().backward()
    assert all(p.grad is None for p in policy.trainable.named("old").values())


@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
def test_copy_view_moves_the_old_weights_by_one_minus_decay(lora):
    """old = 0.9 old + 0.1 default, per parameter."""
    policy = tiny.policy("flux", lora=lora)
    policy.trainable.add_view("old")
    before = policy.state("old")
    with torch.no_grad():
        for p in policy.parts["denoiser"].values():
            p.add_(1.0)
    policy.trainable.copy("default", "old", decay=0.9)
    assert all(
        torch.allclose(v, before[k] + 0.1, atol=1e-5) for k, v in policy.state("old").items()
    )
    policy.trainable.copy()
    assert all(torch.equal(v, policy.state("default")[k]) for k, v in policy.state("old").items())


def test_full_mode_trains_all_weights_and_views_swap_copies():
    policy = tiny.policy("sd3")
    network = policy.modules["transformer"]
    assert len(policy.parts["denoiser"]) == len(list(network.parameters()))
    with pytest.raises(ValueError, match="add_view\\('reference'\\)"), policy.view("reference"):
        pass
    policy.trainable.add_view("reference")
    with torch.no_grad():
        start = velocity(policy)
        for p in policy.parts["denoiser"].values():
            p.mul_(1.1)
        moved, trained = velocity(policy), policy.state("default")
        name = next(iter(trained))
        with policy.view("reference"):
            assert torch.equal(velocity(policy), start)
            inside = policy.state("default")
            assert all(torch.equal(v, trained[k]) for k, v in inside.items()), (
                "a view must not change what is saved as trained"
            )
            assert not torch.equal(policy.state("reference")[name], trained[name])
        assert torch.equal(velocity(policy), moved) and not torch.allclose(moved, start, atol=1e-2)


@pytest.mark.parametrize("name", ["sd3", "sd15"])
def test_full_mode_trains_bf16_networks_in_fp32(name):
    """A step of 1e-6 vanishes in bf16 weights of order 0.1, whose neighbours are 5e-4 apart."""
    policy = tiny.policy(name, dtype=torch.bfloat16)
    with torch.no_grad():
        low = velocity(policy)
    assert policy.dtype == torch.bfloat16, (
        "a policy that only samples keeps the memory it was loaded with"
    )
    parameters = policy.parts["denoiser"]
    assert all(p.dtype == torch.float32 for p in parameters.values())
    before = policy.state()
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-6, weight_decay=0.0)
    velocity(policy, torch.tensor([0.7, 0.3])).square().mean().backward()
    optimizer.step()
    moved = {
        k: (p.detach() - before[k]).abs().max().item()
        for k, p in parameters.items()
        if p.grad is not None and p.grad.abs().max() > 0
    }
    assert len(moved) > 0.8 * len(parameters) and all(1e-8 < m < 2e-6 for m in moved.values())
    with torch.no_grad():
        assert (
            velocity(policy) - low
        ).abs().max() < 0.1 * low.abs().max()  # bf16 rounding times guidance
        with torch.autocast("cpu", torch.bfloat16):
            assert velocity(policy).isfinite().all()
    check = policy.self_check()
    assert max(check.errors.values()) <= check.tolerance < 0.11


def test_state_is_loaded_strictly():
    policy, other = stirred("sd3"), tiny.policy("sd3", lora=LORA)
    other.trainable.load("default", policy.state("default"))
    assert torch.equal(velocity(policy), velocity(other))
    state = policy.state("default")
    name = next(iter(state))
    with pytest.raises(ValueError, match="1 names missing"):
        other.trainable.load("default", {k: v for k, v in state.items() if k != name})
    with pytest.raises(ValueError, match="another rank"):
        other.trainable.load("default", {**state, name: state[name].repeat(2, 1)})
    with pytest.raises(ValueError, match="no view 'old'.*add_view"):
        policy.state("old")


@pytest.mark.parametrize("name", long.but(tiny.NAMES, set(tiny.NAMES) - {"sd3", "wan22"}))
def test_lora_files_are_read_back_by_us_and_by_diffusers(name, tmp_path):
    policy = stirred(name)
    expected = velocity(policy).detach()
    path = policy.save_lora(tmp_path)
    assert path.is_file()
    other = tiny.policy(name, lora=LORA)
    other.load_lora(tmp_path)
    assert torch.equal(velocity(other).detach(), expected)
    pipe = tiny.pipeline(name)
    pipe.load_lora_weights(str(tmp_path))
    if name == "wan22":
        pipe.load_lora_weights(
            str(tmp_path),
            weight_name="transformer_2_lora_weights.safetensors",
            load_into_transformer_2=True,
        )
    plain = load_policy(pipe, **tiny.CALLS[name])
    low = 0.3 if name == "wan22" else 0.6  # in Wan 2.2 both networks must have theirs
    assert torch.allclose(velocity(plain, low).detach(), velocity(policy, low).detach(), atol=1e-4)


def test_the_same_lora_makes_the_same_bytes_with_ordinary_permissions(saved, tmp_path, monkeypatch):
    """The library orders metadata anew in each file, peft's set of names by the process's hash
    seed, and both keep files to their owner."""
    policy, folder = saved
    content = (folder / lora.FILE).read_bytes()
    config = policy.pipe.transformer.peft_config["default"]
    monkeypatch.setattr(config, "base_model_name_or_path", str(tmp_path))
    mask = os.umask(0o022)
    try:
        for i in range(4):
            file = policy.save_lora(tmp_path / str(i))
            assert file.read_bytes() == content
            assert stat.S_IMODE(file.stat().st_mode) == 0o644
    finally:
        os.umask(mask)
    with safe_open(str(file), "pt") as opened:
        told = json.loads(opened.metadata()[lora.METADATA])
    assert list(told) == sorted(told)
    names = told["transformer.target_modules"]
    assert len(names) > 4 and names == sorted(names)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A policy with a LoRA of rank 2 and alpha 4, and the folder it was saved in."""
    policy, folder = stirred("sd3"), tmp_path_factory.mktemp("saved")
    policy.save_lora(folder)
    return policy, folder


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[:-100],
        lambda raw: raw[:5],
        lambda raw: b"",
        lambda raw: raw[:8] + b"}" + raw[9:],
        lambda raw: raw + b"more",
    ],
    ids=["cut off", "no header", "empty", "changed header", "longer"],
)
def test_a_damaged_lora_file_is_named(saved, tmp_path, damage):
    policy, folder = saved
    module = load_policy(tiny.ToyFlow(), shape=(2,), cond=tiny.toy_cond, lora=LORA)
    file = tmp_path / lora.FILE
    file.write_bytes(damage((folder / lora.FILE).read_bytes()))
    for damaged in (policy, module):
        for path in (tmp_path, file):
            with pytest.raises(ValueError, match=f"^{file} cannot be read as safetensors"):
                damaged.load_lora(path)


@pytest.mark.parametrize("name", ["sd15", "wan22"])
def test_a_lora_does_the_same_at_another_alpha_and_another_rank_is_refused(name, tmp_path):
    trained = stirred(name)
    trained.save_lora(tmp_path)
    other = tiny.policy(name, lora={"rank": 2, "alpha": 16})
    other.load_lora(tmp_path)
    for key, value in trained.state().items():  # alpha / rank is 2 there and 8 here
        assert torch.allclose(other.state()[key], value / 4 if ".lora_B." in key else value)
    said = r"trained with rank=2, and this policy's adapters have rank=4.*train\.lora\.rank=2"
    wide = tiny.policy(name, lora={"rank": 4, "alpha": 4})
    before = wide.state()
    with pytest.raises(ValueError, match=said):
        wide.load_lora(tmp_path)
    assert all(torch.equal(v, before[k]) for k, v in wide.state().items())


def test_gradient_checkpointing_changes_no_gradient():
    policy = stirred("sd3")
    grads = []
    for on in (False, True, 0.5):
        recompute(policy.networks.values(), on)
        grads.append(
            torch.autograd.grad(
                velocity(policy).square().mean(), list(policy.parts["denoiser"].values())
            )
        )
    for each in zip(*grads, strict=True):
        assert all(torch.allclose(each[0], other, rtol=1e-4, atol=1e-7) for other in each[1:])


def test_lora_options_are_checked():
    with pytest.raises(ValueError, match="takes rank, alpha, targets, init, peft, not"):
        tiny.policy("sd3", lora={"r": 4})
    with pytest.raises(ValueError, match='no Linear layer .* ends in "query"; .*to_q'):
        tiny.policy("sd3", lora={"rank": 2, "targets": ["query"]})
    with pytest.raises(ValueError, match='ends in "to_w"'):  # though others are there
        tiny.policy("sd3", lora={"rank": 2, "targets": ["to_q", "to_w"]})
    only = tiny.policy("sd3", lora={"rank": 2, "targets": ["to_q"]})
    assert all(".to_q." in k for k in only.parts["denoiser"])
