"""Every test runs offline and on one thread, so that numbers repeat."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread_and_a_fixed_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)
