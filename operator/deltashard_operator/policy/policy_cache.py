"""CheckpointPolicies in memory, kept by list and watch, and one live look for what is not there.

A thread lists all policies of the cluster, then watches from there; bookmarks and a server-side timeout keep a quiet
watch young, a client-side timeout ends a dead one, and whatever goes wrong ends in a new list after a pause, which
grows until a watch has held for a while: a list alone is no sign that watching works. The cache is `synced` from its
first list on and stays so through an outage of the API: an admission only comes when the API works.

A policy that is not in the cache may have been created a moment ago: it is asked for once, live. Only that answer
makes a refusal. Most workloads ask for `default` where the namespace has none of that name and the chart's is meant:
that answer holds for `ABSENT_S`, else every admission of theirs would cost a call to the API.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

import structlog
import urllib3
from kubernetes import client, watch

from deltashard_operator.policy.admission_deadline import Deadline
from deltashard_operator.policy.refusal import Refusal

GROUP, VERSION, PLURAL = "deltashard.io", "v1alpha1", "checkpointpolicies"
WATCH_S = 240
"""The server ends a watch after so long."""
SILENCE_S = 270
"""A watch without a byte for so long is dead."""
CONNECT_S = 3
ABSENT_S = 1.0
"""How long the answer that a policy is not there may be used again; the watch brings a new one sooner."""
MAX_ABSENT = 4096
PAUSES_S = (0.2, 1.0, 5.0, 15.0)
"""Before a new list, the more the longer watches fail; half of it is left to chance, so that replicas spread."""
STEADY_S = 30.0
"""A watch that held for so long was well."""

Spec = Mapping[str, Any]
_log = structlog.get_logger("deltashard.policies")


class PolicyCache:
    """All CheckpointPolicies' specs by (namespace, name). `start` it once; reads are from any thread."""

    def __init__(self, api: client.ApiClient, *, on_restart: Callable[[], None] = lambda: None) -> None:
        self._objects = client.CustomObjectsApi(api)
        self._specs: dict[tuple[str, str], Spec] = {}
        self._absent_s: dict[tuple[str, str], float] = {}
        """When it was looked for and not there, by the monotonic clock."""
        self._synced = threading.Event()
        self._stop = threading.Event()
        self._on_restart = on_restart
        self._thread = threading.Thread(target=self._run, name="policies", daemon=True)

    @property
    def synced(self) -> bool:
        """Whether the policies were listed once."""
        return self._synced.is_set()

    def __len__(self) -> int:
        return len(self._specs)

    def start(self) -> None:
        """Begin to list and watch."""
        self._thread.start()

    def stop(self) -> None:
        """End at the next event; the thread is a daemon and holds nothing."""
        self._stop.set()

    def get(self, namespace: str, name: str) -> Spec | None:
        """The policy's spec as last seen."""
        return self._specs.get((namespace, name))

    def absent(self, namespace: str, name: str) -> bool:
        """Whether a live look of a moment ago did not find it."""
        return time.monotonic() - self._absent_s.get((namespace, name), float("-inf")) < ABSENT_S

    def look(self, namespace: str, name: str, deadline: Deadline) -> Spec | None:
        """The policy's spec from the API itself, None when there is none; raises `Refusal` (PolicyUnavailable)."""
        try:
            found = self._objects.get_namespaced_custom_object(
                GROUP, VERSION, namespace, PLURAL, name, _request_timeout=deadline.left_s()
            )
        except client.ApiException as error:
            if error.status == 404:
                if len(self._absent_s) >= MAX_ABSENT:
                    self._absent_s = {}
                self._absent_s[namespace, name] = time.monotonic()
                return None
            raise unavailable(name, f"the API answered {error.status} {error.reason}") from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise unavailable(name, f"the API did not answer: {type(error).__name__}") from error
        return _spec_of(cast("dict[str, Any]", found))

    def _run(self) -> None:
        failures = 0
        while not self._stop.is_set():
            begun_s = time.monotonic()
            try:
                self._watch(self._list())
            except Exception as error:  # noqa: BLE001 - whatever it is, the answer is to list again
                gone = isinstance(error, client.ApiException) and error.status == 410
                if not gone:
                    _log.warning("policies.watch_failed", error=f"{type(error).__name__}: {error}"[:300])
                self._on_restart()
                if time.monotonic() - begun_s >= STEADY_S:
                    failures = 0
                self._stop.wait(PAUSES_S[min(failures, len(PAUSES_S) - 1)] * random.uniform(0.5, 1.0))  # noqa: S311
                failures += 1

    def _list(self) -> str:
        listed = cast(
            "dict[str, Any]",
            self._objects.list_cluster_custom_object(
                GROUP, VERSION, PLURAL, _request_timeout=(CONNECT_S, 30)
            ),
        )
        self._specs = {_key_of(item): _spec_of(item) for item in listed["items"]}
        self._synced.set()
        return str(listed["metadata"]["resourceVersion"])

    def _watch(self, version: str) -> None:
        while not self._stop.is_set():
            stream = watch.Watch()  # type: ignore[no-untyped-call]
            events = stream.stream(  # type: ignore[no-untyped-call]
                self._objects.list_cluster_custom_object,
                GROUP,
                VERSION,
                PLURAL,
                resource_version=version,
                timeout_seconds=WATCH_S,
                allow_watch_bookmarks=True,
                _request_timeout=(CONNECT_S, SILENCE_S),
            )
            for event in events:
                kind, item = event["type"], event["object"]
                if kind == "ERROR":
                    raise client.ApiException(status=item.get("code", 0), reason=item.get("message", ""))
                version = item["metadata"]["resourceVersion"]
                if kind in {"ADDED", "MODIFIED"}:
                    self._specs = {**self._specs, _key_of(item): _spec_of(item)}
                elif kind == "DELETED":
                    self._specs = {k: v for k, v in self._specs.items() if k != _key_of(item)}
                if self._stop.is_set():
                    stream.stop()  # type: ignore[no-untyped-call]


def _key_of(item: Mapping[str, Any]) -> tuple[str, str]:
    return item["metadata"]["namespace"], item["metadata"]["name"]


def _spec_of(item: Mapping[str, Any]) -> Spec:
    spec = item.get("spec")
    return spec if isinstance(spec, dict) else {}


def unavailable(name: str, why: str) -> Refusal:
    """The refusal of a workload whose policy cannot be read just now."""
    return Refusal(
        "PolicyUnavailable",
        f"CheckpointPolicy {name} could not be read: {why}",
        where="deltashard.io/policy",
        remedy="try again",
    )
