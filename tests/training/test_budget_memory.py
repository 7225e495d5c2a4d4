"""What the budget says of weights that are held otherwise is what they then take."""

from dataclasses import replace

import long
import pytest

from flowrl.config.load import load_config
from flowrl.policy import load_policy
from flowrl.training.budget.from_small import at_size
from flowrl.training.budget.planner import Planner
from flowrl.training.budget.rehearsal import WINNERS, Event
from flowrl.training.budget.roofline import GIB, GPUS

CPU = replace(GPUS["h100"], name="cpu", cuda=False, reserve=0.0, memory=None)
SMALL = [
    "model=shapes-sd3",
    "algorithm=flow_grpo",
    "reward=jpeg",
    "data=shapes",
    "batch.prompts=2",
    "batch.group=2",
    "batch.updates=1",
    "sampler.steps=2",
]


def budget(*words):
    cfg = load_config(None, [*SMALL, *words])
    return Planner(cfg, CPU).budget()


@pytest.fixture(scope="module")
def plain():
    return budget()


@pytest.mark.parametrize(("kind", "package"), [("int8", "torchao"), ("nf4", "bitsandbytes")])
def test_quantised_weights_take_the_bytes_of_a_quantised_network(kind, package):
    pytest.importorskip(package)
    from flowrl.policy.weights.quantised import held_bytes

    policy = load_policy("shapes-sd3", quantize=kind)
    (network,) = policy.networks.values()
    held = held_bytes(network) - sum(b.numel() * b.element_size() for b in network.buffers())
    assert budget(f"model.quantize={kind}").fixed["network"] * GIB == pytest.approx(held, rel=0.02)


def test_encoders_that_leave_are_there_while_prompts_are_encoded(plain):
    away = budget("model.encoders=leave")
    assert plain.fixed["text encoders"] > 0 == away.fixed["text encoders"]
    above = away.phases["encode"].gb - plain.phases["encode"].gb
    assert above == pytest.approx(plain.fixed["text encoders"])
    assert away.phases["update"].gb == plain.phases["update"].gb


def test_a_denoiser_that_leaves_takes_no_memory_while_media_are_decoded(plain):
    away = budget("model.offload=denoiser")
    own = plain.fixed["network"]
    assert away.fixed["network"] == 0
    for name in ("rollout", "update"):
        assert away.phases[name].gb == pytest.approx(plain.phases[name].gb + own)
    assert away.phases["decode"].gb == pytest.approx(plain.phases["decode"].gb)
    # it makes room for encoders that leave, and not for others
    assert away.phases["encode"].gb == pytest.approx(plain.phases["encode"].gb + own)
    both = budget("model.offload=denoiser", "model.encoders=leave")
    encoders = plain.fixed["text encoders"]
    assert both.phases["encode"].gb == pytest.approx(plain.phases["encode"].gb + encoders)


def test_rewards_that_leave_are_there_from_the_first_decoding_to_the_update():
    words = ["reward=preference", "model.offload=denoiser"]
    stays, away = budget(*words), budget(*words, "model.offload=all")
    own = stays.fixed["rewards"]
    assert own > 0 == away.fixed["rewards"] and away.resident == stays.resident - own
    for name, phase in stays.phases.items():
        there = own if name in ("decode", "reward", "advantages") else 0
        assert away.phases[name].gb == pytest.approx(phase.gb + there), name


@pytest.mark.long
def test_moments_in_eight_bits_are_a_quarter_and_states_on_the_host_are_none(plain):
    small = budget("optimizer.name=adamw8bit", "batch.states=host")
    assert small.fixed["moments"] < 0.26 * plain.fixed["moments"]
    assert small.phases["update"].gb < plain.phases["update"].gb
    assert small.rows == plain.rows


@pytest.mark.parametrize("model", ["sd3.5-medium", "flux.1-dev", "qwen-image", "wan2.1-14b"])
def test_presets_come_on_top_of_a_model_and_under_what_is_said(model):
    words = [f"model={model}", "algorithm=flow_grpo", "reward=pickscore", "data=ocr"]
    cfg = load_config(None, [*words, "memory=24gb", "batch.micro=1"])
    assert (cfg.model.quantize, cfg.model.encoders, cfg.batch.states) == ("nf4", "leave", "host")
    assert cfg.model.source == load_config(None, words).model.source
    assert cfg.batch.micro == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "words"),
    [
        pytest.param("flow_grpo", ["batch.prompts=10", "batch.group=16"], marks=long.mark),
        ("nft", ["batch.prompts=10", "batch.group=16"]),
        # the last micro-batch of an update is padded
        pytest.param(
            "flow_grpo",
            ["batch.prompts=37", "batch.group=6", "train.compile=blocks"],
            marks=long.mark,
        ),
    ],
)
def test_two_smaller_rehearsals_tell_a_large_one(method, words, monkeypatch):
    from flowrl.training.budget import planner as module

    many = [*words, "batch.micro=16", "batch.decode=4"]
    told = budget(f"algorithm={method}", *many)
    monkeypatch.setattr(module, "enough", lambda cfg: (cfg.batch.prompts,))
    whole = budget(f"algorithm={method}", *many)
    assert (told.rows, told.first) == (whole.rows, whole.first)
    assert told.flops == pytest.approx(whole.flops, rel=1e-12)
    near(told, whole)


def test_rows_that_the_winners_gain_looks_at_may_be_others_in_smaller_latents():
    """Which advantages of a tree are positive depends on log-probs, and these on the latents."""
    one = Event(
        phase="rollout", call=None, backward=False, live=10.0, since=20.0, moved=4.0, operators=1
    )
    large = replace(one, live=20.0, since=30.0, moved=6.0)
    winners = replace(large, phase=WINNERS)
    found = at_size([one], [large, winners], [2, 4], 8)
    assert [event.phase for event in found] == ["rollout", WINNERS]
    assert (found[0].live, found[0].since, found[0].moved) == (40, 50, 10)
    assert (found[1].live, found[1].since, found[1].moved) == (40, 60, 12)
    with pytest.raises(ValueError, match="shorter"):
        at_size([one, one], [large, winners], [2, 4], 8)


@long.mark
def test_of_a_tree_all_rows_are_told_but_for_the_few_winners_that_are_looked_at(monkeypatch):
    """16 rows of the better half, which may share states, in two forwards."""
    from flowrl.training.budget import planner as module

    words = ["algorithm=tree_grpo", "algorithm.window.size=2", "sampler.steps=4"]
    words += ["batch.prompts=16", "batch.group=9", "batch.micro=16", "batch.decode=4"]
    told = budget(*words)
    more = module.enough(load_config(None, [*SMALL, *words]))[1]
    few = budget(*words, f"batch.prompts={more}")
    assert told.rows["nfe/reference"] == few.rows["nfe/reference"]  # kl_weight is 0: all winners
    monkeypatch.setattr(module, "enough", lambda cfg: (cfg.batch.prompts,))
    whole = budget(*words)
    for ours, theirs in ((told.rows, whole.rows), (told.first, whole.first)):
        others = ours.pop("nfe/reference"), theirs.pop("nfe/reference")
        assert ours == theirs and abs(others[0] - others[1]) < 2 * 16
    near(told, whole, seconds=0.02, references=2 * 16)


def near(told, whole, *, seconds=0.01, references=0):
    """Two budgets of one run. references: rows of that phase by which they may differ."""
    assert told.seconds == pytest.approx(whole.seconds, rel=seconds)
    for name, phase in whole.phases.items():
        rows = references if name == "reference" else 0
        assert abs(told.phases[name].rows - phase.rows) <= rows, name
        close = pytest.approx(phase.gb, rel=0.02, abs=0.005 * whole.peak)
        assert told.phases[name].gb == close, name
