"""What can go wrong, as exceptions whose text is the whole message.

MtpGgufError
├── FormatError      a GGUF or safetensors file breaks its format
├── CheckpointError  a Hugging Face checkpoint is incomplete, contradictory or of an unknown kind
├── RequestError     the files are fine, but what was asked for cannot be done with them
├── OutputError      the result cannot be written
├── RemoteError      a file elsewhere cannot be reached or cannot be read in parts
└── ServerError      a llama-server cannot be found, built or started

Libraries raise these; commands print the text as one sentence and exit with 1.
"""


class MtpGgufError(Exception):
    """Base of all errors that mtp-gguf raises on purpose."""


class FormatError(MtpGgufError):
    """A file breaks its format: names the file, the field, what was expected and what was found."""


class CheckpointError(MtpGgufError):
    """A checkpoint is incomplete, contradicts itself, or is of a kind that is not known."""


class RequestError(MtpGgufError):
    """The files are sound, but the request does not fit them."""


class RemoteError(MtpGgufError):
    """A file on a server cannot be reached, or not be read in parts: names the address."""


class OutputError(MtpGgufError):
    """The result cannot be written where it was asked for."""


class ServerError(MtpGgufError):
    """A llama-server cannot be found, built or started, or cannot do what was asked of it."""
