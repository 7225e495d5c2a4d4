"""Replace attributes of objects that others share, for a while."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

LOCK = threading.RLock()  # lets one thread record at a time


def replaced(owner: Any, **values: Any) -> AbstractContextManager[Any]:
    """Give owner, an object or a class, these attributes inside the block only."""
    return mock.patch.multiple(owner, create=True, **values)
