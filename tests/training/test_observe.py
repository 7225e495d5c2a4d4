"""Observers read an iteration and change nothing in it."""

import dataclasses

import pytest
import small
import torch
from test_watch import HELD_OUT
from torch import Tensor

from flowrl.training.observe import Observation
from flowrl.training.watch.watch import Watch

WATCHED = {**HELD_OUT, "watch__detectors": "[sharpness,drift]", "batch__group": "2"}


def tensors(value):
    """Every tensor in a record, however nested."""
    if isinstance(value, Tensor):
        yield value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors(getattr(value, field.name))
    elif isinstance(value, dict | list | tuple):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from tensors(entry)


@pytest.mark.parametrize("algorithm", ["flow_grpo", "nft"])
def test_observers_write_into_no_tensor_and_change_no_random_number(tmp_path, algorithm):
    """By the version counter of each tensor that they are shown, and of each weight."""
    made = small.trainer(tmp_path / "run", algorithm, **WATCHED)
    weights = [*made.parts.weights.parameters.values()]
    looked, metrics = [], {}

    def checked(observer):
        def observe(seen):
            assert isinstance(seen, Observation)
            read = [*tensors(seen), *weights]
            before = [t._version for t in read], dict(seen.metrics), torch.get_rng_state()
            found = observer(seen)
            assert [t._version for t in read] == before[0] and len(read) > len(weights) + 20
            assert seen.metrics == before[1] and torch.equal(torch.get_rng_state(), before[2])
            looked.append(observer)
            metrics.update(found)
            return found

        return observe

    observers = made.observers
    made.observers = tuple(map(checked, observers))
    it = made.iterate(0)
    assert looked == list(observers) and made.parts.watch is observers[-1]
    assert isinstance(observers[-1], Watch) and len(observers) == 2 + (algorithm == "nft")
    assert {"policy/winner_gain", "watch/sharpness", "watch/drift"} <= metrics.keys()
    assert it.metrics.items() >= metrics.items() and it.metrics["optimizer/step"] == 1


def test_what_a_run_does_not_watch_is_not_asked(tmp_path):
    """With all weights trained there is no reference, and so no gain of winners."""
    own = {"algorithm__kl_weight": "0", "data__eval": "null"}
    made = small.trainer(tmp_path / "run", "flow_grpo", train__mode="full", **own)
    assert made.observers == ()
