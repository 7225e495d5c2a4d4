"""Recognise that memory ran out, and say what helps. torch has a class for GPUs only."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from flowrl.runtime.text import printable

SIGNS = (  # phrases in messages of torch, CUDA, numpy and the system
    "out of memory",
    "allocate memory",
    "not enough memory",
    "unable to allocate",
    "alloc_failed",
    "storage size calculation overflowed",
    "multiplication overflow",
)


class OutOfMemory(RuntimeError):
    """Memory ran out. The message is for users: where it was, what used it, and what to set."""


@contextmanager
def during(phase: str) -> Iterator[None]:
    """Note the phase on an error of memory that is raised inside; the innermost phase counts."""
    try:
        yield
    except Exception as error:
        note_phase(error, phase)
        raise


def note_phase(error: Exception, phase: str) -> None:
    """Write the phase on an error of memory, unless a phase inside has done so."""
    if ran_out(error) and not hasattr(error, "phase"):
        error.phase = phase  # type: ignore[attr-defined]


def ran_out(error: object) -> bool:
    """Whether an exception says that a GPU or the machine has not enough memory."""
    if isinstance(error, MemoryError | OutOfMemory):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError | OSError) and any(sign in text for sign in SIGNS)


def advice(error: object) -> str:
    """Return the sentence that tells a user whose memory ran out what to do."""
    if isinstance(error, OutOfMemory):
        return str(error)
    what = printable(error, 120) or type(error).__name__
    return (
        f"memory ran out ({what}); lower batch.micro and batch.decode (flowrl score: --chunk), ask"
        " for smaller pictures (model.pipeline.height and width), set model.dtype=bf16,"
        " train.gradient_checkpointing=true, model.encoders=leave or model.offload=denoiser, or"
        " free memory that other programs hold"
    )
