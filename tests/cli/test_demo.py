"""The demo model end to end: converted by us, run by llama.cpp, compared with transformers."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mtp_gguf.native.runtime import llama_cpp
from support.commands import check_refusal, invoke, succeed
from support.models import DEMO, Models

PROMPTS = (
    "def is_prime(n):\n",
    "import os\nimport sys\n\nclass Reader:\n    def __init__(self, path):\n",
    "<|im_start|>user\nWhat does os.path.join do?<|im_end|>\n<|im_start|>assistant\n",
)
GREEDY_TOKENS = 64
# Logits this close (in nats) may change places when activations are rounded to BF16.
NEAR_TIE = 0.05


@pytest.fixture(scope="module")
def hf() -> Any:
    transformers: Any = pytest.importorskip("transformers")
    torch: Any = pytest.importorskip("torch")
    model = transformers.Qwen3_5ForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    return model.eval()


def greedy_llama(path: Path, prompt: str) -> list[int]:
    with closing(llama_cpp.Llama(str(path), n_ctx=256, verbose=False)) as llm:
        tokens = llm.tokenize(prompt.encode(), add_bos=False, special=True)
        generated = []
        for token in llm.generate(tokens, temp=0.0, top_k=1, repeat_penalty=1.0):
            generated.append(int(token))
            if len(generated) == GREEDY_TOKENS:
                break
        return tokens + generated


def test_demo_command_shows_the_whole_way(tmp_path: Path) -> None:
    kept = tmp_path / "kept.gguf"
    shown = succeed("demo", "-o", kept, "-n", "32")
    assert "can draft: MTP head in block" in shown
    assert "FastMTP" in shown
    text = shown.split("--stats\n", 1)[1]
    assert text.startswith("    ")
    assert "accepted by position" in text
    assert kept.is_file()
    again = invoke("demo", "-o", kept)
    assert again.exit_code == 1
    assert "--overwrite" in again.output
    folder = invoke("demo", tmp_path)
    check_refusal(folder.exit_code, folder.stderr, "-o FILE.gguf keeps the model", code=2)


@pytest.mark.sample(2)
@pytest.mark.upstream
@pytest.mark.parametrize("quant", ["F32", "BF16"])
@pytest.mark.parametrize("prompt", PROMPTS, ids=["function", "class", "chat"])
def test_greedy_text_equals_transformers(prompt: str, quant: str, models: Models, hf: Any) -> None:
    torch: Any = pytest.importorskip("torch")
    sequence = greedy_llama(models.gguf("demo", quant, quant), prompt)
    start = len(sequence) - GREEDY_TOKENS
    with torch.no_grad():
        wanted = hf.generate(
            torch.tensor([sequence[:start]]),
            max_new_tokens=GREEDY_TOKENS,
            do_sample=False,
            eos_token_id=None,
        )[0].tolist()
    same = next((i for i, (a, b) in enumerate(zip(sequence, wanted, strict=True)) if a != b), None)
    if same is None:
        return
    # llama.cpp multiplies a BF16 matrix with activations rounded to BF16, the reference does not.
    assert quant == "BF16", f"other text after {same - start} tokens"
    with torch.no_grad():
        logits = hf(torch.tensor([sequence[:same]])).logits[0, -1]
    assert float(logits[wanted[same]] - logits[sequence[same]]) < NEAR_TIE
