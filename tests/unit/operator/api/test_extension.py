"""What a policy adds to the sidecar: variables, files, the way to the network; sentences for what may not be."""

from __future__ import annotations

from typing import Any

import pytest
from deltashard_operator.admission.injection import inject
from deltashard_operator.api.refusal import Refusal
from deltashard_operator.kube import run_identity

from tests.support.operator import sample

VOLUME = {"name": "v", "mountPath": "/etc/files", "configMap": {"name": "c"}}


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
                        "mountPath": "/etc/t",
                        "projected": {
                            "sources": [{"serviceAccountToken": {"audience": "vault", "path": "token"}}]
                        },
                    },
                    {"name": "k", "mountPath": "/etc/k", "csi": {"driver": "secrets-store.csi.k8s.io"}},
                ],
            }
        }
    )
    assert list(env)[-1] == "GOOGLE_CLOUD_PROJECT"
    assert mounts["v"] == {"name": "v", "mountPath": "/etc/files", "readOnly": True}
    assert volumes["v"] == {"name": "v", "configMap": {"name": "c"}}
    assert volumes["t"]["projected"]["sources"][0]["serviceAccountToken"]["expirationSeconds"] == 3600
    assert volumes["k"]["csi"]["readOnly"] is True


@pytest.mark.parametrize(
    ("store", "variables"),
    [
        (
            {"url": "gs://bkt", "secretRef": {"name": "s"}},
            {"GOOGLE_APPLICATION_CREDENTIALS": "/etc/deltashard/store/credentials"},
        ),
        (
            {"url": "az://ctr", "secretRef": {"name": "s", "key": "azure"}},
            {"AZURE_STORAGE_CONNECTION_STRING_FILE": "/etc/deltashard/store/azure"},
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


CLAIM = {"store": {"url": "file:///mnt/shared/training", "claim": "checkpoints"}}


def own(**source: Any) -> dict[str, Any]:
    return {"name": "data", "persistentVolumeClaim": {"claimName": "checkpoints", **source}}


def test_a_claim_that_the_pod_has_is_mounted_once_more_and_is_no_second_volume() -> None:
    _, mounts, volumes = injected(CLAIM, volumes=[own()])
    assert mounts["data"] == {"name": "data", "mountPath": "/mnt/shared"}
    assert "deltashard-store" not in volumes


@pytest.mark.parametrize(
    ("volume", "says"),
    [
        (own(readOnly=True), "it is the store's claim checkpoints, and read-only"),
        ({"name": "deltashard-store", "csi": {"driver": "secrets-store.csi.k8s.io"}}, "the name is taken"),
        (own() | {"name": "v"}, "the name is taken"),  # by a volume of the policy
    ],
)
def test_a_volume_in_the_place_of_the_claim_is_refused(volume: dict[str, Any], says: str) -> None:
    with pytest.raises(Refusal, match=says):
        injected(CLAIM | {"sidecar": {"volumes": [VOLUME]}}, volumes=[volume])


def test_a_volume_of_the_default_policy_over_the_claim_is_refused() -> None:
    spec = CLAIM | {"sidecar": {"volumes": [VOLUME | {"mountPath": "/mnt"}]}}
    with pytest.raises(Refusal, match="sidecar.volumes lie elsewhere than in /mnt"):
        injected(spec)


def volume(**fields: Any) -> dict[str, Any]:
    return {"sidecar": {"volumes": [{k: v for k, v in (VOLUME | fields).items() if v is not None}]}}


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"sidecar": {"env": [{"name": "DELTASHARD_URL", "value": "x"}]}}, "sidecar.env[0].name: the variable is the sidecar's own"),
        ({"sidecar": {"env": [{"name": "https_proxy", "value": "x"}]}}, "proxies are said by network.httpsProxy"),
        ({"sidecar": {"env": [{"name": "1A", "value": "x"}]}}, "sidecar.env[0].name is '1A'; it takes a variable's name"),
        ({"sidecar": {"env": [{"name": "A", "valueFrom": {}}]}}, "sidecar.env[0].value is missing"),
        ({"sidecar": {"env": [{"name": "A", "value": "1"}] * 2}}, "each name stands there once"),
        ({"sidecar": {"env": {"A": "1"}}}, "a list of at most 32"),
        ({"sidecar": {"env": [{"name": "A", "value": "x" * 4097}]}}, "at most 4096"),
        (volume(configMap=None, hostPath={"path": "/"}), "hostPath: there is no such field"),
        (volume(configMap=None), "nothing of the node (hostPath)"),
        (volume(secret={"secretName": "s"}), "a volume is one of"),
        ({"sidecar": {"volumes": [VOLUME] * 9}}, "at most 8"),
        (volume(configMap=None, projected={"sources": []}), "a list of at most 8"),
        (volume(mountPath="/etc/deltashard"), "in or above one of the sidecar's own"),
        ({"network": {"caBundle": {}}}, "caBundle.configMap is missing"),
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
    assert (found.settings["HTTPS_PROXY"], found.ca_config_map) == ("http://proxy:1", "c")
