"""Which peers an engine talks to, and how the two ends of a connection make sure of each other.

On one host: a Unix socket, and the kernel's word that the other end runs as the same user. Between hosts: TLS with
one shared key (`access.py`).
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import secrets
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from trtllm_disagg.errors import ConfigError, KvTransferError
from trtllm_disagg.keys import read_private_file
from trtllm_disagg.kv_transfer.handle import TCP, UNIX, join_endpoint, scheme_of, split_endpoint
from trtllm_disagg.peer_process import require_same_user

_BACKLOG = 128


class PeerGoneError(KvTransferError):
    """Nothing listens at the endpoint any more: the process that did has ended."""


class PeerAuthentication(Protocol):
    """Both ends of the connections between engines. What is not a peer is refused with an OSError."""

    scheme: str

    def listen(self) -> tuple[socket.socket, str]:
        """A listening socket and its endpoint. Raises ConfigError."""
        ...

    def screen(self, connection: socket.socket) -> tuple[socket.socket, str]:
        """Of a connection that was just accepted, at once: what to talk through, and the peer's name in limits and
        logs, the same for all of its connections where that can be known.
        """
        ...

    def greet(self, connection: socket.socket) -> None:
        """The rest of the way in; it may take as long as the connection's timeout."""
        ...

    def connect(self, endpoint: str, timeout: float) -> socket.socket:
        """Raises PeerGoneError when no peer listens there any more."""
        ...


class SameUserAuthentication:
    """Processes of this user on this host. The socket is an abstract one: the kernel removes it with its process."""

    scheme = UNIX

    def listen(self) -> tuple[socket.socket, str]:
        name = f"@trtllm-disagg-kv-{secrets.token_hex(16)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(_address(name, 1))
        listener.listen(_BACKLOG)
        return listener, join_endpoint(name, 1)

    def screen(self, connection: socket.socket) -> tuple[socket.socket, str]:
        return connection, f"pid {require_same_user(connection).pid}"

    def greet(self, connection: socket.socket) -> None:
        """The kernel has said it all."""

    def connect(self, endpoint: str, timeout: float) -> socket.socket:
        place = split_endpoint(endpoint)
        if place is None or scheme_of(endpoint) != UNIX:
            raise KvTransferError(
                f"the peer's control channel {endpoint} is on another host, and this engine talks to this host only: "
                "set embedded.transfer_host and embedded.transfer_key_file on both"
            )
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(max(timeout, 0.001))
            connection.connect(_address(*place))
            require_same_user(connection)
        except PermissionError as error:
            # Names are freed with their process, so the peer has ended, and another user has taken its name since.
            connection.close()
            raise PeerGoneError(f"the peer's control channel {endpoint}: {error}") from error
        except BaseException:
            connection.close()
            raise
        return connection


def _address(name: str, number: int) -> bytes:
    return f"\0{name.removeprefix('@')}:{number}".encode()


# Peers on other hosts: TLS 1.3 in which both ends prove that they have the same key file.
#
# The certificate is made from the key, the same one to the byte wherever that file is, and is the only one that
# either end accepts.


KEY = "embedded.transfer_key_file"
_MIN_KEY_BYTES = 32
_MAX_KEY_BYTES = 1 << 16
_HOW = "head -c 32 /dev/urandom | base64 > FILE && chmod 600 FILE, and the same file on every host"


def read_key(path: Path) -> bytes:
    """Raises ConfigError for a file that cannot be read, that other users may read, or that is too short."""
    expected = f"a file that only its owner may read, with at least {_MIN_KEY_BYTES} bytes ({_HOW})"
    key = read_private_file(path, KEY, expected, _MAX_KEY_BYTES).strip()
    if len(key) < _MIN_KEY_BYTES:
        raise ConfigError.bad_value(KEY, str(path), f"{expected}: it has {len(key)}")
    return key


class SharedKeyAuthentication:
    """Processes with the same key, wherever they are."""

    scheme = TCP

    def __init__(self, host: str, key: bytes) -> None:
        """Raises ConfigError where the package `cryptography` is missing."""
        self._host = host
        private, self._certificate = _identity(key)
        self._server = _context(ssl.PROTOCOL_TLS_SERVER, private, self._certificate)
        self._client = _context(ssl.PROTOCOL_TLS_CLIENT, private, self._certificate)

    def listen(self) -> tuple[socket.socket, str]:
        listener = _listen(self._host)
        return listener, join_endpoint(self._host, listener.getsockname()[1])

    def screen(self, connection: socket.socket) -> tuple[socket.socket, str]:
        """The key is not proven yet."""
        host, port, *_ = connection.getpeername()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wrapped = self._server.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return wrapped, f"{host} port {port}"

    def greet(self, connection: socket.socket) -> None:
        assert isinstance(connection, ssl.SSLSocket)
        self._prove(connection)

    def connect(self, endpoint: str, timeout: float) -> socket.socket:
        place = split_endpoint(endpoint)
        if place is None or scheme_of(endpoint) != TCP:
            raise KvTransferError(
                f"the peer's control channel {endpoint} takes peers on its own host only: "
                f"set embedded.transfer_host and {KEY} on both"
            )
        raw = socket.create_connection(place, timeout=max(timeout, 0.001))
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = self._client.wrap_socket(raw, do_handshake_on_connect=False)
        try:
            self._prove(connection)
        except ssl.SSLError as error:
            connection.close()
            raise KvTransferError(
                f"the peer's control channel {endpoint} does not have the key of {KEY} ({error.reason or error})"
            ) from error
        except BaseException:
            connection.close()
            raise
        return connection

    def _prove(self, connection: ssl.SSLSocket) -> None:
        """OpenSSL verifies it; then, that it is this very certificate."""
        connection.do_handshake()
        if connection.getpeercert(binary_form=True) != self._certificate:
            raise PermissionError("the other end has another certificate")


def _listen(host: str) -> socket.socket:
    key, expected = "embedded.transfer_host", "an address of this machine that decode workers can connect to"
    if host in ("0.0.0.0", "::"):
        raise ConfigError.bad_value(key, host, expected)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, 0), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError.bad_value(key, host, f"{expected} ({error})") from error


def _identity(key: bytes) -> tuple[bytes, bytes]:
    """(private key, certificate), DER. The same for the same key."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    except ImportError as error:
        raise ConfigError(
            f"{KEY}: KV between hosts needs cryptography ({error}); pip install cryptography"
        ) from error
    seed = HKDF(hashes.SHA256(), 32, salt=b"trtllm-disagg", info=b"transfer key 1").derive(key)
    private = Ed25519PrivateKey.from_private_bytes(seed)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "trtllm-disagg transfer")])
    utc = datetime.UTC
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(1)
        .not_valid_before(datetime.datetime(2000, 1, 1, tzinfo=utc))
        .not_valid_after(datetime.datetime(9999, 12, 31, tzinfo=utc))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(private, None)
    )
    return (
        private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
        certificate.public_bytes(serialization.Encoding.DER),
    )


def _context(protocol: int, private: bytes, certificate: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate itself is compared, not a name in it
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate)
    pem = ssl.DER_cert_to_PEM_cert(certificate).encode()
    with _in_memory(private) as key_file, _in_memory(pem) as certificate_file:
        context.load_cert_chain(certificate_file, key_file)
    return context


@contextlib.contextmanager
def _in_memory(content: bytes) -> Iterator[str]:
    """A path to it: ssl reads files only, and a private key is not to be on a disk."""
    fd = os.memfd_create("key", os.MFD_CLOEXEC)
    try:
        os.write(fd, content)
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


# How far an engine's KV travels: to processes of the same user on this host, or to hosts that have the same key.


KEY_FILE_VARIABLE = "TRTLLM_DISAGG_TRANSFER_KEY_FILE"


@dataclass(frozen=True, slots=True)
class OneHost:
    """Nothing listens on a network."""

    def authentication(self) -> PeerAuthentication:
        return SameUserAuthentication()


@dataclass(frozen=True, slots=True)
class Network:
    #: Of this machine; only there is listened.
    host: str
    key: bytes = field(repr=False)

    def authentication(self) -> PeerAuthentication:
        return SharedKeyAuthentication(self.host, self.key)


TransferScope = OneHost | Network


def choose_scope(host: str, key_file: Path | None) -> TransferScope:
    """`host` is a loopback address for one host. Raises ConfigError for another one without a key that is fit."""
    if _is_loopback(host):
        return OneHost()
    named = key_file or os.environ.get(KEY_FILE_VARIABLE)
    if not named:
        raise ConfigError.bad_value(
            "embedded.transfer_host",
            host,
            f"a loopback address, or together with {KEY} (or {KEY_FILE_VARIABLE}): other hosts get KV only when they "
            "have the same key",
        )
    return Network(host, read_key(Path(named)))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
