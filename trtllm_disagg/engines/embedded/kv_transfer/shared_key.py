"""Peers on other hosts: TLS 1.3 in which both ends prove that they have the same key file.

The certificate is made from the key, the same one to the byte wherever that file is, and is the only one that
either end accepts.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

from trtllm_disagg.admin.keys import read_private_file
from trtllm_disagg.errors import ConfigError, KvTransferError
from trtllm_disagg.processes.hosts import can_be_host
from trtllm_disagg.wire.kv_handle import TCP, is_endpoint, join_endpoint, scheme_of, split_endpoint

_BACKLOG = 128
KEY = "embedded.transfer_key_file"
_HOST_KEY = "embedded.transfer_host"
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
    """Peers are processes with the same key, on any host."""

    def __init__(self, host: str, key: bytes) -> None:
        """Raises ConfigError where the package `cryptography` is missing."""
        self._host = host
        private, self._certificate = _identity(key)
        self._server = _context(ssl.PROTOCOL_TLS_SERVER, private, self._certificate)
        self._client = _context(ssl.PROTOCOL_TLS_CLIENT, private, self._certificate)

    def listen(self) -> tuple[socket.socket, str]:
        listener = _listen(self._host)
        endpoint = join_endpoint(self._host, listener.getsockname()[1])
        if not is_endpoint(endpoint):
            listener.close()
            raise ConfigError.bad_value(
                _HOST_KEY, self._host, "a host name, or an address without a zone (%...), that peers accept"
            )
        return listener, endpoint

    def screen(self, connection: socket.socket) -> tuple[socket.socket, str]:
        """The peer has not proven yet that it has the key."""
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
                f"the peer's control channel {endpoint} accepts peers on its own host only: "
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
        """Do the TLS handshake, and require this very certificate of the peer."""
        connection.do_handshake()
        if connection.getpeercert(binary_form=True) != self._certificate:
            raise PermissionError("the other end has another certificate")


def _listen(host: str) -> socket.socket:
    key, expected = _HOST_KEY, "an address of this machine that decode workers can connect to"
    if host in ("0.0.0.0", "::") or not can_be_host(host):
        raise ConfigError.bad_value(key, host, expected)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, 0), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError.bad_value(key, host, f"{expected} ({error})") from error


def _identity(key: bytes) -> tuple[bytes, bytes]:
    """(private key, certificate) as PEM and DER, which depend on `key` only."""
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
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
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
    """A path to the content in memory: ssl reads files only, and a private key must not be on a disk."""
    fd = os.memfd_create("key", os.MFD_CLOEXEC)
    try:
        os.write(fd, content)
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)
