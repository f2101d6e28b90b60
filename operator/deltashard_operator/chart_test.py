"""What `helm test` asks of an installation: does the webhook answer, and does an annotated Job get its sidecar?

`deltashard-chart-test` creates Jobs in dry runs, so nothing is made, until all is as it should be or its time is up: an
installation takes a moment to answer. It needs the right to create Jobs in one namespace, and no other.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kubernetes import config

from deltashard_operator.kube.call import Answer, NoReply, Requester
from deltashard_operator.kube.cluster_name import POLICY, SIDECAR
from deltashard_operator.main import EXIT_FAILED, EXIT_USAGE, api_client, options_of

PROGRAM = "deltashard-chart-test"
REQUEST_S = 10.0
PAUSE_S = 2.0
NO_SUCH_POLICY = "deltashard-test-no-such-policy"
SECURITY = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
POD_SECURITY = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What can be set on the test."""

    namespace: str = "default"  # namespace of the dry runs
    policy: str = ""  # policy that is to serve there; empty: only the way to the webhook is tested
    deadline_s: float = 90.0  # how long the installation may take to answer
    kubeconfig: Path | None = None  # how to reach the API; without, as a pod


class NotSo(Exception):
    """The installation does not do what it should (yet)."""


def created(request: Requester, namespace: str, policy: str) -> Answer:
    """The API's answer to a Job with this policy, in a dry run."""
    container = {"name": "trainer", "image": "example.invalid/train", "securityContext": SECURITY}
    pod = {"restartPolicy": "Never", "securityContext": POD_SECURITY, "containers": [container]}
    metadata = {"generateName": "deltashard-test-", "annotations": {POLICY: policy}}
    document = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {"template": {"spec": pod}},
    }
    path = f"/apis/batch/v1/namespaces/{namespace}/jobs"
    return request("POST", path, document, query={"dryRun": "All"}, timeout_s=REQUEST_S)


def asked(request: Requester, options: Options) -> str:
    """What is so; raises `NotSo` and `NoReply`."""
    answer = created(request, options.namespace, NO_SUCH_POLICY)
    if answer.ok:
        raise NotSo(f"a Job with a policy that does not exist was admitted: is {options.namespace} exempt?")
    if "(PolicyNotFound)" not in answer.sentence:
        raise NotSo(f"the webhook did not answer: {answer.sentence}")
    if not options.policy:
        return "the webhook answers"
    named = f"a Job with {POLICY}: {options.policy}"
    answer = created(request, options.namespace, options.policy)
    if not answer.ok:
        raise NotSo(f"{named} was refused: {answer.sentence}")
    spec: dict[str, Any] = answer.document["spec"]["template"]["spec"]
    for each in spec.get("initContainers") or ():
        if each["name"] == SIDECAR:
            return f"the webhook answers, and {named} gets the sidecar {each['image']}"
    raise NotSo(f"{named} has no sidecar")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `deltashard-chart-test`."""
    options = options_of(Options, PROGRAM, argv)
    try:
        api = api_client(options.kubeconfig)
    except (config.ConfigException, OSError) as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return EXIT_USAGE
    ends_at_s, said = time.monotonic() + options.deadline_s, ""
    while time.monotonic() < ends_at_s:
        try:
            ok = asked(Requester(api), options)
        except (NotSo, NoReply) as error:
            if str(error) != said:
                said = str(error)
                sys.stderr.write(f"not yet: {said}\n")
            time.sleep(PAUSE_S)
        else:
            sys.stdout.write(f"ok: {ok}\n")
            return 0
    sys.stderr.write(f"failed: not so within {options.deadline_s:g} s\n")
    return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
