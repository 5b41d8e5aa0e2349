"""Certificates and node keys for tests, as make_certificates.sh and make_keys.sh make them."""

import datetime
import ipaddress

import pytest

pytest.importorskip("cryptography", reason="cryptography is not installed: pip install 'fedgma[flower]'")

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


def write_private(path, key, form=serialization.PrivateFormat.PKCS8):
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    path.chmod(0o600)


def certificate(key, name, names=(), issuer=None, days=1):
    """A certificate for the key, issued by (certificate, key), or by itself if it is an authority's."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    signer = key if issuer is None else issuer[1]
    built = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer[0].subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - 10 * DAY)
        .not_valid_after(now + days * DAY)
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if issuer is None:
        usage = dict.fromkeys(
            ["digital_signature", "content_commitment", "key_encipherment", "data_encipherment"], False
        )
        usage |= dict.fromkeys(["key_agreement", "encipher_only", "decipher_only"], False)
        built = built.add_extension(x509.KeyUsage(key_cert_sign=True, crl_sign=True, **usage), critical=True)
    if names:
        alternatives = [_name(one) for one in names]
        built = built.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    return built.sign(signer, hashes.SHA384())


def _name(text):
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def write_certificates(folder, names=("localhost", "127.0.0.1"), days=1, trusted=True):
    """ca.crt, ca.key, server.pem, server.key; not `trusted`: ca.crt is another authority's."""
    folder.mkdir(parents=True, exist_ok=True)
    authority_key, server_key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    authority = certificate(authority_key, "authority")
    server = certificate(server_key, "server", names, issuer=(authority, authority_key), days=days)
    shown = authority if trusted else certificate(ec.generate_private_key(ec.SECP384R1()), "another authority")
    (folder / "ca.crt").write_bytes(shown.public_bytes(serialization.Encoding.PEM))
    (folder / "server.pem").write_bytes(server.public_bytes(serialization.Encoding.PEM))
    write_private(folder / "ca.key", authority_key)
    write_private(folder / "server.key", server_key)
    return folder


def write_keys(folder, count=2):
    """node0, node0.pub, ... as ssh-keygen writes them; returns the private keys."""
    folder.mkdir(parents=True, exist_ok=True)
    keys = [ec.generate_private_key(ec.SECP384R1()) for _ in range(count)]
    for number, key in enumerate(keys):
        write_private(folder / f"node{number}", key, serialization.PrivateFormat.OpenSSH)
        public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        (folder / f"node{number}.pub").write_bytes(public)
    return keys
