"""What can go wrong in the native library, one class per kind that a caller may want to catch.

NativeError
├── HeadMissingError      a sound model without an MTP head; the text says how to get one
├── ModelRefusedError     a file that is wrong, or that this library does not run
├── ContextFullError      no room left in the context
└── LibraryMismatchError  libmtp and the loaded llama.cpp do not belong together
"""

from mtp_gguf.gguf_tools.errors import MtpGgufError


class NativeError(MtpGgufError, RuntimeError):
    """The native library refused a call or failed; the text is its own sentence.

    A RuntimeError too, because that is what llama_cpp raises where it fails.
    """


class HeadMissingError(NativeError):
    """The model has no MTP head."""


class ModelRefusedError(NativeError):
    """The file cannot be read, is malformed, or is not of a kind that this library runs."""


class ContextFullError(NativeError):
    """The sequence does not fit into the context any more."""


class LibraryMismatchError(NativeError):
    """The library is missing, or was built for another llama.cpp than the one that is loaded."""
