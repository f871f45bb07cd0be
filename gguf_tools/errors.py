"""The exceptions of this package; the text of each is the complete message for the user.

MtpGgufError
├── FormatError      a GGUF or safetensors file breaks its format
├── CheckpointError  a Hugging Face checkpoint is incomplete, contradictory or of an unknown kind
├── RequestError     the files are valid, but the request cannot be carried out with them
│   └── OptionError  options contradict each other, or one has an impossible value
├── OutputError      the result cannot be written
├── RemoteError      a remote file cannot be reached or cannot be read by ranges
├── ClusterError     a cluster cannot be reached, or its workers cannot do what they were sent
└── ServerError      a llama-server cannot be found, built or started

The library raises these; commands print the text as one sentence and exit with code 1, or 2 for
an OptionError.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class MtpGgufError(Exception):
    """Base of all errors that mtp-gguf raises on purpose."""


class FormatError(MtpGgufError):
    """A file breaks its format: names the file, the field, what was expected and what was found."""


class CheckpointError(MtpGgufError):
    """A checkpoint is incomplete, contradicts itself, or is of an unknown kind."""


class RequestError(MtpGgufError):
    """The files are valid, but the request does not fit them."""


class OptionError(RequestError):
    """Options contradict each other, or the value of one is impossible whatever the files.

    Options are named as on the command line: `--mtp-type` is the argument `mtp_type`.
    text: the message without the option that it is about. option: this option; None for several.
    """

    def __init__(self, text: str, option: str | None = None) -> None:
        super().__init__(f"{option}: {text}" if option else text)
        self.text = text
        self.option = option


class RemoteError(MtpGgufError):
    """A file on a server cannot be reached or cannot be read by ranges: names the address."""


class ClusterError(MtpGgufError):
    """A cluster cannot be reached, or its workers cannot do what they were sent."""


class OutputError(MtpGgufError):
    """The result cannot be written to the requested path."""


class ServerError(MtpGgufError):
    """A llama-server cannot be found, built or started, or does not support the request."""


@contextmanager
def raising(kind: type[MtpGgufError], fault: str) -> Iterator[None]:
    """Raise an OSError as an error of ours: `fault`, as "PATH: cannot be read", and the reason."""
    try:
        yield
    except OSError as error:
        raise kind(f"{fault}: {error.strerror}") from None
