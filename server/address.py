"""The address that a server listens on, and those of its RPC servers."""

import errno
import ipaddress
import socket
from dataclasses import dataclass

from mtp_gguf.gguf_tools.errors import RequestError

_CONNECT_SECONDS = 5.0
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True)
class Address:
    """A `host` (name or IP address) and a `port`, resolved to the socket addresses `bound`."""

    host: str
    port: int
    bound: tuple[tuple[socket.AddressFamily, str], ...]

    @property
    def public(self) -> bool:
        """Whether other machines can reach it."""
        return not all(ipaddress.ip_address(ip).is_loopback for _, ip in self.bound)

    def url(self, scheme: str, prefix: str) -> str:
        """The URL by which this machine reaches it."""
        host = _ANY.get(self.host, self.host)
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}{prefix}"


def resolve(host: str, port: int) -> Address:
    """Resolve `host`; RequestError if llama-server cannot bind it as a single host."""
    if not host or "," in host or host.endswith(".sock"):
        raise RequestError(f"--host: expected one IP address or name, found {host!r}")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # UnicodeError: not a possible name, such as `a..b`
        why = getattr(error, "strerror", None) or "not a host name"
        raise RequestError(f"--host: {host!r} is not an address of this machine: {why}") from None
    bound = dict.fromkeys((family, str(address[0])) for family, _, _, _, address in found)
    return Address(host, port, tuple(bound))


def check_free(address: Address) -> None:
    """RequestError if the port is taken or may not be used."""
    for family, ip in address.bound:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As servers do, so that connections in TIME_WAIT do not count as listeners.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((ip, address.port))
                probe.listen(1)
            except OSError as error:
                another = "--host" if error.errno == errno.EADDRNOTAVAIL else "--port"
                raise RequestError(
                    f"{address.host}:{address.port} cannot listen there: {error.strerror}; "
                    f"choose another {another}"
                ) from None


def check_rpc_servers(endpoints: str) -> None:
    """RequestError unless an RPC server answers at each of `endpoints`, `HOST:PORT,…`.

    llama-server itself aborts with a stack trace if one is missing.
    """
    for endpoint in endpoints.split(","):
        host, _, port = endpoint.rpartition(":")
        digits = port.isascii() and port.isdecimal() and len(port) <= len("65535")
        if not host or not digits or not 0 < int(port) < 2**16:
            raise RequestError(f"--rpc: expected HOST:PORT,…, found {endpoint!r}")
        try:
            socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise RequestError(
                f"--rpc: no RPC server answers at {endpoint}: {why}; start `ggml-rpc-server` there"
            ) from None
