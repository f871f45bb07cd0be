"""mtp_text_drafts, which have no class in the package: sessions and the server have their own."""

from __future__ import annotations

import ctypes

from mtp_gguf.native._bindings import DEPTH_AUTO, check, library
from mtp_gguf.native.depth import DepthChooser

MOST = 15  # drafts from the text in a cycle


class TextDrafts:
    """Drafts from one text, beside a chooser of depths."""

    def __init__(self, chooser: DepthChooser) -> None:
        self.chooser = chooser
        self._handle = ctypes.c_void_p()
        check(library().mtp_text_drafts_new(ctypes.byref(self._handle)))

    def close(self) -> None:
        """Free the text."""
        library().mtp_text_drafts_free(self._handle)

    def set(self, tokens: list[int], *, generated: bool) -> None:
        """Make the text equal to these tokens."""
        values = (ctypes.c_int32 * len(tokens))(*tokens)
        check(library().mtp_text_drafts_set(self._handle, values, len(tokens), generated))

    def plan(self, n: int = MOST, depth: int = DEPTH_AUTO) -> list[int]:
        """Draft at most n tokens; none if `depth` drafts of the head, up to 4, promise more."""
        out, found = (ctypes.c_int32 * (MOST + 1))(), ctypes.c_int32()
        arguments = (self.chooser.handle, depth, 4, out, n, ctypes.byref(found))
        check(library().mtp_text_drafts_plan(self._handle, *arguments))
        return out[: found.value]

    def report(self, verified: int, accepted: int, ms: float) -> None:
        """Report a cycle whose drafts came from the text, and the time of its batch."""
        arguments = (verified, accepted, ctypes.c_double(ms), ctypes.c_double(0.0))
        check(library().mtp_depth_report_text(self.chooser.handle, *arguments))
