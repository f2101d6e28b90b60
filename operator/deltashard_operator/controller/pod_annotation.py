"""Pod annotation with the time of the newest checkpoint, for schedulers. Disabled in the chart by default.

A scheduler that must evict a pod can choose the one that loses the least work.
"""

from __future__ import annotations

from functools import partial

from deltashard_operator.controller.run_store import RunStore
from deltashard_operator.controller.write_queue import Priority
from deltashard_operator.kube.call import MERGE, ApiUnavailable
from deltashard_operator.kube.cluster_name import CHECKPOINT_TIME
from deltashard_operator.run.observed_object import PodView, timestamp


def reconcile(run_store: RunStore, _now_s: float) -> None:
    """Queue the annotations of all pods that changed."""
    for entry in run_store:
        committed_s = entry.run.progress.last_commit_at_s
        for pod in entry.run.pods.values():
            if not pod.alive:
                run_store.queue.forget(("pod", pod.uid))
            elif committed_s and pod.checkpoint_time != timestamp(committed_s):
                write = partial(_write, run_store, pod, timestamp(committed_s))
                run_store.queue.offer(("pod", pod.uid), Priority.ANNOTATION, write)
            else:
                run_store.queue.withdraw(("pod", pod.uid))


async def _write(run_store: RunStore, pod: PodView, text: str) -> None:
    path = f"/api/v1/namespaces/{pod.workload.namespace}/pods/{pod.name}"
    body = {"metadata": {"uid": pod.uid, "annotations": {CHECKPOINT_TIME: text}}}
    answer = await run_store.call("PATCH", path, body, content=MERGE, tries=1)
    if answer.status not in {404, 409} and not answer.ok:  # the pod is deleted, or another pod has its name
        raise ApiUnavailable(answer.sentence, where=path)
    run_store.queue.forget(("pod", pod.uid))
