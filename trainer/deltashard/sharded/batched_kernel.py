"""One batched kernel of FBGEMM with a fused optimizer: the live memory of its shards, and what it updates when.

A kernel holds shards of several tables in one buffer each of weights and optimizer state, and changes both within the
backward pass, inside of the lookup's autograd node. So that is where updated rows are told: a hook on the node runs
right after the update, whatever pipeline called forward, and however far ahead. A forward that gets no gradient
(evaluation, `no_grad`) has no node, or one that never runs. The ids are those that the kernel itself was given:
after the input's distribution, local to the shard. What the kernel would not accept (an id beyond the table) it takes
for row 0, or leaves out: row 0 counts as updated then.

Its writes move no version counter of torch's, so one that moved tells of somebody else's write.
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
"""Fused optimizers that change rows of their lookups only (weight decay included); others are not known to."""
_HYPERPARAMETERS = ("eps", "weight_decay")
_SINGLE = ("iter",)
"""Optimizer state that is one value of the whole kernel."""


class BatchedKernel:
    """One kernel and its shards, in the kernel's order."""

    def __init__(self, kernel: nn.Module) -> None:
        """`kernel` is a `BatchedFusedEmbedding` or `BatchedFusedEmbeddingBag`.

        Raises:
            UserError: its optimizer's state cannot be read.
        """
        self._kernel = weakref.ref(kernel)  # kept as long as the kernel itself, see `kernel_of`
        self.weights: list[Tensor] = self._tbe.split_embedding_weights()
        """[local rows, local columns] each, live."""
        self.shards = [KernelShard(self, n, state) for n, state in enumerate(self._states())]
        self._features: list[int] = self._tbe.feature_table_map
        self.listeners: dict[int, Callable[[Tensor], None]] = {}
        self.watching: Callable[[bool], None] | None = None
        """Called with True right before each update, with False right after it; see `watch`."""
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
        """What it keeps beside rows: optimizer, rates as they are now and as the group says, count of iterations."""
        tbe, args = self._tbe, self._tbe.optimizer_args
        return {
            "optimizer": self.optimizer,
            "lr": tbe.get_learning_rate(),
            "hyperparameters": {name: getattr(args, name) for name in _HYPERPARAMETERS},
            "iter": int(tbe.iter_cpu.item()),
            "group": {key: value for key, value in self.group.items() if key != "params"},
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Put back what `capture` gave; schedulers hold the group itself, which stays."""
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
        """The one parameter group of its fused optimizer, live."""
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
        """Have `updates` called with True right before each update, of whichever rows, and with False right after."""
        self.watching = updates
        self._hook()

    def _hook(self) -> None:
        if self._handle is None:
            self._handle = self._tbe.register_forward_hook(_LookupHook(self), with_kwargs=True)

    def updated(self, indices: Tensor, offsets: Tensor, batches: Sequence[Sequence[int]] | None) -> None:
        """The kernel updated the rows of a lookup.

        `indices` (int [n]) are grouped by feature, those of bag b at offsets[b]:offsets[b + 1]; `batches`: each
        feature's number of bags by rank, where they differ.
        """
        features = self._features
        if self.watching is not None:
            self.watching(False)
        if not indices.numel():
            return
        try:
            spans = _spans(indices.numel(), offsets, len(features), batches)
        except Exception as error:  # noqa: BLE001 - inside the user's backward pass: say more rows, never harm it
            _log.debug("a lookup's features could not be told apart", exc_info=error)
            spans = [(0, indices.numel())] * len(features)
        for table, (start, stop) in zip(features, spans, strict=True):
            told = self.listeners.get(table)
            if told is not None and stop > start:
                told(_mask_invalid_ids(indices[start:stop], self.weights[table].shape[0]))

    def _states(self) -> list[dict[str, Tensor]]:
        tbe = self._tbe
        if self.optimizer == "none":
            raise UserError(
                "A kernel without an optimizer of its own hands gradients to somebody unknown",
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
        return (
            None
            if name in LOOKUP_ONLY_OPTIMIZERS
            else f"{name} is not known to leave rows alone that nobody looks up"
        )

    def listen(self, updated: Callable[[Tensor], None]) -> Callable[[], None]:
        return self.batch.listen(self._nth, updated)


class _LookupHook(TransientHook):
    """The forward hook of a kernel; a copy or pickle of the model carries one that does nothing."""

    def __init__(self, batch: BatchedKernel | None = None) -> None:
        self._batch = batch

    def __call__(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break()  # noqa: SLF001 - the kernel then runs outside of what is compiled, with this hook
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
    """The one `BatchedKernel` of a module, as long as its memory stays where it is: its tensors keep their identity."""
    known = _known.get(module)
    if known is None or not known.current:
        known = _known[module] = BatchedKernel(module)
    return known


def _spans(
    count: int, offsets: Tensor, features: int, batches: Sequence[Sequence[int]] | None
) -> list[tuple[int, int]]:
    """Which of `count` indices each feature has; all, for every feature, where the offsets make no sense."""
    if batches is None:
        edges = offsets[:: (offsets.numel() - 1) // features].tolist()
    else:
        ends = itertools.accumulate((sum(sizes) for sizes in batches), initial=0)
        edges = offsets[list(ends)].tolist()
    whole = len(edges) == features + 1 and edges[0] == 0 and edges[-1] == count and edges == sorted(edges)
    return list(itertools.pairwise(edges)) if whole else [(0, count)] * features


def _mask_invalid_ids(ids: Tensor, rows: int) -> Tensor:
    """Ids with 0 in the place of those that are no row. On a CPU one pass tells that there are none, as a rule."""
    if ids.device.type == "cpu":
        low, high = torch.aminmax(ids)
        if low >= 0 and high < rows:
            return ids
    return torch.where((ids >= 0) & (ids < rows), ids, 0)


def _values(states: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
    return [value for state in states for value in state.values()]


def _place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape)
