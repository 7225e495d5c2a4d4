"""Replace attributes of objects that others share, for a while."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

LOCK = threading.RLock()  # one recording at a time


@contextlib.contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Give owner, an object or a class, these attributes inside the block only."""
    had = {name: vars(owner)[name] for name in values if name in vars(owner)}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in values:
            delattr(owner, name)
        for name, value in had.items():
            setattr(owner, name, value)
