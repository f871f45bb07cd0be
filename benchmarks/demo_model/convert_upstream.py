"""Run llama.cpp's convert_hf_to_gguf.py on the demo model.

    python convert_upstream.py LLAMA_CPP_FOLDER MODEL_FOLDER --outfile demo.gguf --outtype f16

That converter knows pre-tokenizers by a hash of what a whole vocabulary makes of a test string and
refuses a vocabulary of one's own; this wrapper answers "qwen35" for it and changes nothing else.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path


def main() -> None:
    root = Path(sys.argv[1]).resolve()
    sys.path[:0] = [str(root), str(root / "gguf-py")]

    base = importlib.import_module("conversion.base")
    base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen35"
    script = root / "convert_hf_to_gguf.py"
    sys.argv = [str(script), *sys.argv[2:]]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
