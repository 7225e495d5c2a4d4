"""A checkpoint is whole or absent, says which file is broken, and restores numbers bit for bit."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from flowrl.runtime.store import checkpoint, files, run_folder
from flowrl.runtime.store.checkpoint import CheckpointError

TENSORS = {
    "lora": {"a.weight": torch.arange(6.0).reshape(2, 3), "b": torch.randn(4).bfloat16()},
    "ema": {"a.weight": torch.ones(2, 3)},
}


def test_what_was_saved_is_loaded_bit_for_bit(tmp_path):
    folder = checkpoint.save(tmp_path, 7, TENSORS, {"window": [1, 2], "seed": 3})
    assert folder == tmp_path / "checkpoints" / "step-000007" == checkpoint.latest(tmp_path)
    tensors, meta = checkpoint.load(folder)
    assert meta == {"iteration": 7, "window": [1, 2], "seed": 3}
    assert tensors.keys() == TENSORS.keys()
    for stem, group in TENSORS.items():
        for name, value in group.items():
            loaded = tensors[stem][name]
            assert loaded.dtype == value.dtype and torch.equal(loaded, value)


def test_tied_and_strided_tensors_are_saved(tmp_path):
    weight = torch.randn(3, 4)
    saved = {"t": {"a": weight, "b": weight, "c": weight.t()}}
    tensors, _ = checkpoint.load(checkpoint.save(tmp_path, 1, saved, {}))
    assert torch.equal(tensors["t"]["b"], weight) and torch.equal(tensors["t"]["c"], weight.t())


def test_only_the_newest_are_kept_and_one_iteration_can_be_saved_twice(tmp_path):
    for iteration in (1, 2, 10, 10, 1000000):
        checkpoint.save(tmp_path, iteration, TENSORS, {}, keep=2)
    assert [p.name for p in checkpoint.steps(tmp_path)] == ["step-000010", "step-1000000"]
    assert not list((tmp_path / "checkpoints").glob(".flowrl*"))


@pytest.mark.parametrize("name", ["lora.safetensors", "meta.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["truncate", "flip a byte", "remove", "nest"])
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_taken(tmp_path, name, damage):
    checkpoint.save(tmp_path, 1, TENSORS, {})
    path = checkpoint.save(tmp_path, 2, TENSORS, {}) / name
    data = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    elif damage == "nest":  # deeper than a parser of JSON goes
        path.write_bytes(b"[" * 100_000)
    else:
        data[0] ^= 1  # "{" of json becomes "z"
        path.write_bytes(data if damage == "flip a byte" else bytes(data[1:]))
    with pytest.raises(CheckpointError, match=name) as error:
        checkpoint.load(path.parent)
    if path.suffix == ".json":
        with pytest.raises(CheckpointError, match=name):
            checkpoint.read_json(path)
    found = checkpoint.load_newest(tmp_path)
    assert found.folder.name == "step-000001" and found.meta["iteration"] == 1
    assert found.damaged == {path.parent: str(error.value)} and "\n" not in str(error.value)
    aside = checkpoint.set_aside(path.parent)
    assert aside.name == "damaged-step-000002" and len(checkpoint.steps(tmp_path)) == 1


def test_a_single_flipped_bit_in_the_weights_is_found(tmp_path):
    path = checkpoint.save(tmp_path, 1, TENSORS, {}) / "ema.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="ema.safetensors does not match its sha256"):
        checkpoint.load(path.parent)


def test_a_run_without_checkpoints_says_so(tmp_path):
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        checkpoint.latest(tmp_path)


def test_leftovers_of_an_interrupted_write_are_passed_over_and_cleared(tmp_path):
    checkpoint.save(tmp_path, 1, TENSORS, {})
    leftover = tmp_path / "checkpoints" / f"{files.TEMPORARY}host-1-00000000"
    leftover.mkdir()
    (leftover / "lora.safetensors").write_bytes(b"half")
    assert checkpoint.latest(tmp_path).name == "step-000001"
    files.clean(tmp_path, owned=True)
    assert not leftover.exists() and checkpoint.latest(tmp_path).name == "step-000001"


def test_a_writer_killed_at_any_moment_leaves_whole_checkpoints(tmp_path):
    code = """
import sys, torch
from flowrl import checkpoint
for i in range(1, 10**6):
    checkpoint.save(sys.argv[1], i, {"t": {"x": torch.full((1000,), float(i))}}, {"i": i})
    print(i, flush=True)
"""
    for _ in range(2):
        command = [sys.executable, "-c", code, str(tmp_path)]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE)
        writer.stdout.readline()  # imports are done, the first checkpoint stands
        time.sleep(0.15)
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        for folder in checkpoint.steps(tmp_path):
            tensors, meta = checkpoint.load(folder)
            assert (tensors["t"]["x"] == meta["i"]).all()


def test_truncating_leaves_each_iteration_once(tmp_path):
    lines = [{"iteration": i, "reward/total": 0.1 * i} for i in range(5)]
    text = "".join(json.dumps(x) + "\n" for x in lines) + '{"iteration": 2, "rew'
    (tmp_path / "metrics.jsonl").write_text(text)
    (tmp_path / "samples").mkdir()
    for name in ("000002.png", "000003.png"):
        (tmp_path / "samples" / f"iteration-{name}").touch()
    (tmp_path / "samples" / "iteration-000004").mkdir()
    (tmp_path / "samples" / "mine-20260101.png").touch()
    run_folder.truncate_metrics(tmp_path, 2)
    kept = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(x) for x in kept] == lines[:3]
    left = sorted(p.name for p in (tmp_path / "samples").iterdir())
    assert left == ["iteration-000002.png", "mine-20260101.png"]


def _steps(model, optimizer, count):
    for i in range(count):
        optimizer.zero_grad()
        model(torch.full((2, 3), float(i))).square().sum().backward()
        optimizer.step()


def test_optimizer_state_is_keyed_by_name_and_continues_bit_for_bit(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    _steps(model, optimizer, 3)
    names = dict(model.named_parameters())
    groups = {"model": names, "optimizer": checkpoint.pack_optimizer(optimizer, names)}
    tensors, _ = checkpoint.load(checkpoint.save(tmp_path, 3, groups, {}))

    twin = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    twin.load_state_dict(tensors["model"])
    twin_names = dict(reversed(list(twin.named_parameters())))  # another order: names decide
    twin_optimizer = torch.optim.AdamW(twin_names.values(), lr=0.1)
    checkpoint.unpack_optimizer(twin_optimizer, twin_names, tensors["optimizer"])
    _steps(model, optimizer, 2)
    _steps(twin, twin_optimizer, 2)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_optimizer_state_of_another_model_is_refused():
    layer = torch.nn.Linear(3, 4)
    optimizer, names = torch.optim.AdamW(layer.parameters()), dict(layer.named_parameters())
    said = {"old.weight": "old.weight, which is not trained"}
    said["weight"] = r"weight: exp_avg has shape \(1,\)"
    for name, sentence in said.items():
        with pytest.raises(CheckpointError, match=sentence):
            checkpoint.unpack_optimizer(optimizer, names, {f"{name}/exp_avg": torch.ones(1)})


@pytest.mark.parametrize(
    ("kind", "moment"), [(torch.optim.AdamW, "state1"), (torch.optim.SGD, "exp_avg")]
)
def test_moments_of_another_optimizer_are_refused(kind, moment):
    """SGD stands for any other class."""
    layer = torch.nn.Linear(3, 4)
    names, packed = dict(layer.named_parameters()), {f"weight/{moment}": torch.ones(4, 3)}
    with pytest.raises(CheckpointError, match="the state of AdamW.*, which is not converted"):
        checkpoint.unpack_optimizer(kind(layer.parameters()), names, packed)
