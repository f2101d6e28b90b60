"""The store of a policy: what the sidecar gets of each kind, sentences for words of another kind."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import pytest
from deltashard_checkpoint.stores.url import options_of, scheme_of
from deltashard_operator.api.store_spec import WebIdentity

from tests.support.operator import sample


@pytest.mark.parametrize(
    ("store", "url"),
    [
        (
            {
                "url": "s3://bkt/p",
                "endpoint": "https://s3.example",
                "region": "eu-1",
                "addressing": "virtual",
                "encryption": {"kind": "SSE-KMS", "keyId": "arn:aws:kms:eu-1:1:key/a-b"},
            },
            (
                "s3://bkt/p?endpoint=https://s3.example&region=eu-1&addressing=virtual&sse=aws:kms"
                "&kms-key-id=arn:aws:kms:eu-1:1:key/a-b"
            ),
        ),
        ({"url": "s3://bkt", "encryption": {"kind": "SSE-S3"}, "addressing": "auto"}, "s3://bkt?sse=AES256"),
        ({"url": "gs://bkt_1/p", "endpoint": "http://gcs:4443"}, "gs://bkt_1/p?endpoint=http://gcs:4443"),
        (
            {"url": "az://ctr/p", "account": "acc1", "endpoint": "http://az:10000/acc1"},
            "az://ctr/p?endpoint=http://az:10000/acc1&account=acc1",
        ),
    ],
)
def test_a_store_becomes_a_url_that_the_sidecar_reads(store: dict[str, Any], url: str) -> None:
    assert sample.policy({"store": store}).url == url
    parts = urlsplit(url)
    scheme = scheme_of(parts.scheme)
    assert scheme is not None
    assert set(options_of(parts.query, scheme, url)) <= set(scheme.options)


def test_each_kind_has_its_own_identity() -> None:
    """Audience and words by the kind of store."""
    ids = {"clientId": "c-1", "tenantId": "t-1"}
    azure = sample.policy({"store": {"url": "az://ctr", "account": "acc1", "webIdentity": ids}})
    assert azure.web_identity == WebIdentity(
        audience="api://AzureADTokenExchange",
        settings={"AZURE_CLIENT_ID": "c-1", "AZURE_TENANT_ID": "t-1", "AZURE_AUTHORITY_HOST": ""},
    )
    aws = sample.policy({"store": {"url": "s3://bkt", "webIdentity": {"roleArn": "arn:aws:iam::1:role/x"}}})
    settings = {"AWS_ROLE_ARN": "arn:aws:iam::1:role/x", "AWS_ENDPOINT_URL_STS": ""}
    assert aws.web_identity == WebIdentity(audience="sts.amazonaws.com", settings=settings)
