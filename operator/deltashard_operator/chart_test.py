"""What `helm test` asks of an installation: does the webhook answer, and does an annotated Job get its sidecar?

`deltashard-chart-test` creates Jobs in dry runs, so nothing is made, until all is as it should be or its time is up: an
installation takes a moment to answer. It needs the right to create Jobs in one namespace, and no other.
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
    """What can be set on the test."""

    namespace: str = "default"  # namespace of the dry runs
    policy: str = ""  # policy that is to serve there; empty: only the way to the webhook is tested
    deadline_s: float = 90.0  # how long the installation may take to answer
    kubeconfig: Path | None = None  # how to reach the API; without, as a pod


async def create_job(call: Caller, namespace: str, policy: str) -> ApiResponse:
    """The API's answer to a Job with this policy, in a dry run; raises `ApiUnavailable`."""
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
    """Whether all is as it should be, and what is so."""
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
    """Whether all is as it should be before the time is up; each look is printed."""
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
    """Entry point of `deltashard-chart-test`."""
    return 0 if asyncio.run(wait_until_ok(options_of(Options, PROGRAM, argv))) else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
