"""One batched FBGEMM kernel with a fused optimizer: the live memory of its shards, and reports of its updates.

A kernel holds shards of several tables in one buffer each for weights and optimizer state, and changes both within the
backward pass, inside the lookup's autograd node. A hook on this node reports the updated rows right after the update,
independent of the pipeline that called forward. A forward without a gradient (evaluation, `no_grad`) has no node, or
one that never runs. The ids are the kernel's inputs: after the input's distribution, local to the shard. The kernel
maps an invalid id (beyond the table) to row 0 or skips it, so row 0 counts as updated.

The kernel's writes do not change torch's version counters, so a changed counter reveals a write by other code.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from deltashard_checkpoint.errors import UserError
from torch import Tensor, nn

from deltashard.state.transient_hook import TransientHook

_log = logging.getLogger("deltashard.tracking")

LOOKUP_ONLY_OPTIMIZERS = ("exact_sgd", "exact_adagrad", "exact_row_wise_adagrad")
"""Fused optimizers that change only looked-up rows (weight decay included); others are not known to."""
_HYPERPARAMETERS = ("eps", "weight_decay")
_SINGLE = ("iter",)
"""Optimizer state that is one value for the whole kernel."""


class BatchedKernel:
    """One kernel and its shards, in the kernel's order."""

    def __init__(self, kernel: nn.Module) -> None:
        """`kernel` is a `BatchedFusedEmbedding` or `BatchedFusedEmbeddingBag`.

        Raises:
            UserError: its optimizer's state cannot be read.
        """
        self._kernel = weakref.ref(kernel)  # lives as long as the kernel, see `kernel_of`
        self.weights: list[Tensor] = self._tbe.split_embedding_weights()
        """[local rows, local columns] each, live."""
        self.shards = [KernelShard(self, n, state) for n, state in enumerate(self._states())]
        self._features: list[int] = self._tbe.feature_table_map
        self.listeners: dict[int, Callable[[Tensor], None]] = {}
        self.watching: Callable[[bool], None] | None = None
        """Called with True right before each update and with False right after it; see `watch`."""
        self._handle: Any = None

    @property
    def optimizer(self) -> str:
        return str(self._tbe.optimizer.value)

    @property
    def current(self) -> bool:
        now = [*self._tbe.split_embedding_weights(), *_values(self._states())]
        was = [*self.weights, *_values([shard.state for shard in self.shards])]
        return [_place(t) for t in now] == [_place(t) for t in was]

    def capture(self) -> dict[str, Any]:
        """Return the non-row state: optimizer, current and group hyperparameters, and iteration count."""
        tbe, args = self._tbe, self._tbe.optimizer_args
        return {
            "optimizer": self.optimizer,
            "lr": tbe.get_learning_rate(),
            "hyperparameters": {name: getattr(args, name) for name in _HYPERPARAMETERS},
            "iter": int(tbe.iter_cpu.item()),
            "group": {key: value for key, value in self.group.items() if key != "params"},
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore the result of `capture`; the group object stays, since schedulers hold it."""
        tbe = self._tbe
        self.group.update(saved["group"])
        tbe.update_hyper_parameters({"lr": saved["lr"], **saved["hyperparameters"]})
        for count in (tbe.iter_cpu, getattr(tbe, "iter", None)):
            if isinstance(count, Tensor):
                count.fill_(saved["iter"])

    @property
    def hyperparameters(self) -> dict[str, float]:
        args = self._tbe.optimizer_args
        rate = {"lr": float(self._tbe.get_learning_rate())}
        return rate | {name: float(getattr(args, name)) for name in _HYPERPARAMETERS}

    def set_hyperparameters(self, values: Mapping[str, float]) -> None:
        self._tbe.update_hyper_parameters(dict(values))
        if "lr" in values:
            self.group["lr"] = values["lr"]

    @property
    def group(self) -> dict[str, Any]:
        """The only parameter group of the fused optimizer, live."""
        group: dict[str, Any] = self._module.fused_optimizer.param_groups[0]
        return group

    def listen(self, nth: int, updated: Callable[[Tensor], None]) -> Callable[[], None]:
        self.listeners[nth] = updated
        self._hook()

        def end() -> None:
            if self.listeners.get(nth) is updated:
                del self.listeners[nth]
            if not self.listeners and self.watching is None and self._handle is not None:
                self._handle.remove()
                self._handle = None

        return end

    def watch(self, updates: Callable[[bool], None]) -> None:
        """Call `updates` with True right before each update of any rows, and with False right after it."""
        self.watching = updates
        self._hook()

    def _hook(self) -> None:
        if self._handle is None:
            self._handle = self._tbe.register_forward_hook(_LookupHook(self), with_kwargs=True)

    def updated(self, indices: Tensor, offsets: Tensor, batches: Sequence[Sequence[int]] | None) -> None:
        """Report the rows that the update of one lookup changed.

        `indices` (int [n]) are grouped by feature; bag b has those at offsets[b]:offsets[b + 1]. `batches`: each
        feature's number of bags by rank, where they differ.
        """
        features = self._features
        if self.watching is not None:
            self.watching(False)
        if not indices.numel():
            return
        try:
            spans = _spans(indices.numel(), offsets, len(features), batches)
        except Exception as error:  # noqa: BLE001 - within the backward pass: report more rows instead of raising
            _log.debug("a lookup's features could not be separated", exc_info=error)
            spans = [(0, indices.numel())] * len(features)
        for table, (start, stop) in zip(features, spans, strict=True):
            listener = self.listeners.get(table)
            if listener is not None and stop > start:
                listener(_mask_invalid_ids(indices[start:stop], self.weights[table].shape[0]))

    def _states(self) -> list[dict[str, Tensor]]:
        tbe = self._tbe
        if self.optimizer == "none":
            raise UserError(
                "A kernel without an optimizer passes its gradients to an unknown optimizer",
                where=type(self._module).__name__,
                remedy="choose an optimizer in fused_params",
            )
        states = [
            {key: value for key, value in state.items() if key not in _SINGLE}
            for state in tbe.get_optimizer_state()
        ]
        return states or [{} for _ in self.weights]

    @property
    def _module(self) -> Any:
        kernel = self._kernel()
        assert kernel is not None
        return kernel

    @property
    def _tbe(self) -> Any:
        return self._module.emb_module


class KernelShard:
    """One shard of a table in a kernel; see `discovery.Kernel`."""

    def __init__(self, batch: BatchedKernel, nth: int, state: Mapping[str, Tensor]) -> None:
        self.batch = batch
        self._nth = nth
        self.state = state

    @property
    def inexact_reason(self) -> str | None:
        name = self.batch.optimizer
        return None if name in LOOKUP_ONLY_OPTIMIZERS else f"{name} may change rows that are not looked up"

    def listen(self, updated: Callable[[Tensor], None]) -> Callable[[], None]:
        return self.batch.listen(self._nth, updated)


class _LookupHook(TransientHook):
    """Forward hook of a kernel; a copy or pickle of the model gets a hook that does nothing."""

    def __init__(self, batch: BatchedKernel | None = None) -> None:
        self._batch = batch

    def __call__(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break()  # noqa: SLF001 - the kernel then runs outside the graph, with this hook
        batch = self._batch
        node = output.grad_fn
        if batch is None or node is None:
            return
        indices = args[0] if args else kwargs["indices"]
        offsets = args[1] if len(args) > 1 else kwargs["offsets"]
        batches = kwargs.get("batch_size_per_feature_per_rank")
        if (watching := batch.watching) is not None:
            node.register_prehook(lambda _given: watching(True))
        node.register_hook(lambda _made, _given: batch.updated(indices, offsets, batches))


_known: weakref.WeakKeyDictionary[nn.Module, BatchedKernel] = weakref.WeakKeyDictionary()


def kernel_of(module: nn.Module) -> BatchedKernel:
    """Return the `BatchedKernel` of a module; it keeps its identity as long as the kernel's memory does not move."""
    known = _known.get(module)
    if known is None or not known.current:
        known = _known[module] = BatchedKernel(module)
    return known


def _spans(
    count: int, offsets: Tensor, features: int, batches: Sequence[Sequence[int]] | None
) -> list[tuple[int, int]]:
    """The range of the `count` indices of each feature; the full range for every feature if the offsets are invalid."""
    if batches is None:
        edges = offsets[:: (offsets.numel() - 1) // features].tolist()
    else:
        ends = itertools.accumulate((sum(sizes) for sizes in batches), initial=0)
        edges = offsets[list(ends)].tolist()
    valid = len(edges) == features + 1 and edges[0] == 0 and edges[-1] == count and edges == sorted(edges)
    return list(itertools.pairwise(edges)) if valid else [(0, count)] * features


def _mask_invalid_ids(ids: Tensor, rows: int) -> Tensor:
    """Replace invalid ids with 0. On a CPU one pass usually shows that there are none."""
    if ids.device.type == "cpu":
        low, high = torch.aminmax(ids)
        if low >= 0 and high < rows:
            return ids
    return torch.where((ids >= 0) & (ids < rows), ids, 0)


def _values(states: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
    return [value for state in states for value in state.values()]


def _place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape)
