"""What `helm test` asks of an installation: does an annotated Job get its sidecar? In dry runs, so nothing is made.

`deltashard-chart-test` creates Jobs in dry runs until all is as it should be, or its time is up: an installation takes
a moment to answer. It needs the right to create Jobs in one namespace, and no other.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import urllib3
from kubernetes import client, config

from deltashard_operator.kube.cluster_name import POLICY, SIDECAR
from deltashard_operator.main import EXIT_FAILED, EXIT_USAGE, api_client, options_of

PROGRAM = "deltashard-chart-test"
REQUEST_S = 10
NO_SUCH_POLICY = "deltashard-test-no-such-policy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What can be set on the test."""

    namespace: str = "default"
    """Namespace of the dry runs."""
    policy: str = ""
    """Policy that is to serve there; empty: only the way to the webhook is tested."""
    deadline_s: float = 90.0
    """How long the installation may take to answer."""
    pause_s: float = 2.0
    """Between tries."""
    kubeconfig: Path | None = None
    """How to reach the API; without, as a pod."""


class NotSo(Exception):
    """The installation does not do what it should (yet)."""


def job(policy: str | None) -> dict[str, Any]:
    """A Job, annotated with a policy unless that is None."""
    security = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    container = {"name": "trainer", "image": "example.invalid/train", "securityContext": security}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "generateName": "deltashard-test-",
            "annotations": {} if policy is None else {POLICY: policy},
        },
        "spec": {
            "template": {
                "spec": {
                    "restartPolicy": "Never",
                    "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
                    "containers": [container],
                }
            }
        },
    }


def said(error: client.ApiException) -> str:
    """What the API server said, in short."""
    return f"{error.status} {error.reason}: {str(error.body)[:600]}"


class Installation:
    """The three questions; each raises `NotSo`, or says in a sentence what is so."""

    def __init__(self, api: client.ApiClient, options: Options) -> None:
        self._jobs = client.BatchV1Api(api)
        self._options = options

    def _images(self, policy: str | None) -> list[str]:
        """Images of the sidecars that such a Job gets."""
        body = cast("client.V1Job", job(policy))  # the client takes documents, too
        created: Any = self._jobs.create_namespaced_job(
            self._options.namespace, body, dry_run="All", _request_timeout=REQUEST_S
        )
        containers = created.spec.template.spec.init_containers or []
        return [each.image for each in containers if each.name == SIDECAR]

    def _gets(self, policy: str | None) -> str:
        """An annotated Job gets a sidecar, and another one is none of ours."""
        named = f"a Job without {POLICY}" if policy is None else f"a Job with {POLICY}: {policy}"
        try:
            images = self._images(policy)
        except client.ApiException as error:
            raise NotSo(f"{named} was refused: {said(error)}") from None
        if len(images) != (policy is not None):
            raise NotSo(f"{named} has {len(images)} sidecars")
        return f"{named} gets the sidecar {images[0]}" if images else f"{named} is left alone"

    def answers(self) -> str:
        """A policy that does not exist is refused in the webhook's own words."""
        try:
            self._images(NO_SUCH_POLICY)
        except client.ApiException as error:
            if "(PolicyNotFound)" in str(error.body):
                return "the webhook answers: a policy that does not exist is refused"
            raise NotSo(f"the webhook did not answer: {said(error)}") from None
        raise NotSo(
            f"a Job with a policy that does not exist was admitted: is {self._options.namespace} exempt?"
        )

    def questions(self) -> list[Callable[[], str]]:
        asked: list[Callable[[], str]] = [lambda: self._gets(None), self.answers]
        return [*asked, lambda: self._gets(self._options.policy)] if self._options.policy else asked


def check(installation: Installation, options: Options, say: Callable[[str], None]) -> bool:
    """Ask until every question was answered well; says what happens, once."""
    ends_at_s = time.monotonic() + options.deadline_s
    open_questions = installation.questions()
    last = ""
    while True:
        try:
            while open_questions:
                say(f"ok: {open_questions[0]()}")
                open_questions.pop(0)
        except (NotSo, urllib3.exceptions.HTTPError, OSError) as error:
            if str(error) != last:
                last = str(error)
                say(f"not yet: {last}")
        else:
            return True
        if time.monotonic() + options.pause_s > ends_at_s:
            say(f"failed: not so within {options.deadline_s:g} s")
            return False
        time.sleep(options.pause_s)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `deltashard-chart-test`."""
    options = options_of(Options, PROGRAM, sys.argv[1:] if argv is None else argv, os.environ)

    def say(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    try:
        api = api_client(options.kubeconfig)
    except (config.ConfigException, OSError) as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return EXIT_USAGE
    with api:
        return 0 if check(Installation(api, options), options, say) else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
