"""Sources of S3 credentials, their precedence and their renewal."""

import os
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import urllib3
from deltashard_checkpoint.stores.abc import AccessDenied, CredentialsMissing, StoreUnavailable
from deltashard_checkpoint.stores.deadline import deadline
from deltashard_checkpoint.stores.s3.credentials import StandardProvider

from tests.support.server.faulty_proxy import FixedResponses
from tests.support.server.minio_server import free_port

KEYS = {"AWS_ACCESS_KEY_ID": "aws", "AWS_SECRET_ACCESS_KEY": "aws-secret"}


@pytest.fixture
def http() -> Iterator[urllib3.PoolManager]:
    pool = urllib3.PoolManager(timeout=urllib3.Timeout(connect=60, read=60), retries=False)
    yield pool
    pool.clear()


def in_an_hour() -> str:
    return (datetime.now(UTC) + timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%SZ")


def sts_answer(key: str, ends: str, kind: str = "WithWebIdentity") -> bytes:
    return (
        f'<AssumeRole{kind}Response xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><AssumeRole{kind}Result><Credentials>'
        f"<AccessKeyId>{key}</AccessKeyId><SecretAccessKey>sts-secret</SecretAccessKey><SessionToken>token</SessionToken>"
        f"<Expiration>{ends}</Expiration></Credentials></AssumeRole{kind}Result></AssumeRole{kind}Response>"
    ).encode()


@pytest.fixture
def token(tmp_path, monkeypatch) -> Path:
    path = tmp_path / "token"
    path.write_text("a.web.token")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(path))
    return path


def test_environment_takes_precedence(http: urllib3.PoolManager, tmp_path: Path) -> None:
    """AWS variables precede MinIO variables, which precede files. Half a key pair is ignored."""
    path = tmp_path / "credentials"
    path.write_text(
        "[default]\naws_access_key_id=file\naws_secret_access_key=s\n[p]\naws_access_key_id=fp\naws_secret_access_key=s\n"
    )
    environment = {
        **KEYS, "AWS_SESSION_TOKEN": "session", "MINIO_ACCESS_KEY": "minio", "MINIO_SECRET_KEY": "m",
        "AWS_SHARED_CREDENTIALS_FILE": str(path),
    }  # fmt: skip
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


def test_web_identity(http, token, monkeypatch):
    """The credentials are cached and renewed shortly before they expire."""
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::1:role/r")
    soon = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    for ends, requests in ((in_an_hour(), 1), (soon, 3)):
        with FixedResponses(200, sts_answer("assumed", ends)) as sts:
            monkeypatch.setenv("AWS_ENDPOINT_URL_STS", f"http://127.0.0.1:{sts.port}")
            provider = StandardProvider(http=http)
            found = [provider.retrieve() for _ in range(3)]
            assert {(each.access_key, each.session_token) for each in found} == {("assumed", "token")}
            assert sts.requests == requests


def test_unavailable_token_service_is_retryable(http, token, monkeypatch):
    """No message contains the web identity token."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(StoreUnavailable, match="token service") as caught:
        StandardProvider(http=http).retrieve()
    assert "a.web.token" not in str(caught.value)
    for status, expected in ((503, StoreUnavailable), (400, AccessDenied)):
        with FixedResponses(status, b"<Error/>") as sts:
            monkeypatch.setenv("AWS_ENDPOINT_URL_STS", f"http://127.0.0.1:{sts.port}")
            with pytest.raises(expected) as caught:
                StandardProvider(http=http).retrieve()
            assert "a.web.token" not in str(caught.value)


def test_absent_and_empty_files_are_missing_credentials(http, tmp_path, monkeypatch):
    """A missing Secret or token may appear later, and the next request uses it."""

    def missing(provider: StandardProvider, path: Path, *contents: str) -> None:
        path.unlink(missing_ok=True)
        for content in (None, *contents):
            if content is not None:
                path.write_text(content)
            with pytest.raises(CredentialsMissing) as caught:
                provider.retrieve()
            assert caught.value.where == str(path)
            assert "Secret" in caught.value.remedy or "token" in str(path)

    path, keys = tmp_path / "credentials", "aws_access_key_id=a\naws_secret_access_key=b\n"
    provider = StandardProvider(http=http, environment={"AWS_SHARED_CREDENTIALS_FILE": str(path)})
    missing(provider, path, "", "[default]\n", f"[other]\n{keys}")
    path.write_text(f"[default]\n{keys}")
    assert provider.retrieve().access_key == "a"
    with FixedResponses(200, sts_answer("assumed", in_an_hour())) as sts:
        monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", f"http://127.0.0.1:{sts.port}")
        provider = StandardProvider(http=http)
        missing(provider, tmp_path / "token", "")
        assert sts.requests == 0
        (tmp_path / "token").write_text("a.web.token")
        assert provider.retrieve().access_key == "assumed"


PROCESS = """#!/bin/sh
echo run >> {folder}/runs
echo '{{"Version": 1, "AccessKeyId": "process", "SecretAccessKey": "s", "SessionToken": "t", "Expiration": "{ends}"}}'
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a home with `.aws` as the only source of credentials."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "MINIO_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    (tmp_path / ".aws").mkdir()
    return tmp_path


def process_of(home: Path) -> str:
    script = home / "keys.sh"
    script.write_text(PROCESS.format(folder=home, ends=in_an_hour()))
    script.chmod(0o755)
    return f"credential_process = {script}\n"


def keys_of(name: str) -> str:
    return f"aws_access_key_id = {name}\naws_secret_access_key = 5%s\n"


def test_profile_precedence_matches_botocore(http, home, monkeypatch):
    """Keys of the config file precede a process. Keys of the credentials file precede both."""
    config = home / ".aws" / "config"
    config.write_text(f"[default]\n{keys_of('config')}[profile p]\n{keys_of('config-p')}")
    provider = StandardProvider(http=http)
    assert (provider.retrieve().access_key, provider.retrieve().secret_key) == ("config", "5%s")
    assert provider.source() == f"profile default of {config}"
    config.write_text(f"[default]\n{keys_of('config')}{process_of(home)}")
    found = [provider.retrieve() for _ in range(3)]
    assert {(each.access_key, each.session_token) for each in found} == {("process", "t")}
    assert (home / "runs").read_text() == "run\n"  # valid keys are cached
    (home / ".aws" / "credentials").write_text(f"[default]\n{keys_of('credentials')}")
    assert provider.retrieve().access_key == "credentials"
    monkeypatch.setenv("AWS_PROFILE", "absent")
    with pytest.raises(CredentialsMissing, match="profile absent"):
        StandardProvider(http=http).retrieve()


def test_role_is_assumed_from_source_profile(http, home, monkeypatch):
    (home / ".aws" / "config").write_text(
        f"[default]\nregion = eu-west-1\nrole_arn = arn:aws:iam::1:role/r\nsource_profile = base\n{keys_of('unused')}"
        f"[profile base]\n{keys_of('base')}"
    )
    with FixedResponses(200, sts_answer("assumed", in_an_hour(), kind="")) as sts:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", f"http://127.0.0.1:{sts.port}")
        provider = StandardProvider(http=http)
        assert {provider.retrieve().access_key for _ in range(3)} == {"assumed"}
        assert sts.requests == 1
    refusal = b"<ErrorResponse><Error><Code>AccessDenied</Code><Message>secret words</Message></Error></ErrorResponse>"
    with FixedResponses(403, refusal) as sts:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", f"http://127.0.0.1:{sts.port}")
        with pytest.raises(AccessDenied, match=r"from role_arn: ClientError \(AccessDenied\)") as caught:
            StandardProvider(http=http).retrieve()
        assert "secret words" not in str(caught.value)
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(StoreUnavailable, match="token service"):
        StandardProvider(http=http).retrieve()


def test_failed_botocore_chain_gives_one_line_error(http, home, monkeypatch):
    """The causes are a missing login, a failing process, and a missing botocore. No process output is shown."""
    config = home / ".aws" / "config"
    sso = "sso_start_url = https://x.awsapps.com/start\nsso_region = eu-west-1\nsso_account_id = 1\nsso_role_name = r\n"
    config.write_text(f"[default]\nregion = eu-west-1\n{sso}")
    with pytest.raises(AccessDenied, match="from sso_start_url") as caught:
        StandardProvider(http=http).retrieve()
    assert "aws sso login" in caught.value.remedy
    config.write_text("[default]\ncredential_process = sh -c 'echo hush >&2; exit 1'\n")
    with pytest.raises(AccessDenied, match="from credential_process: CredentialRetrievalError") as caught:
        StandardProvider(http=http).retrieve()
    assert "hush" not in str(caught.value)
    assert caught.value.where == str(config)
    monkeypatch.setitem(sys.modules, "botocore.exceptions", None)
    with pytest.raises(CredentialsMissing, match="needs botocore") as caught:
        StandardProvider(http=http).retrieve()
    assert "deltashard[aws]" in caught.value.remedy


def test_hanging_credential_process_is_bounded_by_deadline(http, home):
    (home / "gate").touch()
    script = home / "slow.sh"
    script.write_text(
        f"#!/bin/sh\nwhile [ -e {home}/gate ]; do sleep 0.05; done\n"
        'echo \'{"Version": 1, "AccessKeyId": "late", "SecretAccessKey": "s"}\'\n'
    )
    script.chmod(0o755)
    (home / ".aws" / "config").write_text(f"[default]\ncredential_process = {script}\n")
    provider = StandardProvider(http=http)
    with deadline(0.1), pytest.raises(StoreUnavailable, match="does not respond"):
        provider.retrieve()
    (home / "gate").unlink()
    assert provider.retrieve().access_key == "late"


def test_pod_identity_token_may_end_in_newline(http, home, monkeypatch):
    token = home / "token"
    token.write_text("a.pod.token\n")
    answer = f'{{"AccessKeyId": "pod", "SecretAccessKey": "s", "Token": "t", "Expiration": "{in_an_hour()}"}}'
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    with FixedResponses(200, answer.encode()) as agent:
        monkeypatch.setenv(
            "AWS_CONTAINER_CREDENTIALS_FULL_URI", f"http://127.0.0.1:{agent.port}/v1/credentials"
        )
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(token))
        assert StandardProvider(http=http).retrieve().access_key == "pod"


@pytest.mark.parametrize("text", ["no section", "[default", "\xff", "[default]\naws_access_key_id\n"])
def test_malformed_credentials_file_is_named(http: urllib3.PoolManager, home: Path, text: str) -> None:
    path = home / ".aws" / "credentials"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(CredentialsMissing, match="profile default") as caught:
        StandardProvider(http=http).retrieve()
    assert caught.value.where == str(path)
