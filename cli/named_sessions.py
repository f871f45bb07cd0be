"""`chat --continue [NAME]`: conversations by name, in a folder of the user."""

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from mtp_gguf.gguf_tools.errors import MtpGgufError, OutputError, RequestError

if TYPE_CHECKING:
    from mtp_gguf.native.llama.mtp_llama import MTPLlama

OPTION = "--continue"
_NAME = re.compile(r"\w[\w.-]{0,99}")


def folder() -> Path:
    """Return the folder of the user's conversations (XDG base directory rules)."""
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "mtp-gguf" / "chats"


def path_of(name: str, llm: "MTPLlama") -> Path:
    """Return the session file of a name, or the last one of this model if the name is empty.

    RequestError if the name cannot be that of a file, or if the model has no conversation.
    OutputError if the folder cannot be created.
    """
    if not name:
        return _last(llm)
    if not _NAME.fullmatch(name):
        raise RequestError(
            f"{OPTION}: expected a name of letters, digits, '-', '_' and '.', found {name[:100]!r}"
        )
    try:
        folder().mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder()}: cannot be created: {error.strerror}") from None
    return folder() / f"{name}.session"


def _last(llm: "MTPLlama") -> Path:
    from mtp_gguf.native.llama.session_identity import check_identity, identity_of  # noqa: PLC0415
    from mtp_gguf.native.sessions.session_file import read_header  # noqa: PLC0415  (NumPy)

    identity = identity_of(llm)
    found = []
    for path in folder().glob("*.session"):
        with suppress(MtpGgufError, OSError):
            check_identity(path, read_header(path).identity, identity)
            found.append((path.stat().st_mtime_ns, path))
    if not found:
        raise RequestError(
            f"{OPTION}: expected a conversation with this model in {folder()}, found none; start "
            f"one with {OPTION} NAME"
        )
    return max(found)[1]
