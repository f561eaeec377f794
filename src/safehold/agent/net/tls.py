"""TLS between agents, from files that the caller names."""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from safehold.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """What TLS needs; all in PEM.

    Attributes:
        certificate: Of this node, followed by those between it and the CA.
        key: Of the certificate, without a passphrase.
        ca: Who signs the certificates of all nodes. With it both sides have to show one; without it only servers do, and the
            system's list of CAs decides.
        check_names: Whether a server's certificate has to name the address it is reached at; False for one certificate on all nodes.
    """

    certificate: str
    key: str
    ca: str | None = None
    check_names: bool = True


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """Return what accepts connections."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load(context, files)
    if files.ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """Return what makes connections."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _load(context, files)
    context.check_hostname = files.check_names
    if files.ca is None:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    return context


def _load(context: ssl.SSLContext, files: TlsFiles) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    path = files.certificate
    try:
        context.load_cert_chain(files.certificate, files.key, password=_no_passphrase)
        if files.ca is not None:
            path = files.ca
            context.load_verify_locations(cafile=files.ca)
    except (OSError, ssl.SSLError, ValueError) as exc:
        text = f"TLS cannot be set up: {getattr(exc, 'strerror', None) or exc}"
        hint = "certificate, key (without a passphrase) and CA have to be PEM files that this user can read"
        raise ConfigurationError(text, path=path, hint=hint) from exc


def _no_passphrase() -> str:
    raise ValueError("the key has a passphrase")
