"""Exceptions of the native library, one class per kind that a caller may want to catch.

NativeError
├── HeadMissingError      a valid model without an MTP head; the message says how to get one
├── ModelRefusedError     a file that is malformed, or that this library does not support
├── ContextFullError      no room left in the context
├── DeviceFailedError     a device failed, such as a GPU that was lost; close the model
└── LibraryMismatchError  libmtp was not built for the loaded llama.cpp

MessagesError is a RequestError: a model cannot be asked with these messages.
"""

from mtp_gguf.gguf_tools.errors import MtpGgufError, RequestError


class NativeError(MtpGgufError, RuntimeError):
    """The native library rejected a call or failed; the message is the library's.

    It is also a RuntimeError, because llama_cpp raises that when it fails.
    """


class HeadMissingError(NativeError):
    """The model has no MTP head."""


class ModelRefusedError(NativeError):
    """The file cannot be read, is malformed, or is not supported by this library."""


class ContextFullError(NativeError):
    """The sequence no longer fits into the context."""


class DeviceFailedError(NativeError):
    """A device failed, and with it what it held; the model can only be closed."""


class LibraryMismatchError(NativeError):
    """The library is missing, or was not built for the loaded llama.cpp."""


class MessagesError(RequestError, ValueError):
    """The messages of a conversation are malformed, or the chat template refuses them.

    It is also a ValueError, which llama_cpp raises where a template refuses messages.
    """
