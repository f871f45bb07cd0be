"""One thread for PyTorch; the demo model, its head, and what it answers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mtp_gguf.gguf_tools.model import open_model
from mtp_gguf.train.block import Weights, read_weights
from mtp_gguf.train.dataset import Sample
from support.head_training import answers
from support.models import Models


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Products this small gain nothing from threads, and lose much where others run as well."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def demo(models: Models) -> Path:
    return models.gguf("demo", "F16", "F16")


@pytest.fixture(scope="session")
def samples(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    return answers(demo, tmp_path_factory.mktemp("data"), 1300, 1)


@pytest.fixture(scope="session")
def weights(demo: Path) -> Weights:
    with open_model(demo) as model:
        return read_weights(model)
