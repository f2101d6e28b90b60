"""What a policy adds to the sidecar: variables, files, the way to the network; sentences for what may not be."""

from __future__ import annotations

from typing import Any

import pytest
from deltashard_operator.admission.injection import inject
from deltashard_operator.api.refusal import Refusal
from deltashard_operator.kube import run_identity

from tests.support.operator import sample

VOLUME = {"name": "v", "configMap": {"name": "c"}}


def injected(spec: dict[str, Any], **pod: Any) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
    """(the sidecar's variables, its mounts' paths by volume, the pod's volumes by name)."""
    result = inject(sample.template(**pod), sample.policy(spec), run_identity.JOB)["spec"]
    sidecar = result["initContainers"][0]
    return (
        {each["name"]: each.get("value", "") for each in sidecar["env"]},
        {each["name"]: each for each in sidecar["volumeMounts"]},
        {each["name"]: each for each in result["volumes"]},
    )


def test_a_proxy_and_authorities() -> None:
    """This pod, the metadata services and the cluster are always past the proxy."""
    env, mounts, volumes = injected(
        {
            "network": {
                "httpsProxy": "http://proxy:3128",
                "noProxy": "minio.example",
                "caBundle": {"configMap": "authorities", "key": "bundle.pem"},
            }
        }
    )
    assert env["HTTPS_PROXY"] == "http://proxy:3128"
    assert "HTTP_PROXY" not in env
    past = env["NO_PROXY"].split(",")
    assert {"localhost", "169.254.169.254", "metadata.google.internal", ".svc", "minio.example"} <= set(past)
    assert {"169.254.170.23", "[fd00:ec2::23]", "fd00:ec2::254", "100.100.100.200"} <= set(past)
    assert env["SSL_CERT_FILE"] == env["AWS_CA_BUNDLE"] == "/etc/deltashard/ca/ca.crt"
    assert mounts["deltashard-ca"] == {
        "name": "deltashard-ca",
        "mountPath": "/etc/deltashard/ca",
        "readOnly": True,
    }
    assert volumes["deltashard-ca"]["configMap"] == {
        "name": "authorities",
        "items": [{"key": "bundle.pem", "path": "ca.crt"}],
    }


def test_variables_and_volumes() -> None:
    """As stated, read only, and last."""
    env, mounts, volumes = injected(
        {
            "sidecar": {
                "env": [{"name": "GOOGLE_CLOUD_PROJECT", "value": "p"}],
                "volumes": [
                    VOLUME,
                    {
                        "name": "t",
                        "projected": {
                            "sources": [{"serviceAccountToken": {"audience": "vault", "path": "token"}}]
                        },
                    },
                    {"name": "k", "csi": {"driver": "secrets-store.csi.k8s.io"}},
                ],
                "volumeMounts": [{"name": "v", "mountPath": "/etc/files"}],
            }
        }
    )
    assert list(env)[-1] == "GOOGLE_CLOUD_PROJECT"
    assert mounts["v"] == {"name": "v", "mountPath": "/etc/files", "readOnly": True}
    assert volumes["v"] == VOLUME
    assert volumes["t"]["projected"]["sources"][0]["serviceAccountToken"]["expirationSeconds"] == 3600
    assert volumes["k"]["csi"]["readOnly"] is True


@pytest.mark.parametrize(
    ("store", "variables"),
    [
        (
            {"url": "gs://bkt", "secretName": "s"},
            {"GOOGLE_APPLICATION_CREDENTIALS": "/etc/deltashard/store/credentials"},
        ),
        (
            {"url": "az://ctr", "secretName": "s"},
            {"AZURE_STORAGE_CONNECTION_STRING_FILE": "/etc/deltashard/store/credentials"},
        ),
        (
            {"url": "az://ctr", "account": "acc1", "webIdentity": {"clientId": "c", "tenantId": "t"}},
            {
                "AZURE_FEDERATED_TOKEN_FILE": "/var/run/secrets/deltashard/store",
                "AZURE_CLIENT_ID": "c",
                "AZURE_TENANT_ID": "t",
            },
        ),
    ],
)
def test_credentials_by_the_kind_of_store(store: dict[str, Any], variables: dict[str, str]) -> None:
    env, _, _ = injected({"store": store})
    assert variables.items() <= env.items()
    assert not [name for name in env if name.startswith("AWS_")]


def test_a_variable_that_another_field_sets_is_refused() -> None:
    """It is the user's where nothing does."""
    own = {"url": "gs://bkt"}, {"env": [{"name": "AWS_SHARED_CREDENTIALS_FILE", "value": "x"}]}
    assert injected({"store": own[0], "sidecar": own[1]})[0]["AWS_SHARED_CREDENTIALS_FILE"] == "x"
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "SSL_CERT_FILE", "POD_NAME"):
        spec = {
            "network": {"caBundle": {"configMap": "c"}},
            "sidecar": {"env": [{"name": name, "value": "x"}]},
        }
        with pytest.raises(Refusal, match=f"states {name}, which this policy sets by another field"):
            injected(spec)


def test_a_volume_of_a_name_that_the_pod_has_is_refused() -> None:
    spec = {"sidecar": {"volumes": [VOLUME]}}
    with pytest.raises(Refusal, match="the name is taken") as caught:
        injected(spec, volumes=[{"name": "v", "emptyDir": {}}])
    assert (caught.value.code, caught.value.where) == ("VolumeUnfit", "volume v")


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"sidecar": {"env": [{"name": "DELTASHARD_URL", "value": "x"}]}}, "sidecar.env[0].name is 'DELTASHARD_URL'"),
        ({"sidecar": {"env": [{"name": "TMPDIR", "value": "x"}]}}, "not the sidecar's own"),
        ({"sidecar": {"env": [{"name": "https_proxy", "value": "x"}]}}, "spec.network has httpsProxy"),
        ({"sidecar": {"env": [{"name": "1A", "value": "x"}]}}, "sidecar.env[0].name"),
        ({"sidecar": {"env": [{"name": "A", "valueFrom": {}}]}}, "there is no such field"),
        ({"sidecar": {"env": [{"name": "A", "value": "1"}] * 2}}, "each name once"),
        ({"sidecar": {"env": {"A": "1"}}}, "a list of at most 32"),
        ({"sidecar": {"env": [{"name": "A", "value": "x" * 4097}]}}, "at most 4096"),
        ({"sidecar": {"volumes": [{"name": "v", "hostPath": {"path": "/"}}]}}, "nothing of the node (hostPath)"),
        ({"sidecar": {"volumes": [{"name": "v"}]}}, "0 are stated"),
        ({"sidecar": {"volumes": [VOLUME | {"secret": {"secretName": "s"}}]}}, "2 are stated"),
        ({"sidecar": {"volumes": [VOLUME | {"name": "deltashard-x"}]}}, "does not begin with deltashard-"),
        ({"sidecar": {"volumes": [VOLUME] * 9}}, "at most 8"),
        ({"sidecar": {"volumes": [{"name": "v", "secret": {"secretName": "s", "items": []}}]}}, "no such field"),
        ({"sidecar": {"volumes": [{"name": "v", "projected": {"sources": []}}]}}, "a list of sources"),
        ({"sidecar": {"volumes": [{"name": "v", "projected": {"sources": [{}]}}]}}, "one of serviceAccountToken"),
        ({"sidecar": {"volumes": [{"name": "v", "csi": {"driver": "d", "readOnly": False}}]}}, "no such field"),
        ({"sidecar": {"volumeMounts": [{"name": "v", "mountPath": "/a"}]}}, "a volume of the policy's"),
        *(
            ({"sidecar": {"volumes": [VOLUME], "volumeMounts": [{"name": "v", "mountPath": path}]}}, says)
            for path, says in (
                ("/run", "nor above it"),
                ("/run/deltashard/x", "neither is in /run/deltashard"),
                ("/etc/deltashard", "/etc/deltashard, which is the sidecar's"),
                ("relative", "mountPath"),
                ("/a/../etc", "mountPath"),
                ("/", "mountPath"),
            )
        ),
        ({"network": {"httpsProxy": "http://user:pw@proxy:1"}}, "network.httpsProxy"),
        ({"network": {"httpsProxy": "socks5://proxy:1"}}, "network.httpsProxy"),
        ({"network": {"httpProxy": "http://p:1", "noProxy": "10.0.0.0/8"}}, "no networks"),
        ({"network": {"noProxy": "a"}}, "nothing without httpsProxy or httpProxy"),
        ({"network": {"caBundle": {}}}, "the name of a ConfigMap"),
        ({"network": {"caBundle": {"configMap": "c", "key": "../x"}}}, "caBundle.key"),
    ],
)  # fmt: skip
def test_what_may_not_be_is_a_sentence(spec: dict[str, Any], says: str) -> None:
    with pytest.raises(Refusal) as caught:
        sample.policy(spec)
    assert caught.value.code == "BadPolicy"
    assert says in caught.value.sentence


def test_a_policys_network_is_over_the_defaults_field_by_field() -> None:
    """A namespace's own authorities do not take away the cluster's proxy."""
    from deltashard_operator.api.workload_policy import merged, read

    defaults = {**sample.DEFAULTS, "network": {"httpsProxy": "http://proxy:1"}}
    found = read("p", merged({"network": {"caBundle": {"configMap": "c"}}}, defaults)).extension
    assert (found.https_proxy, found.ca_config_map) == ("http://proxy:1", "c")
