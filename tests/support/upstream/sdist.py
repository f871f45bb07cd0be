"""The pinned source distribution (named in `patches/BASE`): versions and sources."""

from __future__ import annotations

from mtp_gguf.server.upstream_source import PIN, base, llama_cpp_source

VERSION = base().version
LLAMA_CPP_COMMIT = base().commit[:9]

__all__ = ["LLAMA_CPP_COMMIT", "PIN", "VERSION", "llama_cpp_source"]
