"""Bytes that the networks of rewards take on a device, computed without weights for `flowrl
budget`.

None stands for "not known". Heads are left out: they are a thousandth at most.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from flowrl.rewards.core.weights import on_hub
from flowrl.runtime import hub

WIDTH = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0}  # bytes of a number


def published(numbers: Mapping[str, int], source: str, dtype: str = "float32") -> float | None:
    """Bytes of the network that a setting names. numbers: hub name of a published network -> number
    of its weights, the usual one first; a file or folder counts as a copy of the usual one."""
    name = hub.split(source)[0] if on_hub(source) else next(iter(numbers))
    return numbers[name] * WIDTH[dtype] if name in numbers else None


def of_open_clip(model: str) -> float | None:
    """Bytes of a model of open_clip in fp32, built without weights from the config in the package
    or in a folder; None where that config, or its text tower's, is on the hub."""
    import open_clip

    named = model if ":" in model else model.replace("/", "-")
    try:
        config = None if named.startswith("hf-hub:") else open_clip.get_model_config(named)
    except OSError:  # the folder is on another machine
        config = None
    if config is None or "hf_model_name" in config["text_cfg"]:
        return None
    with _silent(), torch.device("meta"):
        network = open_clip.create_model(named, load_weights=False, device="meta")
    return WIDTH["float32"] * sum(p.numel() for p in network.parameters())


def together(*sizes: float | None) -> float | None:
    """The sum of these sizes; None where one is not known."""
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


@contextmanager
def _silent() -> Iterator[None]:
    """Silence open_clip, which warns that a network has no weights."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
