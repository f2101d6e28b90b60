"""Certificates of mode builtin: one CA and one leaf for both Services, in one Secret. Pure, except for key generation.

The CA is valid for ten years, because a pod keeps it for its whole life. The leaf is renewed after two thirds of its
life by the same CA. A missing, damaged or expired CA is replaced when a leaf is signed; older pods do not trust its
leaves. Older CAs that are still valid remain in ca.crt after the new one, because their leaf is served until the
kubelets update the volume.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LEAF_S, AUTHORITY_S = 90 * 86400.0, 3650 * 86400.0
MAX_KEPT = 3  # previous CAs that stay in the bundle
RENEW_AT = 2 / 3  # fraction of its life after which a leaf is renewed
BACKDATE_S = 600.0  # tolerated clock skew of clients for a new certificate


class Issued(NamedTuple):
    """Certificate and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def data(self, name: str) -> dict[str, bytes]:
        """Return both as PEM, in the form of Secret data."""
        pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        key = self.key.private_bytes(pem, form, serialization.NoEncryption())
        return {f"{name}.crt": self.certificate.public_bytes(pem), f"{name}.key": key}


def renewed(data: Mapping[str, bytes], names: Sequence[str], *, now_s: float) -> dict[str, bytes]:
    """Return the renewed Secret data (ca.crt, ca.key, tls.crt, tls.key)."""
    leaf = stored(data, "tls", now_s)
    if leaf is not None and _serves(leaf.certificate, data.get("ca.crt", b""), names, now_s):
        return dict(data)
    authority, bundle = stored(data, "ca", now_s), data.get("ca.crt", b"")
    if authority is None:
        authority = issue((), None, now_s=now_s, lasts_s=AUTHORITY_S)
        bundle = authority.data("ca")["ca.crt"] + _still_valid(bundle, now_s)
    leaf = issue(names, authority, now_s=now_s, lasts_s=LEAF_S)
    return {**authority.data("ca"), "ca.crt": bundle, **leaf.data("tls")}


def stored(data: Mapping[str, bytes], name: str, now_s: float) -> Issued | None:
    """Return a stored certificate and its key, or None if they are missing, mismatched or not valid now."""
    try:
        certificate = x509.load_pem_x509_certificate(data.get(f"{name}.crt", b""))
        key = serialization.load_pem_private_key(data.get(f"{name}.key", b""), None)
    except (ValueError, TypeError):
        return None
    begins_s, ends_s = _life(certificate)
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not begins_s <= now_s < ends_s:
        return None
    return Issued(certificate, key) if certificate.public_key() == key.public_key() else None


def _still_valid(bundle: bytes, now_s: float) -> bytes:
    """Return the first unexpired certificates of a bundle, as PEM."""
    try:
        found = x509.load_pem_x509_certificates(bundle)
    except ValueError:
        return b""
    valid = [each for each in found if now_s < _life(each)[1]][:MAX_KEPT]
    return b"".join(each.public_bytes(serialization.Encoding.PEM) for each in valid)


def _serves(leaf: x509.Certificate, authority: bytes, names: Sequence[str], now_s: float) -> bool:
    """Return whether a leaf is signed by this CA (whose key may be lost), for these names, and not due for renewal."""
    begins_s, ends_s = _life(leaf)
    try:
        leaf.verify_directly_issued_by(x509.load_pem_x509_certificate(authority))
        found = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
        return False
    is_for = found.get_values_for_type(x509.DNSName) == [*names]
    return is_for and now_s < begins_s + RENEW_AT * (ends_s - begins_s)


def _life(certificate: x509.Certificate) -> tuple[float, float]:
    return certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp()


def issue(names: Sequence[str], signer: Issued | None, *, now_s: float, lasts_s: float) -> Issued:
    """Issue a leaf for these names that does not outlive its signer, or a CA if there is no signer."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name(
        [x509.NameAttribute(NameOID.COMMON_NAME, "deltashard" if signer else "deltashard CA")]
    )
    until_s, signs = now_s + lasts_s, signer is None
    usage = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False
    )
    usage |= dict.fromkeys(("crl_sign", "encipher_only", "decipher_only"), False)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(signer.certificate.subject if signer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(dt.datetime.fromtimestamp(now_s - BACKDATE_S, dt.UTC))
        .add_extension(x509.BasicConstraints(ca=signs, path_length=0 if signs else None), critical=True)
        .add_extension(
            x509.KeyUsage(digital_signature=not signs, key_cert_sign=signs, **usage), critical=True
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    if signer is not None:
        until_s = min(until_s, _life(signer.certificate)[1])
        identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.key.public_key())
        builder = (
            builder.add_extension(
                x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=False
            )
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(identifier, critical=False)
        )
    builder = builder.not_valid_after(dt.datetime.fromtimestamp(until_s, dt.UTC))
    return Issued(builder.sign(signer.key if signer else key, hashes.SHA256()), key)
