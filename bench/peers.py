"""The peers torch.save, torch.distributed.checkpoint (DCP) and torchsnapshot behind one small interface.

Each saves the state a script would pass to it, to a directory or to a real MinIO, and reports how long the training
thread was blocked (`stall_s`) and how long until the checkpoint was readable (`durable_s`). Each uses its fastest
way to MinIO: torch.save a multipart upload by minio-py, DCP its own FsspecWriter over s3fs with as many threads as
there are cores, torchsnapshot its own S3 plugin. Both asynchronous peers are also measured with their staging memory
already allocated, as it is from the second save on where they support that.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from states import TrainingState

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

from minio_server import minio_server

THREADS = os.cpu_count() or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTiming:
    """One save as the training loop observed it."""

    stall_s: float
    stall_cpu_s: float
    """Processor time of the training thread within the stall: the part that a busy machine does not change."""
    durable_s: float
    stored_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Instant:
    """A reading of both clocks of the training thread."""

    wall_s: float
    cpu_s: float

    @classmethod
    def now(cls) -> Self:
        return cls(wall_s=time.perf_counter(), cpu_s=time.thread_time())


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLocation:
    """Where checkpoints are stored: a directory, or a bucket of a running MinIO when `endpoint` is set."""

    name: str
    root: str
    """A directory, or `bucket/prefix`."""
    endpoint: str = ""
    access_key: str = ""
    secret_key: str = ""

    @property
    def remote(self) -> bool:
        return bool(self.endpoint)

    def client(self):
        from minio import Minio

        return Minio(self.endpoint.removeprefix("http://"), self.access_key, self.secret_key, secure=False)

    def filesystem_options(self) -> dict[str, object]:
        return {
            "key": self.access_key,
            "secret": self.secret_key,
            "client_kwargs": {"endpoint_url": self.endpoint},
        }

    def split(self, tag: str) -> tuple[str, str]:
        bucket, _, prefix = self.root.partition("/")
        return bucket, f"{prefix}/{tag}"

    def url(self, tag: str) -> str:
        return f"s3://{self.root}/{tag}" if self.remote else str(Path(self.root, tag))

    def size_bytes(self, tag: str) -> int:
        if self.remote:
            bucket, prefix = self.split(tag)
            return sum(
                item.size or 0 for item in self.client().list_objects(bucket, prefix=prefix, recursive=True)
            )
        total = 0
        for folder, _, names in os.walk(Path(self.root, tag)):  # gc may delete files during the walk
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    total += Path(folder, name).stat().st_size
        return total

    def remove(self, tag: str) -> None:
        if self.remote:
            client = self.client()
            bucket, prefix = self.split(tag)
            for item in list(client.list_objects(bucket, prefix=prefix, recursive=True)):
                client.remove_object(bucket, item.object_name)
        else:
            shutil.rmtree(Path(self.root, tag), ignore_errors=True)


@contextlib.contextmanager
def minio_place(prefix: str) -> Iterator[tuple[StoreLocation, int]]:
    """Run a MinIO and yield a bucket and the server's process id; its keys are in this process's environment."""
    with minio_server() as server:
        before = dict(os.environ)
        os.environ.update(server.environment())
        try:
            place = StoreLocation(
                name="MinIO",
                root=f"{server.bucket}/{prefix}",
                endpoint=server.endpoint,
                access_key=server.access_key,
                secret_key=server.secret_key,
            )
            yield place, server.pid
        finally:
            for name in server.environment():
                os.environ.pop(name, None)
            os.environ.update({name: before[name] for name in server.environment() if name in before})


class Peer(ABC):
    """One way to save and load a `TrainingState`."""

    name: str
    asynchronous = False

    def __init__(self, place: StoreLocation) -> None:
        self.place = place

    @abstractmethod
    def save(self, state: TrainingState, tag: str) -> SaveTiming:
        """Save under `tag` and wait until it is durable."""

    @abstractmethod
    def load(self, state: TrainingState, tag: str) -> float:
        """Load `tag` into `state` and return the seconds."""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        pass

    def _saved(self, tag: str, begun: Instant, released: Instant) -> SaveTiming:
        durable_s = time.perf_counter() - begun.wall_s
        return SaveTiming(
            stall_s=released.wall_s - begun.wall_s,
            stall_cpu_s=released.cpu_s - begun.cpu_s,
            durable_s=durable_s,
            stored_bytes=self.place.size_bytes(tag),
        )


class TorchSave(Peer):
    """torch.save to a synced file; on MinIO a multipart upload of the file follows."""

    name = "torch.save"

    def _file(self, tag: str) -> Path:
        folder = Path("/tmp" if self.place.remote else self.place.root, tag)
        folder.mkdir(parents=True, exist_ok=True)
        return folder / "state.pt"

    def save(self, state: TrainingState, tag: str) -> SaveTiming:
        path = self._file(tag)
        begun = Instant.now()
        with path.open("wb") as out:
            torch.save(state.as_dict(), out)
            if not self.place.remote:
                out.flush()
                os.fsync(out.fileno())
        if self.place.remote:
            bucket, prefix = self.place.split(tag)
            self.place.client().fput_object(
                bucket, f"{prefix}/state.pt", str(path), num_parallel_uploads=THREADS
            )
            path.unlink()
        return self._saved(tag, begun, Instant.now())

    def load(self, state: TrainingState, tag: str) -> float:
        path = self._file(tag)
        begun = time.perf_counter()
        if self.place.remote:
            bucket, prefix = self.place.split(tag)
            self.place.client().fget_object(bucket, f"{prefix}/state.pt", str(path))
        state.load(torch.load(path, weights_only=True, mmap=True))
        seconds = time.perf_counter() - begun
        if self.place.remote:
            path.unlink()
        return seconds


class DcpSave(Peer):
    """torch.distributed.checkpoint.save, one process without collectives."""

    name = "dcp.save"

    def writer(self, tag: str):
        """Return a storage writer for one checkpoint; it is also the stager of an asynchronous save."""
        if self.place.remote:
            return _fsspec().FsspecWriter(
                self.place.url(tag), thread_count=THREADS, **self.place.filesystem_options()
            )
        return dcp.FileSystemWriter(Path(self.place.root, tag), thread_count=THREADS)

    def reader(self, tag: str):
        if self.place.remote:
            return _fsspec().FsspecReader(self.place.url(tag), **self.place.filesystem_options())
        return dcp.FileSystemReader(Path(self.place.root, tag))

    def save(self, state: TrainingState, tag: str) -> SaveTiming:
        begun = Instant.now()
        with _silence_warnings():
            dcp.save(state.as_dict(), storage_writer=self.writer(tag), no_dist=True)
        return self._saved(tag, begun, Instant.now())

    def load(self, state: TrainingState, tag: str) -> float:
        begun = time.perf_counter()
        target = state.as_dict()
        with _silence_warnings():
            dcp.load(target, storage_reader=self.reader(tag), no_dist=True)
        state.load(target)
        return time.perf_counter() - begun


class DcpAsyncSave(DcpSave):
    """torch.distributed.checkpoint.async_save with its defaults."""

    name = "dcp.async_save"
    asynchronous = True

    def __init__(self, place: StoreLocation) -> None:
        super().__init__(place)
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def stager(self):
        """Return None: the writer stages into new memory each time."""
        return

    def start(self, state: TrainingState, tag: str) -> Callable[[], bool]:
        future = self._begin(state, tag)
        return _durable(future.done, future.result)

    def save(self, state: TrainingState, tag: str) -> SaveTiming:
        begun = Instant.now()
        future = self._begin(state, tag)
        released = Instant.now()
        future.result()
        return self._saved(tag, begun, released)

    def _begin(self, state: TrainingState, tag: str):
        with _silence_warnings():
            return dcp.async_save(
                state.as_dict(), storage_writer=self.writer(tag), async_stager=self.stager()
            )


class DcpAsyncSaveReusing(DcpAsyncSave):
    """DCP's asynchronous save with a stager that keeps its memory between saves."""

    name = "dcp.async_save (cached staging)"
    pinned = False
    """Pinned memory and non-blocking copies need CUDA."""

    def __init__(self, place: StoreLocation) -> None:
        super().__init__(place)
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self._stager = DefaultStager(StagingOptions(self.pinned, False, False, self.pinned))

    def close(self) -> None:
        self._stager.close()

    def stager(self):
        return self._stager


class TorchSnapshotTake(Peer):
    """torchsnapshot.Snapshot.take."""

    name = "torchsnapshot.take"

    def __init__(self, place: StoreLocation) -> None:
        super().__init__(place)
        with _silence_warnings():
            import torchsnapshot
        self.library = torchsnapshot
        # The library requests the current event loop, which newer Pythons no longer create implicitly.
        asyncio.set_event_loop(asyncio.new_event_loop())

    def _app_state(self, state: TrainingState):
        return {"state": self.library.StateDict(**state.as_dict())}

    def save(self, state: TrainingState, tag: str) -> SaveTiming:
        with _silence_warnings():
            begun = Instant.now()
            self.library.Snapshot.take(self.place.url(tag), self._app_state(state))
        return self._saved(tag, begun, Instant.now())

    def load(self, state: TrainingState, tag: str) -> float:
        with _silence_warnings():
            begun = time.perf_counter()
            target = self._app_state(state)
            self.library.Snapshot(self.place.url(tag)).restore(target)
            state.load(dict(target["state"]))
            return time.perf_counter() - begun


class TorchSnapshotAsyncTake(TorchSnapshotTake):
    """torchsnapshot.Snapshot.async_take."""

    name = "torchsnapshot.async_take"
    asynchronous = True

    def start(self, state: TrainingState, tag: str) -> Callable[[], bool]:
        with _silence_warnings():
            pending = self.library.Snapshot.async_take(self.place.url(tag), self._app_state(state))
        return _durable(pending.done, pending.wait)

    def save(self, state: TrainingState, tag: str) -> SaveTiming:
        with _silence_warnings():
            begun = Instant.now()
            pending = self.library.Snapshot.async_take(self.place.url(tag), self._app_state(state))
            released = Instant.now()
            pending.wait()
        return self._saved(tag, begun, released)


def _fsspec():
    import torch.distributed.checkpoint._fsspec_filesystem as module

    return module


def _durable(done: Callable[[], bool], result: Callable[[], object]) -> Callable[[], bool]:
    """Return whether a save has finished without failing; `result` raises if it failed."""

    def durable() -> bool:
        if done():
            result()
            return True
        return False

    return durable


def _silence_warnings():
    return warnings.catch_warnings(action="ignore")


PEERS: tuple[type[Peer], ...] = (
    TorchSave,
    DcpSave,
    DcpAsyncSave,
    DcpAsyncSaveReusing,
    TorchSnapshotTake,
    TorchSnapshotAsyncTake,
)
