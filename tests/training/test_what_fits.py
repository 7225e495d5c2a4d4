"""Out of memory on a GPU: the sentence names settings that fit by the budget, or the next lighter
one where none are known."""

import re
from dataclasses import replace

import pytest
import small
import torch

import flowrl
from flowrl.config import combine
from flowrl.config.load import load_config
from flowrl.policy.pipeline import PipelinePolicy
from flowrl.runtime.memory import OutOfMemory
from flowrl.runtime.roofline import GPUS
from flowrl.training import what_fits
from flowrl.training.budget import Planner
from flowrl.training.lighter import BETWEEN, START, Shortage
from flowrl.training.out_of_memory import Case, of_host, tried

H100 = GPUS["h100"]
QUICK = {"guard__check_rewards": "false", "eval__at_start": "false", "iterations": "1"}


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """A run on this machine counts as one on a GPU."""
    monkeypatch.setattr(what_fits, "this_gpu", lambda: H100)


@pytest.fixture(scope="module")
def planner():
    return Planner(small.config("unused"), H100)


def case(cfg, phase="update", gb=0.006, gpus=1):
    short = Shortage(phase=phase, gpus=gpus)
    return Case(cfg=cfg, short=short, tried=gb, what="memory ran out", kept="nothing is lost")


def test_the_command_names_settings_that_fit(tmp_path, planner, monkeypatch):
    monkeypatch.setattr(what_fits, "Planner", lambda cfg, device, gpus: planner)
    forward = PipelinePolicy._velocity

    def full(policy, request):
        if torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 MiB.")
        return forward(policy, request)

    monkeypatch.setattr(PipelinePolicy, "_velocity", full)
    result = small.invoke("train", *small.words(tmp_path / "run", **QUICK))
    assert result.exit_code == 1 and "looking for settings that fit" in result.output
    (said,) = [line for line in result.output.splitlines() if line.startswith("flowrl: ")]
    assert "memory ran out in the phase update (CUDA out of memory. Tried to allocate 4.00" in said
    assert "; set train.gradient_checkpointing=0.5, the nearest that fits by the budget" in said
    assert re.search(r"the phase update then needs 0.00\d+ GB less; the checkpoint of iter", said)


def test_flowrl_train_names_settings_that_fit(monkeypatch):
    def full(cfg, **options):
        raise case(cfg).error("set the next lighter one")

    monkeypatch.setattr("flowrl.training.train.Trainer", full)
    monkeypatch.setattr(what_fits, "nearest", lambda case, gpu: ({"batch.micro": 2}, 1.5))
    said = r"^memory ran out; set batch.micro=2, .* needs 1.5 GB less; nothing is lost$"
    with pytest.raises(OutOfMemory, match=said):
        flowrl.train(load_config(None, []))


@pytest.mark.parametrize(
    ("phase", "share", "words"),
    [
        ("update", 0.05, "train.gradient_checkpointing=0.5"),
        ("decode", 0.05, "batch.decode=2"),
        ("rollout", 0.4, "model.encoders=leave model.quantize=int8"),
        ("evaluation", 0.01, "model.encoders=leave"),
        (START, 0.2, "model.quantize=int8"),
        (BETWEEN, 0.01, "model.encoders=leave"),
    ],
)
def test_settings_that_fit_need_as_much_less_and_none_is_idle(
    phase, share, words, planner, monkeypatch
):
    """share: of the phase's peak, which could not be had."""
    monkeypatch.setattr(what_fits, "Planner", lambda cfg, device, gpus: planner)
    own = what_fits.of_phase(planner.budget(), phase)
    settings, less = what_fits.nearest(case(planner.cfg, phase, share * own.peak), H100)
    assert less >= share * own.peak and combine.words(settings) == words
    for name in settings if len(settings) > 1 else ():
        rest = {key: value for key, value in settings.items() if key != name}
        budget = planner.budget(combine.changed(planner.cfg, rest))
        assert own.needed - what_fits.of_phase(budget, phase).needed < share * own.peak


def test_a_card_that_is_too_small_for_another_phase_is_reckoned_with(planner, monkeypatch):
    """Here decoding ran out, and by the budget the update would, too."""
    monkeypatch.setattr(what_fits, "Planner", lambda cfg, device, gpus: planner)
    device = replace(H100, memory=planner.budget().needed - 0.006)
    settings, _ = what_fits.nearest(case(planner.cfg, "decode", 0.001), device)
    assert list(settings) == ["batch.decode", "train.gradient_checkpointing"]


def sentence(about):
    """Of a command in which memory ran out with this Case."""
    with pytest.raises(OutOfMemory) as raised, what_fits.naming_what_fits():
        raise about.error("set the next lighter one")
    return str(raised.value)


NEXT = "memory ran out; set the next lighter one; nothing is lost"


@pytest.mark.parametrize("gb", [None, 1000.0])
def test_without_a_number_or_with_one_that_no_setting_saves_the_next_lighter_one_stands(
    gb, planner, monkeypatch
):
    monkeypatch.setattr(what_fits, "Planner", lambda cfg, device, gpus: planner)
    assert sentence(case(planner.cfg, gb=gb)) == NEXT
    assert sentence(case(planner.cfg, "a phase of nobody")) == NEXT


def test_a_model_that_the_budget_does_not_know_has_the_next_lighter_setting(caplog):
    with caplog.at_level("INFO", "flowrl"):
        assert sentence(case(load_config(None, ["model.source=some/thing"]))) == NEXT
    assert "no budget: " in caplog.text and "some/thing" in caplog.text
    assert sentence(case(load_config(None, ["train.sequence_parallel=2"]), gpus=2)) == NEXT
    assert sentence(case(load_config(None, ["batch.prompts=3"]), gpus=2)) == NEXT


@pytest.mark.parametrize("error", [KeyError("a part"), MemoryError(), KeyboardInterrupt()])
def test_a_search_that_fails_or_is_stopped_takes_nothing_away(error, monkeypatch):
    def fails(*args, **kwargs):
        raise error

    monkeypatch.setattr(what_fits, "Planner", fails)
    assert sentence(case(load_config(None, []))) == NEXT


def test_where_others_do_not_wait_long_or_there_is_no_gpu_nothing_is_looked_for(monkeypatch):
    looked = []
    monkeypatch.setattr(what_fits, "nearest", lambda case, device: looked.append(case))
    hurry = load_config(None, ["guard.rank_seconds=60"])
    assert sentence(case(hurry, gpus=2)) == NEXT and not looked
    assert sentence(case(hurry)) == sentence(case(load_config(None, []), gpus=2)) == NEXT
    assert len(looked) == 2
    monkeypatch.setattr(what_fits, "this_gpu", lambda: None)
    assert sentence(case(hurry)) == NEXT and len(looked) == 2


def test_an_error_of_memory_without_a_case_and_other_errors_pass():
    for error in (OutOfMemory("by a script"), ValueError("other")):
        with pytest.raises(type(error)) as raised, what_fits.naming_what_fits():
            raise error
        assert raised.value is error


@pytest.mark.parametrize(
    ("said", "gb"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79 GiB", 2.0),
        ("HIP out of memory. Tried to allocate 512.00 MiB (GPU 1; ...)", 0.5),
        ("CUDA out of memory. Tried to allocate 512 bytes.", 2**-21),
        ("CUDA out of memory. Tried to allocate 3.50 KiB.", 3.5 * 2**-20),
        ("CUDA out of memory. Tried to allocate more GiB", None),
        ("CUDA out of memory. Tried to allocate -1.00 GiB", None),
        ("CUDA error: out of memory", None),
        ("", None),
    ],
)
def test_what_was_asked_for_is_read_from_torchs_sentence(said, gb):
    assert tried(torch.OutOfMemoryError(said)) == gb
    assert tried(RuntimeError(said)) is None  # of whoever says it, and not of a GPU's allocator


def test_host_memory_is_told_from_that_of_a_gpu():
    assert of_host(MemoryError()) and of_host(OSError(12, "Cannot allocate memory"))
    assert of_host(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"))
    assert not of_host(torch.OutOfMemoryError("CUDA out of memory"))
