"""The webhook's certificate is loaded completely or not at all.

`test_rotation_under_load_fails_no_admission` covers its replacement.
"""

from __future__ import annotations

from pathlib import Path

from deltashard_operator.tls.certificate import Certificate
from prometheus_client import CollectorRegistry

from tests.support.server.apiserver import CertificateAuthority, put


def test_invalid_certificate_is_refused_and_old_one_kept(tmp_path: Path) -> None:
    """The file is missing, invalid, or has a key of another certificate. The server keeps its certificate."""
    certificate, authority = Certificate(tmp_path, "webhook", CollectorRegistry()), CertificateAuthority()
    certificate.reload()
    assert certificate.loaded is None
    first, second = authority.issue(), authority.issue()
    put(tmp_path, first)
    certificate.reload()
    loaded = certificate.loaded
    assert loaded is not None
    (tmp_path / "tls.key").write_bytes(second.key)
    certificate.reload()
    (tmp_path / "tls.crt").write_bytes(second.certificate[:100])
    certificate.reload()
    assert certificate.loaded is loaded
    assert certificate._loads.labels("failed")._value.get() == 3
    put(tmp_path, second)
    certificate.reload()
    assert certificate.loaded is not loaded
