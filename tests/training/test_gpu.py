"""Whole runs on a CUDA device: they are those of the CPU, in each precision and with each setting
that saves memory. `pytest -m gpu` runs them; without a GPU they are skipped."""

import os

import pytest
import small
import tiny
import torch

from flowrl.policy import load_policy
from flowrl.policy.replay.record import Encoding
from flowrl.rollouts.roll_out import roll_out
from flowrl.runtime.ledger import Ledger
from flowrl.samplers import keys, plan
from flowrl.types import PromptBatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

PHASES = ("encode", "rollout", "decode", "reward", "reference", "update")
METHODS = {
    "nft": {},
    "mix_grpo": {},
    "tree_grpo": {
        "algorithm__tree__children": "2",
        "algorithm__window__size": "1",
        "batch__group": "4",
    },
    "draft": {
        "reward": "preference",
        "reward__preference__rounding": "false",
        "batch__group": "1",
    },
    "dsrl": {},
}
PRECISIONS = {
    "bf16 weights": {"model__dtype": "bf16"},
    "fp16 weights": {"model__dtype": "fp16"},
    "bf16 autocast": {"train__precision": "bf16"},
    "fp16 autocast": {"train__precision": "fp16"},
}
LIGHTER = {
    "denoiser offloaded": {"model__encoders": "leave", "model__offload": "denoiser"},
    "all offloaded": {"model__encoders": "leave", "model__offload": "all"},
    "states on the host": {"batch__states": "host"},
}
OTHER = {
    "nf4": {"model__quantize": "nf4", "model__dtype": "bf16"},
    "int8": {"model__quantize": "int8", "model__dtype": "bf16"},
    "adamw8bit": {"optimizer__name": "adamw8bit"},
    "compiled": {"train__compile": "blocks", "model__dtype": "bf16"},
    "checkpointing": {"train__gradient_checkpointing": "true"},
}


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    """Convolutions in fp32 without TF32, as on the CPU."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture
def noise_of_the_cpu(monkeypatch):
    """The same noise on both devices, whose generators differ."""
    drawn = keys.gaussian

    def gaussian(names, shape, device="cpu"):
        return drawn(names.cpu(), shape, "cpu").to(device)

    monkeypatch.setattr(keys, "gaussian", gaussian)


def settings(method, **changes):
    how = {"iterations": "2", "eval__images": "2", "sampler__steps": "3", "optimizer__eps": "1e-3"}
    return {**how, **METHODS[method], **changes}


def ran(folder, method, monkeypatch, **changes):
    """Two iterations between evaluations -> (metrics of each, weights of the last checkpoint)."""
    monkeypatch.setitem(small.ALGORITHMS, method, small.ALGORITHMS.get(method, {}))
    made = small.trainer(folder, method, **settings(method, **changes))
    run = made.run()
    assert (run.path / "report.html").is_file() and run.evaluation
    assert all(torch.isfinite(torch.tensor(line["reward/total"])) for line in run.metrics)
    return run.metrics, small.weights(run.path)


def close(one, other, atol):
    assert one.keys() == other.keys()
    return all(
        torch.allclose(w.float(), other[name].float(), atol=atol)
        for name, w in one.items()
        if w.is_floating_point()
    )


@pytest.mark.parametrize("method", METHODS)
def test_a_run_is_that_on_the_cpu(method, tmp_path, monkeypatch, noise_of_the_cpu):
    metrics, weights = ran(tmp_path / "gpu", method, monkeypatch)
    for name in ("time/rollout", "time/update", "memory/update_gb", "memory/peak_gb"):
        assert metrics[-1][name] > 0
    phases = [metrics[-1].get(f"time/{name}", 0.0) for name in PHASES]
    assert 0 < sum(phases) <= 1.05 * metrics[-1]["time/iteration"]
    monkeypatch.setitem(os.environ, "ACCELERATE_USE_CPU", "true")
    with small.start("train", *small.words(tmp_path / "cpu", method, **settings(method))) as cpu:
        assert cpu.wait() == 0, cpu.stderr.read()[-2000:]
    expected = small.numbers(tmp_path / "cpu")
    changing = (*small.CHANGING, "policy/ratio_error", "policy/clip_fraction")
    for line, like in zip(metrics, expected, strict=True):
        kept = {k: v for k, v in line.items() if not k.startswith(changing)}
        wanted = {k: like[k] for k in kept if isinstance(like.get(k), float)}
        assert {k: kept[k] for k in wanted} == pytest.approx(wanted, rel=5e-3, abs=1e-5)
    assert close(weights, small.weights(tmp_path / "cpu"), 1e-4)


@pytest.mark.parametrize("how", PRECISIONS)
@pytest.mark.parametrize("method", ["mix_grpo", "nft"])
def test_low_precision_trains(method, how, tmp_path, monkeypatch):
    checked = {"model__self_check": "true", "sampler__guidance": "pipeline"}
    metrics, weights = ran(tmp_path, method, monkeypatch, **PRECISIONS[how], **checked)
    assert all(line["policy/grad_norm"] > 0 for line in metrics)
    assert all(w.isfinite().all() for w in weights.values() if w.is_floating_point())


@pytest.mark.parametrize("how", LIGHTER)
def test_what_leaves_the_device_changes_no_number(how, tmp_path, monkeypatch):
    _, plain = ran(tmp_path / "plain", "mix_grpo", monkeypatch)
    _, away = ran(tmp_path / "away", "mix_grpo", monkeypatch, **LIGHTER[how])
    assert close(plain, away, 1e-6)


@pytest.mark.parametrize("how", OTHER)
def test_a_lighter_run_trains_and_resumes(how, tmp_path, monkeypatch):
    metrics, _ = ran(tmp_path, "nft", monkeypatch, **OTHER[how])
    assert metrics[-1]["policy/grad_norm"] > 0
    result = small.invoke("train", "--resume", tmp_path, "iterations=3")
    assert result.exit_code == 0, result.output
    assert len(small.lines(tmp_path)) == 3


@pytest.mark.parametrize("kind", ["none", "nf4"])
@pytest.mark.parametrize("name", tiny.NAMES)
def test_a_live_pipeline_whose_encoders_and_denoisers_take_turns(name, kind):
    pipe = tiny.pipeline(name).to("cuda", torch.bfloat16)
    apart = Encoding(leave=True, offload=True)
    policy = load_policy(pipe, lora={"rank": 2}, encoding=apart, quantize=kind, **tiny.CALLS[name])
    cond = policy.encode(tiny.PROMPTS)
    x = torch.randn(2, *policy.latent_shape, device="cuda", requires_grad=True)
    v = policy.velocity(x, 0.7, cond, torch.arange(2))
    v.square().sum().backward()
    assert v.isfinite().all() and x.grad.isfinite().all() and x.grad.any()
    assert policy.turns.encoders.visits and policy.device.type == "cuda"


def test_a_rollout_waits_at_its_end_alone():
    policy = load_policy("shapes-sd3", lora={"rank": 2}, device="cuda")
    batch = PromptBatch(text=["a red circle", "b"], ids=torch.arange(2), meta=[{}, {}])
    how = {"guidance": "pipeline", "seed": 0, "iteration": 0, "micro": 64, "group": 2}
    path = plan.full(policy.schedule(4).sigmas, eta=0.7)
    roll_out(policy, batch, path, ledger=Ledger("cuda"), **how)  # encodes and warms up
    advance, seen = policy._velocity, []

    def without_waiting(request):
        torch.cuda.set_sync_debug_mode("error" if len(seen) else "default")
        seen.append(request)
        return advance(request)

    policy._velocity = without_waiting
    try:
        roll_out(policy, batch, path, ledger=NoTime(), **how)
    except RuntimeError as error:
        assert "synchronizing" in str(error) and len(seen) == 4  # its end, after the last step
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(seen) == 4


class NoTime(Ledger):
    """A ledger of the CPU: reading peaks is none of a rollout's waits."""

    def __init__(self):
        super().__init__("cpu")
