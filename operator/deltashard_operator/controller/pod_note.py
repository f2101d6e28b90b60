"""Tells schedulers how old a pod's newest checkpoint is, by an annotation of the pod; the chart has it off.

A scheduler that has to evict may choose the pod that loses least. Each pod of a run is patched when the run has a newer
checkpoint, after all else that is to be written and at most once a minute (`write_queue.Rank.NOTE`). Nothing is taken
back: the time stays true.
"""

from __future__ import annotations

from functools import partial

from deltashard_operator.controller.run_book import Entries
from deltashard_operator.controller.write_queue import Rank
from deltashard_operator.kube.call import MERGE, ApiUnavailable
from deltashard_operator.kube.cluster_name import CHECKPOINT_TIME
from deltashard_operator.run.observed_object import PodView, timestamp

LOOK_S = 5.0


class PodNotes:
    """The annotations of all pods; on the controller's loop."""

    def __init__(self, books: Entries) -> None:
        self._books = books
        self._looked_s = float("-inf")
        self._noted: dict[str, str] = {}
        """What the annotation says, by the pod's UID."""

    def tick(self) -> None:
        """Look at all pods, when it is time, and offer what is to be written."""
        now_s = self._books.wall()
        if abs(now_s - self._looked_s) < LOOK_S:
            return
        self._looked_s = now_s
        for uid in self._noted.keys() - self._books.pods.keys():
            del self._noted[uid]
            self._books.queue.forget(("pod", uid))
        for entry in self._books:
            committed_s = entry.run.progress.last_commit_at_s
            if entry.run.finished or not committed_s:
                continue
            text = timestamp(committed_s)
            for pod in entry.run.pods.values():
                if pod.alive and self._noted.setdefault(pod.uid, "") != text:
                    self._books.queue.offer(("pod", pod.uid), Rank.NOTE, partial(self._write, pod, text))

    async def _write(self, pod: PodView, text: str) -> None:
        path = f"/api/v1/namespaces/{pod.workload.namespace}/pods/{pod.name}"
        body = {"metadata": {"uid": pod.uid, "annotations": {CHECKPOINT_TIME: text}}}
        answer = await self._books.call("PATCH", path, body, content=MERGE, tries=1)
        if answer.status not in {404, 409} and not answer.ok:  # it is gone, or another one has its name
            raise ApiUnavailable(answer.sentence, where=path)
        self._noted[pod.uid] = text
