"""How often llama-server's draft-mtp accepts the drafts of a GGUF's MTP head.

    python acceptance.py /path/to/llama-server demo-f16.gguf

Starts the server on the loopback address, asks for a completion of each prompt, and prints one line
of JSON per depth and temperature. `first_draft` is measured with one draft token a cycle, where
accepted / drafted is the chance that the first draft is right.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from decode import complete, server

# Half of the primer's kind, with names it has (robots) and has not (planets); half of the library's
# and of nobody's.
QUESTIONS = (
    "What does os.path.join do?",
    "How do I use argparse.ArgumentParser.add_argument?",
    "Explain collections.OrderedDict.",
    "What is contextlib.contextmanager for?",
    "Tell me about the with statement.",
    "Explain threading.Lock.",
    "Write a Python function that reads the lines of a file.",
    "Write a Python function that counts the robots.",
    "Show me a Python function that finds a ticket by its name.",
    "Write a function that sorts the planets by size.",
    "Write a Python function read_lines(path).",
    "What does the Python reference say about lambda?",
)
BEGINNINGS = (
    "import json\nimport sys\n",
    "class Stack:\n    def __init__(self):\n",
    "class Planet:\n",
    "def fibonacci(n):\n",
    "def total_price(books):\n",
    "def is_prime(n):\n",
    '"""Functions for rivers."""\n',
    "# Planets\n\n",
    "import os\nimport sys\n\ndef main():\n",
    "def parse_args(args=None):\n    parser = argparse.",
    "try:\n    import json\nexcept ImportError:\n",
    "The if statement is used for",
)
PROMPTS = [f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n" for q in QUESTIONS]
PROMPTS += BEGINNINGS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("server", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--texts", type=Path, help="append the generated texts to this file")
    args = parser.parse_args()
    for depth in args.depths:
        with server(args.server, args.model, depth, args.threads) as address:
            for temperature in args.temperatures:
                drafted = accepted = made = 0
                for seed, prompt in enumerate(PROMPTS, start=1):
                    more = {"temperature": temperature, "seed": seed, "ignore_eos": False}
                    answer = complete(address, prompt, args.tokens, cache_prompt=False, **more)
                    drafted += answer["timings"].get("draft_n", 0)
                    accepted += answer["timings"].get("draft_n_accepted", 0)
                    made += answer["tokens_predicted"]
                    if args.texts:
                        with args.texts.open("a") as file:
                            print(f"--- {temperature}\n{prompt}|||{answer['content']}", file=file)
                result: dict[str, object] = {
                    "model": args.model.name,
                    "depth": depth,
                    "temperature": temperature,
                    "prompts": len(PROMPTS),
                    "tokens": made,
                    "drafted": drafted,
                    "accepted": accepted,
                    "accepted_share": round(accepted / max(1, drafted), 4),
                }
                if depth == 1:
                    result["first_draft"] = result["accepted_share"]
                print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
