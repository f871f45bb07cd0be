"""Whether MTPLlama has flash attention on, with the loaded libraries and these options.

cd tests; python -m support.flash_attention MODEL OPTIONS
"""

from __future__ import annotations

import json
import sys
from typing import Any

from mtp_gguf.native import MTPLlama
from mtp_gguf.native.runtime import llama_cpp


def is_on(model: str, options: dict[str, Any]) -> bool:
    with MTPLlama(model, depth=0, n_ctx=256, profile=False, **options) as llm:
        kind: int = llm.context_params.flash_attn_type
        return kind == llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED


if __name__ == "__main__":
    print(json.dumps(is_on(sys.argv[1], json.loads(sys.argv[2]))))
