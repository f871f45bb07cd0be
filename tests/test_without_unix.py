"""The package works without the modules and functions that Windows does not have.

A process that hides them runs commands, so that an import or a call at the wrong place is noticed
on every system.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from mtp_gguf.gguf_tools.machine import os_files
from support.commands import MAIN, run_python

HIDE = """
import os, signal, sys
import filelock, numpy, psutil, subprocess, tempfile  # they use what a Unix has

for name in ("fcntl", "grp", "pty", "pwd", "resource"):
    sys.modules[name] = None
# What is used on Linux alone, and asks for it, stays: copy_file_range, fstatvfs, sendfile.
for name in (
    "fork getuid killpg posix_fallocate pread preadv pwrite sched_getaffinity setsid sysconf"
).split():
    delattr(os, name)
for name in ("SIGHUP", "SIGKILL", "SIGALRM", "SIGBUS", "SIGUSR1", "setitimer", "pthread_kill"):
    delattr(signal, name)

from mtp_gguf.gguf_tools.machine import os_files

os_files.lock = lambda fd, wait=False: True  # Windows has msvcrt for it
"""

IMPORTS = """
import importlib, pkgutil
import mtp_gguf

for module in pkgutil.walk_packages(mtp_gguf.__path__, "mtp_gguf."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        if error.name != "torch":  # an extra, which need not be installed
            raise
    print(module.name)
"""


@pytest.mark.thorough
def test_every_module_can_be_imported() -> None:
    imported = run_python(HIDE + IMPORTS).split()
    assert {"mtp_gguf.native.llama.mtp_llama", "mtp_gguf.server.build", "mtp_gguf.train"} <= {
        *imported
    }


@pytest.mark.thorough
def test_the_same_file_and_text(tmp_path: Path) -> None:
    """Convert and generate, and change a draft vocabulary in place and in a new file."""
    hidden, plain = tmp_path / "hidden" / "demo.gguf", tmp_path / "plain" / "demo.gguf"
    hidden.parent.mkdir()
    plain.parent.mkdir()
    tokens = ("-n", "12")
    expected = run_python(MAIN, "demo", *tokens, "-o", plain)
    found = run_python(HIDE + MAIN, "demo", *tokens, "-o", hidden)
    assert generated(found) == generated(expected)
    assert hidden.read_bytes() == plain.read_bytes()
    trunk = hidden.with_name("trunk.gguf")
    for words in (["fastmtp", "remove", "--in-place"], ["strip", "-o", trunk]):
        run_python(HIDE + MAIN, *words, hidden)
    assert hidden.read_bytes() != plain.read_bytes()
    assert sorted(hidden.parent.iterdir()) == [hidden, trunk]


def generated(output: str) -> str:
    """What the last command of `demo` generates."""
    return output.rpartition("$ mtp-gguf generate")[2].partition("\n\nkept: ")[0]


def test_threads_share_a_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads and writes by position do not disturb each other."""
    for name in ("pread", "pwrite"):
        monkeypatch.delattr(os, name)
    path = tmp_path / "file"
    fd = os_files.open_file(path, os.O_RDWR | os.O_CREAT)
    errors = []

    def work(digit: int) -> None:
        data = bytes([digit]) * 1000
        for block in range(digit, 4000, 8):
            os_files.write_at(fd, data, block * 1000)
            if os_files.read_at(fd, 1000, block * 1000) != data:
                errors.append(block)

    threads = [threading.Thread(target=work, args=(digit,)) for digit in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(fd)
    assert errors == []
    assert path.read_bytes() == b"".join(bytes([block % 8]) * 1000 for block in range(4000))


def test_a_lock_ends_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    first = os_files.open_file(path, os.O_RDWR | os.O_CREAT)
    second = os_files.open_file(path, os.O_RDWR)
    assert os_files.lock(first)
    assert not os_files.lock(second)
    os.close(first)
    assert os_files.lock(second, wait=True)
    os.close(second)
