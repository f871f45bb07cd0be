"""The exceptions of this package; the text of each is the complete message for the user.

MtpGgufError
├── FormatError      a GGUF or safetensors file breaks its format
├── CheckpointError  a Hugging Face checkpoint is incomplete, contradictory or of an unknown kind
├── RequestError     the files are valid, but the request cannot be carried out with them
├── OutputError      the result cannot be written
├── RemoteError      a remote file cannot be reached or cannot be read by ranges
├── ClusterError     a cluster cannot be reached, or its workers cannot do what they were sent
└── ServerError      a llama-server cannot be found, built or started

The library raises these; commands print the text as one sentence and exit with code 1.
"""


class MtpGgufError(Exception):
    """Base of all errors that mtp-gguf raises on purpose."""


class FormatError(MtpGgufError):
    """A file breaks its format: names the file, the field, what was expected and what was found."""


class CheckpointError(MtpGgufError):
    """A checkpoint is incomplete, contradicts itself, or is of an unknown kind."""


class RequestError(MtpGgufError):
    """The files are valid, but the request does not fit them."""


class RemoteError(MtpGgufError):
    """A file on a server cannot be reached or cannot be read by ranges: names the address."""


class ClusterError(MtpGgufError):
    """A cluster cannot be reached, or its workers cannot do what they were sent."""


class OutputError(MtpGgufError):
    """The result cannot be written to the requested path."""


class ServerError(MtpGgufError):
    """A llama-server cannot be found, built or started, or does not support the request."""
