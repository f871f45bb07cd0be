"""What the container is built from."""

from __future__ import annotations

import re

from support.models import ROOT


def test_the_container_has_all_that_the_package_is_built_from() -> None:
    """.dockerignore names what is kept; a new folder of the package has to be added there."""
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    packages = re.findall(r'^"mtp_gguf(?:/\w+)?" = "(\w+)[\w/]*"$', settings, re.MULTILINE)
    assert "native" in packages
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    kept = {line[1:] for line in lines if line.startswith("!")}
    assert kept == {*packages, "CMakeLists.txt", "LICENSE", "README.md", "pyproject.toml"}
