"""When and why the authority and the leaf certificate are reissued."""

from __future__ import annotations

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from deltashard_operator.tls import issuance

DAY_S = 86400.0
BASE_TIME_S = 1_800_000_000.0
NAMES = ["webhook.ns.svc", "fleet.ns.svc"]
FIRST = issuance.renewed({}, NAMES, now_s=BASE_TIME_S)
OTHER = issuance.renewed({}, NAMES, now_s=BASE_TIME_S)


@pytest.mark.parametrize(
    ("days", "names", "damage", "reissued"),
    [
        (59.0, NAMES, {}, set()),
        (61.0, NAMES, {}, {"tls"}),
        (91.0, NAMES, {}, {"tls"}),
        (1.0, [*NAMES, "another.example"], {}, {"tls"}),
        (1.0, NAMES, {"tls.crt": b"damaged"}, {"tls"}),
        (1.0, NAMES, {"tls.key": b""}, {"tls"}),
        (1.0, NAMES, {"tls.key": OTHER["tls.key"]}, {"tls"}),
        (1.0, NAMES, {key: OTHER[key] for key in ("tls.crt", "tls.key")}, {"tls"}),
        (1.0, NAMES, {"ca.key": b""}, set()),  # no signature is due yet
        (61.0, NAMES, {"ca.key": b""}, {"ca", "tls"}),
        (1.0, NAMES, {"ca.crt": b"damaged"}, {"ca", "tls"}),
        (1.0, NAMES, {"ca.crt": OTHER["ca.crt"]}, {"ca", "tls"}),
        (3651.0, NAMES, {}, {"ca", "tls"}),
    ],
)
def test_expired_lost_or_damaged_certificates_are_reissued(
    days: float, names: list[str], damage: dict[str, bytes], reissued: set[str]
) -> None:
    """Other certificates stay, so existing verifiers continue to work."""
    now_s, before = BASE_TIME_S + days * DAY_S, FIRST | damage
    after = issuance.renewed(before, names, now_s=now_s)
    assert {key.partition(".")[0] for key in before if after[key] != before[key]} == reissued
    assert issuance.renewed(after, names, now_s=now_s + 1) == after
    bundle = x509.load_pem_x509_certificates(after["ca.crt"])
    kept = [] if days > 3650 or "ca" not in reissued or before["ca.crt"] == b"damaged" else [before["ca.crt"]]
    assert [each.public_bytes(serialization.Encoding.PEM) for each in bundle[1:]] == kept
    if "ca" in reissued:  # the next leaf of the new authority does not change the bundle
        later = issuance.renewed(after, names, now_s=now_s + 61 * DAY_S)
        assert later["ca.crt"] == after["ca.crt"]


def test_a_leaf_does_not_outlive_its_authority() -> None:
    signer = issuance.issue((), None, now_s=BASE_TIME_S, lasts_s=10 * DAY_S)
    leaf = issuance.issue(NAMES, signer, now_s=BASE_TIME_S, lasts_s=90 * DAY_S)
    assert leaf.certificate.not_valid_after_utc == signer.certificate.not_valid_after_utc
