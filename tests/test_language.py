"""The wording of everything that people read: the field's terms instead of private ones."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent

# Pattern, and what to write instead. Each was used here once and stopped readers.
BANNED = {
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\bfore(tell(s|ing)?|told)\b": "predict",
    r"\bguess(es|ed)? right\b": "acceptance rate",
    r"\b(take|takes|took|taking|taken) turns\b|\bin turn\b|\bturn by turn\b": "interleaved",
    r"\btaken back\b|\btake(s|n)? it back\b|\bundone\b": "rolled back",
    r"\bwish(es)?\b": "task",
    r"\bcontenders?\b": "variant",
    r"\bverdicts?\b|\bjudged?\b": "analysis, bottleneck",
    r"\bfirst look\b": "probe",
    r"\bdial (model|file|checkpoint)s?\b": "synthetic model",
    r"\bthe trunk's own (token|one)s?\b": "bonus token, token of the trunk",
    r"\bwho wrote\b|\bwritten by whom\b": "source of each token",
    r"\bmakes? (one|it) with\b": "build it with",
    r"\bwhere nobody\b|\bnobody (says|knows|asked)\b": "if unknown",
    r"\bof everything\b|\bwhat matters (less|most)\b": "a sentence with subject and verb",
    r"_apart\b|\bHeldInterrupts\b|\bwithout_choice\b": "the names of the style guide",
    r"\bis no (shard|file|model|number)\b|\bnone that\b": "is not a …",
    r"\b(files|paths|texts) of yours\b": "your own …",
    r"\bplain reading\b": "the measured memory bandwidth",
    r"\baverage that forgets\b": "exponentially weighted average",
}
# Files whose words are not ours, or that must contain the patterns.
EXCLUDED = re.compile(
    r"^gguf_tools/demo_model/|^tests/goldens/|^benchmarks/demo_model/primer|^tests/test_language\.py$"
    r"|\.(json|npy|png|jinja)$|^LICENSE"
)


def our_lines(path: Path) -> list[str]:
    """The lines of a file; of a patch only its message, because the code is llama.cpp's, too."""
    text = path.read_text("utf-8")
    return (text.partition("\ndiff --git ")[0] if path.suffix == ".patch" else text).splitlines()


def test_banned_words() -> None:
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    found = []
    for name in names:
        if EXCLUDED.search(name):
            continue
        for number, line in enumerate(our_lines(ROOT / name), 1):
            for pattern, better in BANNED.items():
                if match := re.search(pattern, line, re.IGNORECASE):
                    found.append(f"{name}:{number}: {match[0]!r}: write {better}")
    assert not found, "\n".join(found)
