"""Runs a model on a Vulkan device that is lost or lacks something: faults.c is a Vulkan layer."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from support.places import find_gpu

HERE = Path(__file__).parent
TESTS = HERE.parents[1]
NAME = "VK_LAYER_MTP_faults"


only_vulkan = pytest.mark.skipif(
    not (find_gpu() or "Vulkan").startswith("Vulkan"), reason="the faults are those of Vulkan"
)


def _build(folder: Path) -> None:
    """The layer and the manifest by which Vulkan's loader finds it."""
    compiler = shutil.which("cc") or pytest.skip("no C compiler")
    library = folder / "libfaults.so"
    command = [compiler, "-shared", "-fPIC", str(HERE / "faults.c"), "-o", str(library)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"faults.c cannot be compiled: {done.stderr.strip().splitlines()[0]}")
    layer = {
        "name": NAME,
        "type": "INSTANCE",
        "library_path": str(library),
        "api_version": "1.3.0",
        "implementation_version": "1",
        "description": "fails when it is told to",
    }
    manifest = {"file_format_version": "1.0.0", "layer": layer}
    (folder / "faults.json").write_text(json.dumps(manifest), encoding="utf-8")


def run_with_faults(model: Path, work: str, **limits: int) -> str:
    """What support.vulkan.failing prints; it must end by itself, not by a signal.

    limits: `bytes`, `range` and `order`, as in faults.c.
    """
    with tempfile.TemporaryDirectory() as folder:
        _build(Path(folder))
        environment = {
            **os.environ,
            "VK_LAYER_PATH": folder,
            "VK_INSTANCE_LAYERS": NAME,
            **{f"MTP_VK_{name.upper()}": str(limit) for name, limit in limits.items()},
        }
        done = subprocess.run(
            [sys.executable, "-m", "support.vulkan.failing", str(model), work],
            cwd=TESTS,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
