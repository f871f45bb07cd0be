"""Runs upstream's convert_hf_to_gguf.py many times in forks of one process.

Importing torch and transformers takes longer than converting a tiny checkpoint. One process imports
them, and a fork of it does each conversion, so that no run sees what another one left.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from .sdist import llama_cpp_source

# Reads one JSON list of arguments per line: pre-tokenizer, log file, arguments of the converter.
#
# Upstream names a pre-tokenizer by the hash of the ids of a test string, which our vocabularies
# do not have. The patch answers for it; everything else of the converter runs as it is.
_LOOP = """
import json, os, runpy, sys
source = sys.argv[1]
sys.path.insert(0, source)
import torch, transformers
import torch._dynamo  # which the first `1 + tensor` without data imports, for 2 s in each fork
from transformers import AutoConfig, AutoTokenizer
from transformers.models.qwen3_5 import configuration_qwen3_5, tokenization_qwen3_5
from transformers.models.qwen3_5_moe import configuration_qwen3_5_moe
torch.set_num_threads(1)
from conversion import base, qwen
for line in sys.stdin:
    pre, log, *arguments = json.loads(line)
    child = os.fork()
    if not child:
        code = 1
        try:
            sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(sink, 1)
            os.dup2(sink, 2)
            if pre:
                base.TextModel.get_vocab_base_pre = lambda self, tokenizer: pre
            sys.argv = [source + "/convert_hf_to_gguf.py", *arguments]
            runpy.run_path(sys.argv[0], run_name="__main__")
            code = 0
        except SystemExit as end:
            code = 1 if end.code else 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    print(status, flush=True)
"""


class UpstreamError(RuntimeError):
    """One of upstream's steps failed; the message is what it printed."""


def offline() -> dict[str, str]:
    """The environment in which transformers asks no server for anything."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


class ConverterPool:
    """The converter of a version of llama.cpp, started once."""

    def __init__(self, base: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _LOOP, str(llama_cpp_source(base))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=offline(),
        )

    def close(self) -> None:
        """Let the process end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()

    def convert(
        self, folder: Path, out: Path, outtype: str, flags: Sequence[str], pre: str | None
    ) -> Path:
        """As `convert_upstream.convert` does."""
        log = out.with_suffix(".log")
        command = [str(folder), "--outtype", outtype, "--outfile", str(out), *flags]
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([pre or "", str(log), *command]) + "\n")
        self._process.stdin.flush()
        status = self._process.stdout.readline().strip()
        said = log.read_text(encoding="utf-8", errors="replace")
        log.unlink()
        if status != "0" or not out.is_file():
            out.unlink(missing_ok=True)
            raise UpstreamError(said[-4000:])
        return out


@cache
def pool(base: str) -> ConverterPool:
    """The converter of this process for a version; it ends with it."""
    started = ConverterPool(base)
    atexit.register(started.close)
    return started
