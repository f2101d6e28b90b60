"""Making and judging certificates: authorities, leaves, bundles. No clock, no file, no API; keys are random.

Elliptic curve P-256 throughout. Every authority has a subject of its own: some clients pick an issuer by its name
alone, and two authorities of one name in one bundle would be a matter of luck.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

BACKDATE_S = 600.0
"""A clock may be wrong by so much and still believe a certificate of this moment."""
RENEW_AT = 2 / 3
"""Share of its life after which a leaf is issued anew, and an authority gets a successor."""
MAX_BUNDLE = 8
"""Certificates in a bundle; the oldest go first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """A certificate and its key, PEM."""

    certificate: bytes
    key: bytes


def authority(name: str, *, now_s: float, lasts_s: float) -> Issued:
    """A new self-signed authority, which may sign leaves and nothing else."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _name(f"{name} {secrets.token_hex(4)}")
    builder = _builder(subject, subject, key, now_s, now_s + lasts_s, signs=True)
    return _issued(builder.sign(key, hashes.SHA256()), key)


def leaf(signer: Issued, names: Sequence[str], *, now_s: float, lasts_s: float) -> Issued:
    """A new server certificate for these names and addresses; it never outlives its signer."""
    parent = x509.load_pem_x509_certificate(signer.certificate)
    parent_key = _private_key(signer.key)
    key = ec.generate_private_key(ec.SECP256R1())
    until_s = min(now_s + lasts_s, parent.not_valid_after_utc.timestamp())
    certificate = (
        _builder(_name("deltashard"), parent.subject, key, now_s, until_s, signs=False)
        .add_extension(x509.SubjectAlternativeName(_general_names(names)), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(parent_key.public_key()), critical=False
        )
        .sign(parent_key, hashes.SHA256())
    )
    return _issued(certificate, key)


def usable(certificate: bytes, key: bytes, *, now_s: float) -> bool:
    """Whether these are a certificate and its key, and it is valid now."""
    try:
        parsed = x509.load_pem_x509_certificate(certificate)
        fits = parsed.public_key() == _private_key(key).public_key()
    except (ValueError, TypeError):
        return False
    return fits and parsed.not_valid_before_utc.timestamp() <= now_s < parsed.not_valid_after_utc.timestamp()


def aging(certificate: bytes, *, now_s: float) -> bool:
    """Whether two thirds of a usable certificate's life are over."""
    parsed = x509.load_pem_x509_certificate(certificate)
    begin_s, end_s = parsed.not_valid_before_utc.timestamp(), parsed.not_valid_after_utc.timestamp()
    return now_s >= begin_s + RENEW_AT * (end_s - begin_s)


def not_after_s(certificate: bytes) -> float:
    """End of a usable certificate's validity, Unix seconds."""
    return x509.load_pem_x509_certificate(certificate).not_valid_after_utc.timestamp()


def is_for(certificate: bytes, names: Iterable[str]) -> bool:
    """Whether a usable certificate is for exactly these names and addresses."""
    parsed = x509.load_pem_x509_certificate(certificate)
    try:
        found = parsed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return False
    return set(found) == set(_general_names(names))


def signed_by(certificate: bytes, authorities: bytes) -> bool:
    """Whether one of a bundle's authorities signed a usable certificate."""
    parsed = x509.load_pem_x509_certificate(certificate)
    for each in parse(authorities):
        try:
            parsed.verify_directly_issued_by(each)
        except (ValueError, TypeError, InvalidSignature):
            continue
        return True
    return False


def parse(bundle: bytes) -> list[x509.Certificate]:
    """The certificates in a bundle; none when it is not one."""
    try:
        return x509.load_pem_x509_certificates(bundle)
    except ValueError:
        return []


def bundle(ours: Sequence[bytes], others: Sequence[bytes], *, now_s: float) -> bytes:
    """Every authority of these bundles that is still valid, once each, the newest first.

    IMPORTANT: an authority leaves a bundle only when it has expired (or is not ours and one of more than `MAX_BUNDLE`).
    Whoever still serves a certificate of it, however long a file took to reach it, serves one that is expired, too:
    nothing that verifies now stops verifying.
    """
    mine = _valid(ours, now_s)
    theirs = {key: each for key, each in _valid(others, now_s).items() if key not in mine}
    newest = sorted(theirs.items(), key=lambda item: _age(item[1]), reverse=True)
    kept = mine | dict(newest[: max(0, MAX_BUNDLE - len(mine))])
    return b"".join(
        each.public_bytes(serialization.Encoding.PEM)
        for each in sorted(kept.values(), key=_age, reverse=True)
    )


def _valid(bundles: Sequence[bytes], now_s: float) -> dict[bytes, x509.Certificate]:
    found = (each for pem in bundles for each in parse(pem))
    return {
        each.fingerprint(hashes.SHA256()): each
        for each in found
        if each.not_valid_after_utc.timestamp() > now_s
    }


def _age(certificate: x509.Certificate) -> tuple[dt.datetime, bytes]:
    return certificate.not_valid_before_utc, certificate.fingerprint(hashes.SHA256())


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    now_s: float,
    until_s: float,
    *,
    signs: bool,
) -> x509.CertificateBuilder:
    """What authorities (which sign certificates and do nothing else) and leaves have in common."""
    unused = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "crl_sign")
    usage = dict.fromkeys((*unused, "encipher_only", "decipher_only"), False)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(dt.datetime.fromtimestamp(now_s - BACKDATE_S, dt.UTC))
        .not_valid_after(dt.datetime.fromtimestamp(until_s, dt.UTC))
        .add_extension(x509.BasicConstraints(ca=signs, path_length=0 if signs else None), critical=True)
        .add_extension(
            x509.KeyUsage(digital_signature=not signs, key_cert_sign=signs, **usage), critical=True
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _general_names(names: Iterable[str]) -> list[x509.GeneralName]:
    found: list[x509.GeneralName] = []
    for name in names:
        try:
            found.append(x509.IPAddress(ipaddress.ip_address(name)))
        except ValueError:
            found.append(x509.DNSName(name))
    return found


def _private_key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(pem, None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise TypeError("not a key on an elliptic curve")
    return key


def _issued(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Issued:
    return Issued(
        certificate=certificate.public_bytes(serialization.Encoding.PEM),
        key=key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
    )
