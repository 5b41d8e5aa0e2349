"""Checks of certificates and keys before anything is started: a wrong one is named here and not in a node's log."""

import os
import ssl
from pathlib import Path

from fedgma.errors import ConfigError

NAMES = ("ca.crt", "server.pem", "server.key")


def check_certificates(folder: Path, names: list[str]) -> None:
    """Raise `ConfigError` unless a node that trusts ca.crt accepts the server under each of these names."""
    for name in NAMES:
        if not (folder / name).is_file():
            raise ConfigError(f"there is no {name} in {str(folder)!r}; see make_certificates.sh")
    for key in ("server.key", "ca.key"):
        if (folder / key).exists():
            check_private(folder / key)
    try:
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # no password: a key that is encrypted fails here and asks for none
        server.load_cert_chain(folder / "server.pem", folder / "server.key", password="")  # nosec B106
        client = ssl.create_default_context(cafile=folder / "ca.crt")
    except (ssl.SSLError, OSError, ValueError) as error:
        raise ConfigError(f"the certificates in {str(folder)!r} cannot be used: {error}") from None
    for name in names:
        try:
            _shake_hands(client, server, name)
        except ssl.SSLCertVerificationError as error:
            reason = error.verify_message
            raise ConfigError(
                f"nodes would refuse {str(folder / 'server.pem')!r} at {name}: {reason}; see make_certificates.sh"
            ) from None


def check_private(key: Path) -> None:
    """Raise `ConfigError` if the private key does not exist, or if others than its owner can read it."""
    if not key.is_file():
        raise ConfigError(f"there is no private key {str(key)!r}; see make_keys.sh")
    if os.name != "nt" and key.stat().st_mode & 0o077:
        raise ConfigError(f"other users can read {str(key)!r}; run: chmod 600 {key}")


def check_public(key: Path) -> None:
    """Raise `ConfigError` unless the file has a public key that Flower can register."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    try:
        valid = isinstance(load_ssh_public_key(key.read_bytes()), EllipticCurvePublicKey)
    except (OSError, ValueError, UnsupportedAlgorithm):
        valid = False
    if not valid:
        raise ConfigError(f"{str(key)!r} is not a public key of an elliptic curve (ecdsa); see make_keys.sh")


def as_pem(key: Path) -> bytes:
    """A public key's file as the SuperLink keeps the key."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

    return load_ssh_public_key(key.read_bytes()).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def _shake_hands(client: ssl.SSLContext, server: ssl.SSLContext, name: str) -> None:
    """A TLS handshake in memory."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [client.wrap_bio(back, there, server_hostname=name), server.wrap_bio(there, back, server_side=True)]
    while sides:
        for side in list(sides):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            sides.remove(side)
