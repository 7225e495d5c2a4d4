"""The attention backend of a policy's networks, by its name in diffusers' dispatcher."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from flowrl.runtime.log import logger
from flowrl.runtime.memory import ran_out
from flowrl.runtime.registry import did_you_mean
from flowrl.runtime.text import printable


def set_attention(
    networks: Iterable[nn.Module], name: str | None, device: torch.device | None = None
) -> None:
    """Let the networks compute attention by backend `name` (native, flash, sage, xformers, ...);
    None: by diffusers' own choice, without cuDNN's kernels on a GPU, where this switches them off
    for the process. It warns if a network's processors know no backends. device: where they
    compute; None: where their weights are.

    ValueError for a name that diffusers does not know, or one that does not work on this machine in
    the networks' type, gradient included.
    """
    networks, backend = list(networks), None if name is None else find(name)
    if backend is not None:
        first = [next(network.parameters()) for network in networks]
        for where, dtype in {(device or p.device, p.dtype) for p in first}:
            try_out(backend, where, dtype)
    elif any((device or next(net.parameters()).device).type == "cuda" for net in networks):
        # on an H100, with torch 2.11, the first backward of FLUX through cuDNN's attention reads
        # memory that is not its own; flash attention takes a third longer
        torch.backends.cuda.enable_cudnn_sdp(False)
    for network in networks:
        own = [getattr(module, "processor", None) for module in network.modules()]
        known = [p for p in own if hasattr(p, "_attention_backend")]
        for processor in known:
            processor._attention_backend = backend
        if backend is not None and not known:
            logger.warning(
                f"train.attention={name} has no effect on {type(network).__name__}: its attention"
                " processors do not ask diffusers for a backend"
            )


def find(name: str) -> Any:
    """Return diffusers' member for a name."""
    from diffusers.models.attention_dispatch import AttentionBackendName

    names = [member.value for member in AttentionBackendName]
    if name not in names:
        public = [known for known in names if not known.startswith("_")]
        raise ValueError(
            f'train.attention="{name}" is no attention backend of diffusers'
            f"{did_you_mean(name, public)}"
        )
    return AttentionBackendName(name)


def try_out(backend: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Try one small attention, forward and backward; ValueError if it fails."""
    from diffusers.models.attention_dispatch import attention_backend, dispatch_attention_fn

    q = torch.zeros(1, 128, 2, 64, device=device, dtype=dtype, requires_grad=True)
    try:
        with attention_backend(backend):  # attention_backend checks that its package is installed
            dispatch_attention_fn(q, q, q).sum().backward()
    except Exception as error:  # each backend raises errors of its own
        if ran_out(error):
            raise
        raise ValueError(
            f"train.attention={backend.value} does not work here, on {device.type} in"
            f" {str(dtype).removeprefix('torch.')}: {printable(error, 200)}"
        ) from error
