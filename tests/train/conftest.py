"""One thread for PyTorch."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Products this small gain nothing from threads, and lose much where others run as well."""
    torch.set_num_threads(1)
