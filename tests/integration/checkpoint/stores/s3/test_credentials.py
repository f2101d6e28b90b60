"""Where credentials come from, in which order, and that they are renewed."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import urllib3
from deltashard_checkpoint.stores.abc import AccessDenied, CredentialsMissing, StoreUnavailable
from deltashard_checkpoint.stores.s3.credentials import StandardProvider

from tests.support.server.faulty_proxy import FixedAnswers
from tests.support.server.minio_server import free_port

KEYS = {"AWS_ACCESS_KEY_ID": "aws", "AWS_SECRET_ACCESS_KEY": "aws-secret"}


@pytest.fixture
def http() -> Iterator[urllib3.PoolManager]:
    pool = urllib3.PoolManager(timeout=urllib3.Timeout(connect=60, read=60), retries=False)
    yield pool
    pool.clear()


def sts_answer(key: str, lives: timedelta) -> bytes:
    ends = (datetime.now(UTC) + lives).strftime("%Y-%m-%dT%H:%M:%SZ")
    return (
        '<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">'
        "<AssumeRoleWithWebIdentityResult><Credentials>"
        f"<AccessKeyId>{key}</AccessKeyId><SecretAccessKey>sts-secret</SecretAccessKey>"
        f"<SessionToken>token</SessionToken><Expiration>{ends}</Expiration>"
        "</Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"
    ).encode()


def test_the_environment_comes_first(http: urllib3.PoolManager, tmp_path: Path) -> None:
    """AWS names before MinIO's before files; a session token goes along; half a pair is none."""
    path = tmp_path / "credentials"
    path.write_text(
        "[default]\naws_access_key_id=file\naws_secret_access_key=s\n[p]\naws_access_key_id=fp\naws_secret_access_key=s\n"
    )
    environment = {
        **KEYS,
        "AWS_SESSION_TOKEN": "session",
        "MINIO_ACCESS_KEY": "minio",
        "MINIO_SECRET_KEY": "m",
        "AWS_SHARED_CREDENTIALS_FILE": str(path),
    }
    provider = StandardProvider(http=http, environment=environment)
    found = provider.retrieve()
    assert (found.access_key, found.secret_key, found.session_token) == ("aws", "aws-secret", "session")
    del environment["AWS_SECRET_ACCESS_KEY"]
    assert provider.retrieve().access_key == "minio"
    assert provider.source() == "MINIO_ACCESS_KEY"
    del environment["MINIO_ACCESS_KEY"]
    assert provider.retrieve().access_key == "file"
    environment["AWS_PROFILE"] = "p"
    assert StandardProvider(http=http, environment=environment).retrieve().access_key == "fp"


def test_a_rotated_file_is_read_again(http: urllib3.PoolManager, tmp_path: Path) -> None:
    """By replacement as Kubernetes does it, through a symlink that is swapped."""
    for name in ("one", "two"):
        (tmp_path / name).write_text(f"[default]\naws_access_key_id={name}\naws_secret_access_key=s\n")
    link = tmp_path / "credentials"
    link.symlink_to("one")
    provider = StandardProvider(http=http, environment={"AWS_SHARED_CREDENTIALS_FILE": str(link)})
    assert provider.retrieve().access_key == "one"
    swap = tmp_path / "swap"
    swap.symlink_to("two")
    swap.rename(link)
    assert provider.retrieve().access_key == "two"
    link.unlink()
    with pytest.raises(AccessDenied, match="profile default"):
        provider.retrieve()


def test_a_web_identity(http: urllib3.PoolManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token's file is exchanged at the token service; kept while it lives, asked again when it is about to end."""
    token = tmp_path / "token"
    token.write_text("a.web.token")
    for lives, requests in ((timedelta(hours=1), 1), (timedelta(seconds=1), 3)):
        with FixedAnswers(200, sts_answer("assumed", lives)) as sts:
            environment = {
                "AWS_WEB_IDENTITY_TOKEN_FILE": str(token),
                "AWS_ROLE_ARN": "arn:aws:iam::1:role/r",
                "AWS_ENDPOINT_URL_STS": f"http://127.0.0.1:{sts.port}",
            }
            for name, value in environment.items():
                monkeypatch.setenv(name, value)
            provider = StandardProvider(http=http)
            for _ in range(3):
                found = provider.retrieve()
                assert (found.access_key, found.session_token) == ("assumed", "token")
            assert sts.requests == requests


def test_a_token_service_that_is_down_is_worth_a_retry(
    http: urllib3.PoolManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Down is unavailable, refused is denied; and the web token is in no message."""
    token = tmp_path / "token"
    token.write_text("a.web.token")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(token))
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(StoreUnavailable, match="token service") as caught:
        StandardProvider(http=http).retrieve()
    assert "a.web.token" not in str(caught.value)
    for status, expected in ((503, StoreUnavailable), (400, AccessDenied)):
        with FixedAnswers(status, b"<Error/>") as sts:
            monkeypatch.setenv("AWS_ENDPOINT_URL_STS", f"http://127.0.0.1:{sts.port}")
            with pytest.raises(expected) as caught:
                StandardProvider(http=http).retrieve()
            assert "a.web.token" not in str(caught.value)


def test_absent_and_empty_files_are_missing_credentials(
    http: urllib3.PoolManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told from wrong ones: the Secret or token may yet appear, and is then used by the next request."""
    path = tmp_path / "credentials"
    provider = StandardProvider(http=http, environment={"AWS_SHARED_CREDENTIALS_FILE": str(path)})
    for content in (None, "", "[default]\n", "[other]\naws_access_key_id=a\naws_secret_access_key=b\n"):
        if content is not None:
            path.write_text(content)
        with pytest.raises(CredentialsMissing) as caught:
            provider.retrieve()
        assert caught.value.where == str(path)
        assert "Secret" in caught.value.remedy
    path.write_text("[default]\naws_access_key_id=a\naws_secret_access_key=b\n")
    assert provider.retrieve().access_key == "a"
    token = tmp_path / "token"
    with FixedAnswers(200, sts_answer("assumed", timedelta(hours=1))) as sts:
        monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(token))
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", f"http://127.0.0.1:{sts.port}")
        provider = StandardProvider(http=http)
        for content in (None, ""):
            if content is not None:
                token.write_text(content)
            with pytest.raises(CredentialsMissing) as caught:
                provider.retrieve()
            assert caught.value.where == str(token)
        assert sts.requests == 0
        token.write_text("a.web.token")
        assert provider.retrieve().access_key == "assumed"
