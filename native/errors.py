"""What can go wrong in the native library, one class per kind that a caller may want to catch.

NativeError
├── HeadMissing         a sound model without an MTP head; the text says how to get one
├── ModelRefused        a file that is wrong, or that this library does not run
├── ContextFull         no room left in the context
└── LibraryMismatch     libmtp and the loaded llama.cpp do not belong together
"""

from mtp_gguf.gguf_tools.errors import MtpGgufError


class NativeError(MtpGgufError):
    """The native library refused a call or failed; the text is its own sentence."""


class HeadMissing(NativeError):
    """The model has no MTP head."""


class ModelRefused(NativeError):
    """The file cannot be read, is malformed, or is not of a kind that this library runs."""


class ContextFull(NativeError):
    """The sequence does not fit into the context any more."""


class LibraryMismatch(NativeError):
    """The library is missing, or was built for another llama.cpp than the one that is loaded."""
