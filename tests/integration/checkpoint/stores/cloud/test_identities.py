"""Workload identity: token exchange against recording token services."""

import json
from pathlib import Path
from urllib.parse import parse_qs

import pytest
from deltashard_checkpoint.stores.abc import AccessDenied, CredentialsMissing, ObjectNotFound
from deltashard_checkpoint.stores.retry import RetryPolicy
from deltashard_checkpoint.stores.url import open_store

from tests.support.server.faulty_proxy import FixedResponses

TOKEN = json.dumps({"access_token": "issued", "expires_in": 3600, "token_type": "Bearer"}).encode()
NONE = b"<Error><Code>BlobNotFound</Code></Error>"
ONCE = RetryPolicy(attempts=1)


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


def test_aks_federated_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The projected token may appear later. The token service exchanges it, and the store receives the result."""
    path = tmp_path / "store"
    monkeypatch.setenv("AZURE_FEDERATED_TOKEN_FILE", str(path))
    monkeypatch.setenv("AZURE_CLIENT_ID", "the-client")
    monkeypatch.setenv("AZURE_TENANT_ID", "the-tenant")
    with (
        FixedResponses(200, TOKEN, {"Content-Type": "application/json"}) as tokens,
        FixedResponses(404, NONE) as service,
    ):
        monkeypatch.setenv("AZURE_AUTHORITY_HOST", f"http://127.0.0.1:{tokens.port}")
        url = f"az://ctr/x?account=acc1&endpoint=http://127.0.0.1:{service.port}/acc1"
        with open_store(url, policy=ONCE) as store:
            with pytest.raises(CredentialsMissing, match="AZURE_FEDERATED_TOKEN_FILE"):
                store.get("a")
            for projected in ("first", "second"):  # the kubelet renews it
                path.write_text(projected)
                with pytest.raises(ObjectNotFound):
                    store.get("a")
                asked_at, _, body = tokens.received[-1]
                assert asked_at.startswith("/the-tenant/")
                form = parse_qs(body.decode())
                assert form["client_assertion"] == [projected]
                assert form["client_id"] == ["the-client"]
                assert service.received[-1][1]["authorization"] == "Bearer issued"
            asked = len(tokens.received)
            with pytest.raises(ObjectNotFound):
                store.get("b")
            assert len(tokens.received) == asked, "a valid token is cached"


def test_refused_token_is_renewed(tmp_path, monkeypatch):
    path = tmp_path / "store"
    path.write_text("projected")
    for name, value in {"FEDERATED_TOKEN_FILE": str(path), "CLIENT_ID": "c", "TENANT_ID": "t"}.items():
        monkeypatch.setenv(f"AZURE_{name}", value)
    refusal = b"<Error><Code>AuthenticationFailed</Code></Error>"
    with (
        FixedResponses(200, TOKEN, {"Content-Type": "application/json"}) as tokens,
        FixedResponses(403, refusal) as service,
    ):
        monkeypatch.setenv("AZURE_AUTHORITY_HOST", f"http://127.0.0.1:{tokens.port}")
        url = f"az://ctr/x?account=acc1&endpoint=http://127.0.0.1:{service.port}/acc1"
        with open_store(url, policy=ONCE) as store:
            for times in (1, 2):
                with pytest.raises(AccessDenied, match="AZURE_FEDERATED_TOKEN_FILE"):
                    store.get("a")
                assert len(tokens.received) == times


def test_gke_metadata_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        FixedResponses(200, TOKEN, {"Content-Type": "application/json"}) as metadata,
        FixedResponses(404, NONE) as service,
    ):
        monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{metadata.port}")
        monkeypatch.setenv("HOME", "/nonexistent")
        with open_store(f"gs://bucket/x?endpoint=http://127.0.0.1:{service.port}", policy=ONCE) as store:
            with pytest.raises(ObjectNotFound):
                store.get("a")
        asked_at, headers, _ = metadata.received[-1]
        assert asked_at.startswith("/computeMetadata/v1/instance/service-accounts/default/token")
        assert headers["metadata-flavor"] == "Google"
        assert service.received[-1][1]["authorization"] == "Bearer issued"
