"""Checks of `helm test`: the webhook answers, and an annotated Job gets its sidecar.

`deltashard-chart-test` creates Jobs with dryRun until the checks pass or the deadline expires. It needs only the right
to create Jobs in one namespace.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deltashard_operator import VERSION
from deltashard_operator.kube.api_access import api_access
from deltashard_operator.kube.call import ApiResponse, ApiUnavailable, Caller
from deltashard_operator.kube.cluster_name import POLICY, SIDECAR
from deltashard_operator.main import EXIT_FAILED, options_of

PROGRAM = "deltashard-chart-test"
REQUEST_S = 10.0, 10.0
PAUSE_S = 2.0
NO_SUCH_POLICY = "deltashard-test-no-such-policy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the test."""

    namespace: str = "default"  # namespace of the dry runs
    policy: str = ""  # policy to test; empty: only the webhook's reachability is tested
    deadline_s: float = 90.0  # time for the installation to become ready
    kubeconfig: Path | None = None  # kubeconfig file; without it, the pod's service account


async def create_job(call: Caller, namespace: str, policy: str) -> ApiResponse:
    """Create a Job with this policy in a dry run and return the API's response. Raises `ApiUnavailable`."""
    pod = {"restartPolicy": "Never", "containers": [{"name": "trainer", "image": "example.invalid/train"}]}
    document = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"generateName": "deltashard-test-", "annotations": {POLICY: policy}},
        "spec": {"template": {"spec": pod}},
    }
    path = f"/apis/batch/v1/namespaces/{namespace}/jobs"
    return await call("POST", path, document, query={"dryRun": "All"}, tries=1)


async def check(call: Caller, options: Options) -> tuple[bool, str]:
    """Run the checks once. Returns whether they passed, and a message."""
    named = f"a Job with {POLICY}: {options.policy}"
    try:
        answer = await create_job(call, options.namespace, NO_SUCH_POLICY)
        if answer.ok:
            return False, f"a Job whose policy does not exist was admitted: is {options.namespace} exempt?"
        if "(PolicyNotFound)" not in answer.sentence:
            return False, f"the webhook did not answer: {answer.sentence}"
        if not options.policy:
            return True, "the webhook answers"
        answer = await create_job(call, options.namespace, options.policy)
    except ApiUnavailable as error:
        return False, str(error)
    if not answer.ok:
        return False, f"{named} was refused: {answer.sentence}"
    inits = answer.document["spec"]["template"]["spec"].get("initContainers") or ()
    images = [each["image"] for each in inits if each["name"] == SIDECAR]
    return bool(images), f"the webhook answers, and {named} gets the sidecar {images}"


async def wait_until_ok(options: Options) -> bool:
    """Repeat the checks until they pass or the deadline expires, and print each result."""
    ends_at_s = time.monotonic() + options.deadline_s
    call = Caller(api_access(options.kubeconfig, f"{PROGRAM}/{VERSION}"), timeout_s=REQUEST_S)
    try:
        while True:
            ok, message = await check(call, options)
            sys.stdout.write(f"{'ok' if ok else 'not yet'}: {message}\n")
            if ok or time.monotonic() > ends_at_s:
                return ok
            await asyncio.sleep(PAUSE_S)
    finally:
        await call.close()


def main(argv: Sequence[str] | None = None) -> int:
    return 0 if asyncio.run(wait_until_ok(options_of(Options, PROGRAM, argv))) else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
