"""Tiny checkpoints from tables of keys and shapes, filled with random numbers."""

import torch


def linear(name, out, inputs):
    return {f"{name}.weight": (out, inputs), f"{name}.bias": (out,)}


def norm(name, width):
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def under(prefix, shapes):
    return {f"{prefix}.{key}": shape for key, shape in shapes.items()}


def random_state(shapes, scale, seed=0):
    """Normal numbers times `scale`; those of a norm's weight lie around 1."""
    g = torch.Generator().manual_seed(seed)
    return {
        key: scale * torch.randn(shape, generator=g) + ("norm" in key.lower() and "weight" in key)
        for key, shape in shapes.items()
    }
