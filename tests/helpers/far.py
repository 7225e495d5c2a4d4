"""A device that is not there: tensors that say they are far away and compute on the CPU.

They show what a GPU would: how often the host waits for a value (`.item()`, `.cpu()`, `nonzero`,
boolean indices, `unique`), and tensors of two devices in one operator, which is an error here too.
"""

from collections import Counter
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("lazy", 0)  # autograd runs it in the host's own thread
SYNCING = {
    "_local_scalar_dense",
    "nonzero",
    "is_nonzero",
    "equal",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "masked_select",
    "bincount",
    "repeat_interleave",
}


class Far(Tensor):
    """`near` on the CPU holds the values."""

    @staticmethod
    def __new__(cls, near, requires_grad=False):
        return Tensor._make_wrapper_subclass(
            cls,
            near.shape,
            strides=near.stride(),
            storage_offset=near.storage_offset(),
            dtype=near.dtype,
            device=DEVICE,
            requires_grad=requires_grad,
        )

    def __init__(self, near, requires_grad=False):
        self.near = near

    def __repr__(self):
        return f"Far({self.near})"

    @property
    def data(self):
        return Far(self.near.detach())

    @data.setter
    def data(self, other):  # as the views of fully trained weights do
        self.near = near(other)

    def tolist(self):  # torch has none for subclasses
        waits["download"] += 1
        return self.near.tolist()

    def __getitem__(self, index):  # torch makes tensors of lists on the spot, out of our sight
        parts = index if isinstance(index, tuple) else (index,)
        return super().__getitem__(
            tuple(torch.tensor(part) if isinstance(part, list) else part for part in parts)
        )

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


waits = Counter()  # what the host waited for, since it was cleared


def near(value):
    return value.near if isinstance(value, Far) else value


def far(value):
    return Far(value) if isinstance(value, Tensor) and not isinstance(value, Far) else value


def is_far(device):
    return device is not None and torch.device(device).type == DEVICE.type


def run(func, args, kwargs):
    """An operator whose tensors, or whose device, are far."""
    name = func.overloadpacket.__name__
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    away, asked = any(isinstance(t, Far) for t in tensors), kwargs.get("device")
    copied = (args[0], args[1]) if name == "copy_" else (None, args[0] if args else None)
    from_far = isinstance(copied[1], Far)
    to_far = isinstance(copied[0], Far) if name == "copy_" else is_far(asked)
    if name == "copy_" or (name == "_to_copy" and asked is not None):
        if from_far != to_far and not kwargs.get("non_blocking"):
            waits["download" if from_far else "upload"] += 1
    elif away:
        count(func, name, args, tensors)
    if asked is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if name == "_fused_sdp_choice":
        return 0  # plain matmuls
    result = func(*tree_map(near, args), **tree_map(near, kwargs))
    for given in tensors:  # an operator that writes returns what it wrote to
        if result is near(given):
            return given
    stays = name == "_to_copy" and asked is not None and not to_far
    return result if stays else tree_map(far, result)


def count(func, name, args, tensors):
    """Waits of an operator on tensors that are far, and an error where another one is not."""
    indices = [t for t in tree_leaves(args[1]) if t is not None] if name.startswith("index") else []
    for t in tensors:
        if isinstance(t, Far) or not t.ndim:  # a number from the host is no transfer
            continue
        assert any(t is index for index in indices), f"{func}: tensors of two devices"
        waits["upload"] += 1
    if any(isinstance(i, Tensor) and i.dtype == torch.bool for i in indices):
        waits["boolean index"] += 1
    if name in SYNCING:
        waits[name] += 1


class Away(TorchDispatchMode):
    """Inside it tensors can be made there."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = tree_leaves((args, kwargs))
        if is_far(kwargs.get("device")) or any(isinstance(t, Far) for t in given):
            return run(func, args, kwargs)
        return func(*args, **kwargs)


def send(module):
    """Put a network's weights there."""
    for part in module.modules():
        for name, p in part._parameters.items():
            if p is not None:
                part._parameters[name] = torch.nn.Parameter(far(p.data), p.requires_grad)
        for name, b in part._buffers.items():
            part._buffers[name] = far(b)
    return module


class Listed(TorchFunctionMode):
    """Inside it tensors can be made there of numbers and lists, which torch does out of sight of a
    dispatch mode."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and not isinstance(args[0], Tensor):
            values = tree_map(lambda v: v.item() if isinstance(v, Far) else v, args[0])
            if not is_far(kwargs.get("device")):
                return func(values, *args[1:], **kwargs)
            waits["upload"] += 1
            return far(func(values, *args[1:], **{**kwargs, "device": "cpu"}))
        if func is Tensor.new_tensor and isinstance(args[0], Far):
            waits["upload"] += 1
            return far(torch.tensor(args[1], **{"dtype": args[0].dtype, **kwargs}))
        return func(*args, **kwargs)


@contextmanager
def whole_runs(monkeypatch):
    """Inside it models are loaded far away, and a whole run of them stays there: random numbers are
    drawn on the CPU, and what torch asks a backend for by its name is there."""
    from flowrl.config import build
    from flowrl.policy import load

    prepare, generator, autocast = load._prepare, torch.Generator, torch.autocast

    class Generator(generator):
        def __new__(cls, device=None):
            return generator("cpu")

    def prepared(pipe, *args, **options):
        prepare(pipe, *args, **options)
        for part in pipe.components.values():
            if isinstance(part, torch.nn.Module):
                send(part)

    def cast(device_type, *args, **options):
        away = device_type == DEVICE.type
        return nullcontext() if away else autocast(device_type, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(load, "_prepare", prepared)
        patch.setattr(build, "load_policy", load.load_policy)  # no copy of one that is near
        patch.setattr(torch, "Generator", Generator)
        patch.setattr(torch, "autocast", cast)
        patch.setattr(torch, DEVICE.type, torch.cpu, raising=False)
        with Away(), Listed():
            yield
