"""Weights that leave for real on a machine with one memory: while they are away they are spoilt."""

import torch

from flowrl.policy.weights.offload import OffloadedWeights

U8 = torch.uint8


def spoil(monkeypatch):
    """Numbers that no network can compute with stand for weights that are in host memory, so that
    whoever reads them there gets NaN, or an error."""
    leave = OffloadedWeights.leave

    def left(self):
        leave(self)
        for tensor in self.tensors:
            odd = float("nan") if tensor.is_floating_point() else 7 if tensor.dtype == U8 else -7
            tensor.data = torch.full_like(tensor.data, odd)

    monkeypatch.setattr(OffloadedWeights, "leave", left)
