"""How a table learns which of its rows changed: exactly, or a superset, never less.

**Gradients** (`RowTracker`), for optimizers of the whitelist, which change only rows with a gradient. After a step,
- a sparse gradient lists its rows: they are marked, and nothing else needs to be known. This covers functional and
  tied lookups, accumulation, closures and gradients that nobody zeroed, for it is the very gradient that was applied;
- a dense gradient says nothing cheaply (scanning one costs as much as the step itself), so its rows come from the
  lookups, with proof that they are all of it. A hook on each lookup's autograd node marks the ids that this very node
  looked up, *when the gradient flows* (an eval-mode or detached lookup never counts), and notes the address of the
  gradient it made. When the sum of one
  backward pass reaches the parameter, n lookups account for it exactly if it lies at one of their addresses and was
  added to in place n - 1 times: autograd sums into its first buffer and counts versions. A functional use, another
  owner of a tied weight or another user's hook breaks that count. From there to the step the gradient must stay as
  it was (same memory, one version per backward pass): clipping, unscaling, averaging over ranks and a manual edit are
  seen. Whatever is not proven ends the method for this table: `Untracked`, and the table goes over to hashing.

A step that is skipped leaves rows of a dense gradient marked that did not change. A cut takes the marks of what flowed
before it, though the step may come after it, or come again: so a gradient knows since when rows are added to it, and
one that is older than the last cut is scanned when it is applied.

**Hashes** (`HashTracker`), for everything else: one 64-bit hash of weights and state per row, kept from cut to cut.
Exact for any optimizer; costs one read of the table per cut and 8 bytes per row.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from deltashard.state import row_hash
from deltashard.state.discovery import FoundTable
from deltashard.state.forgetful_hook import ForgetfulHook
from deltashard.tracking.marks import Marks, in_graph


class Untracked(Exception):
    """The rows that changed in this step cannot be proven; the message says why."""


_NEVER_SEEN = (None, None, None)
_LOOKUP_NODES = ("EmbeddingBackward0", "EmbeddingBagBackward0")
"""They know the ids that were looked up, whatever the module was called with."""
_FORWARDS = (nn.Embedding.forward, nn.EmbeddingBag.forward)
_FLOWS = 8
"""Backward passes that never reached the parameter (they raised) are remembered for so many others."""
_SCANNED = 1 << 14
"""Rows of a gradient that are scanned at once: a byte of memory for each of their bytes."""
_numbers = itertools.count()


def version(tensor: Tensor) -> int:
    """Torch's own count of in-place writes; `.data` writes, fused and custom kernels do not move it."""
    return tensor._version  # noqa: SLF001 - there is no other accessor


class RowTracker:
    """Marks the rows of one table from its gradients after every step."""

    def __init__(self, found: FoundTable, marks: Marks) -> None:
        self._param = found.param
        self._marks = marks
        self._handles: list[RemovableHandle] = []
        self._broken: str | None = None
        # By backward pass under way: address of the gradient of every lookup.
        self._flowing: dict[int, list[int]] = {}
        # Address and version that param.grad will have once the gradient under way was added.
        self._expected: tuple[int, int] | None = None
        # An attribute of this table's gradients: this token (a copied gradient has another), its version right after
        # backward added to it, and the cut after which rows were first added. What is put in its place lacks it.
        self._seen = f"_deltashard_seen_{next(_numbers)}"
        self._token = object()
        self._cuts = 0
        # The gradient of the step under way, and the rows of a sparse one.
        self._held: Tensor | None = None
        self._held_rows: Tensor | None = None
        lookups = [m for m in found.lookups if not m.sparse]
        if lookups:
            hook = _LookupHook(self)
            self._handles += [m.register_forward_hook(hook, with_kwargs=True) for m in lookups]
            self._handles.append(self._param.register_hook(self._gradient_arrives))  # type: ignore[no-untyped-call]
            self._handles.append(self._param.register_post_accumulate_grad_hook(self._gradient_added))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def hold(self) -> None:
        """The optimizer is about to apply `param.grad`: keep it, a hook of somebody else may drop it."""
        self._held = grad = self._param.grad
        if grad is None or not grad.is_sparse:
            self._held_rows = None
            return
        indices = grad._indices()  # noqa: SLF001 - indices() refuses uncoalesced gradients
        # [1, n] is as good as [n], and `indices[0]` costs more than the marks.
        self._held_rows = indices if grad.sparse_dim() == 1 else indices[0]

    def stepped(self) -> None:
        """The optimizer applied the gradient that was held: mark its rows.

        Raises:
            Untracked: which rows that were is not known.
        """
        grad, rows = self._held, self._held_rows
        self._held = self._held_rows = None
        if self._param.grad is not grad and self._param.grad is not None:
            raise Untracked("its gradient was replaced within the optimizer's step")
        if grad is None:
            return
        if rows is not None:
            self._marks.mark(rows)
            return
        if self._broken is not None:
            raise Untracked(self._broken)
        since = self._since(grad)
        if since is None:
            raise Untracked(
                "its dense gradient was written outside of backward (clipping, unscaling, averaging, by hand)"
            )
        if since != self._cuts:
            self._marks.mark_where(_rows_of(grad))
            grad.__dict__[self._seen] = (self._token, version(grad), self._cuts)

    def cut_taken(self) -> None:
        """Marks were moved to pending: if a gradient from before is applied, its rows change again."""
        self._cuts += 1

    def _since(self, grad: Tensor) -> int | None:
        """The cut after which rows were first added to a dense gradient; None: not only this table's lookups did."""
        owner, seen, since = grad.__dict__.get(self._seen, _NEVER_SEEN)
        return since if owner is self._token and seen == version(grad) else None

    def owns(self, node: Any) -> bool:
        """Whether the autograd node is a lookup in the table itself."""
        edges = node.next_functions
        return (
            bool(edges)
            and getattr(edges[0][0], "variable", None) is self._param
            and node.name() in _LOOKUP_NODES
        )

    def gradient_flows(self, ids: Tensor, seen: int, grad: Tensor | None) -> None:
        """The autograd node of a lookup of `ids`, which were of version `seen`, made the gradient `grad`."""
        try:
            if in_graph(ids):
                # At a replay no hook runs, and the gradient has the version it had: this would pass for proven.
                self._broken = "its gradient is made inside a CUDA graph, where no hook runs"
                return
            if version(ids) != seen:
                self._broken = "the ids of a lookup were written before its backward pass"
            # Marked now: before the step the caller may refill its batch in place.
            self._marks.mark(ids)
            address = 0 if grad is None or grad.is_sparse else grad.data_ptr()
        except Exception as error:  # noqa: BLE001 - a moved weight may break anything here, never the backward pass
            self._broken = f"the rows of a lookup cannot be told ({type(error).__name__}: {error})"
            address = 0
        self._flowing.setdefault(_backward_pass(), []).append(address)
        while len(self._flowing) > _FLOWS:
            del self._flowing[next(iter(self._flowing))]

    def _gradient_arrives(self, grad: Tensor) -> None:
        flowing = self._flowing.pop(_backward_pass(), [])
        self._expected = None
        if grad.is_sparse:
            return
        if not flowing:
            self._broken = (
                "it gets dense gradients that come from no tracked lookup (functional use, compiled)"
            )
        elif version(grad) != len(flowing) - 1 or all(at != grad.data_ptr() for at in flowing):
            self._broken = (
                "its dense gradient has parts that come from no tracked lookup (functional or tied use)"
            )
        present = self._param.grad
        if present is not None and self._since(present) is None:
            self._broken = (
                "its dense gradient was written between two backward passes (zeroed in place, or by hand)"
            )
        # Autograd takes the buffer itself, or adds to what is there; whoever else touches it first is seen.
        self._expected = (
            (grad.data_ptr(), version(grad))
            if present is None
            else (present.data_ptr(), version(present) + 1)
        )

    def _gradient_added(self, param: Tensor) -> None:
        grad = param.grad
        if grad is None or grad.is_sparse:
            return
        if self._expected != (grad.data_ptr(), version(grad)):
            self._broken = "its dense gradient is rewritten by another hook, or mixed with sparse ones"
        since = grad.__dict__.get(self._seen, _NEVER_SEEN)[2]
        grad.__dict__[self._seen] = (self._token, version(grad), self._cuts if since is None else since)


def _saves_as_is() -> bool:
    """Whether nothing is hooked in between autograd nodes and the tensors that they save."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # noqa: SLF001 - torch offers no accessor
    return top is not None and top(False) is None


def _is_plain(module: nn.Module) -> bool:
    """Whether a module looks up what it is called with: no other forward is in it, and no hook puts another result."""
    return (
        type(module).forward in _FORWARDS
        and "forward" not in module.__dict__
        and all(isinstance(hook, _LookupHook) for hook in module._forward_hooks.values())  # noqa: SLF001 - as above
    )


def _backward_pass() -> int:
    """Tells backward passes apart, on the thread where one runs."""
    return torch._C._current_graph_task_id()  # noqa: SLF001 - torch offers no accessor


def _rows_of(grad: Tensor) -> Tensor:
    """Where a dense gradient [R, D] has any bit set: bool [R]. To subtract -0 changes a weight that is -0."""
    found = [
        piece.contiguous().view(torch.uint8).ne(0).any(dim=1)
        for piece in torch.split(grad.detach(), _SCANNED)
    ]
    return torch.cat(found)


class _LookupHook(ForgetfulHook):
    """The forward hook of lookup modules; a copy or pickle of the model carries one that does nothing."""

    def __init__(self, tracker: RowTracker | None = None) -> None:
        self._tracker = tracker

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        tracker = self._tracker
        if tracker is None or torch.compiler.is_compiling() or not isinstance(output, Tensor):
            return
        node = output.grad_fn
        if node is None:  # no gradient will flow: evaluation, no_grad, a frozen table
            return
        # A transformed weight (functional_call, a parametrization) is not this parameter.
        if not tracker.owns(node):
            return
        try:
            if _saves_as_is():
                # What its backward reads, whatever the module was called with.
                ids = cast("Any", node)._saved_indices  # noqa: SLF001 - torch offers no accessor
            elif _is_plain(module):
                # To ask the node would run what was hooked in (a checkpointed forward, say).
                ids = args[0] if args else kwargs["input"]
            else:
                return
            seen = version(ids)
        except Exception:  # noqa: BLE001 - the forward pass goes on; a gradient of a lookup that nobody tells of is found
            return
        node.register_hook(
            lambda grads, _outer: tracker.gradient_flows(ids, seen, grads[0] if grads else None)
        )


class HashTracker:
    """Marks the rows of one table whose hash differs from the one at the last look."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._hashes: Tensor | None = None
        self._layout: tuple[object, ...] = ()

    def begin(self, sections: Sequence[Tensor]) -> row_hash.Hashing:
        """Begin a look at the weights and row fields `sections`, [R] or [R, D] each: run its jobs, then `end` it."""
        return row_hash.Hashing(sections, self._seed)

    def end(self, hashing: row_hash.Hashing, sections: Sequence[Tensor], marks: Marks) -> None:
        """Compare with the last look.

        A first look, or another set of fields than last time, counts as a change of every row.
        """
        layout = row_hash.layout(sections)
        hashes = hashing.result()
        if self._hashes is None or layout != self._layout:
            marks.mark_all()
        else:
            marks.mark_where(hashes != self._hashes)
        self._hashes, self._layout = hashes, layout

    def adopt(self, sections: Sequence[Tensor]) -> None:
        """Take what is there as known (after a restore), without marking."""
        self._layout = row_hash.layout(sections)
        self._hashes = row_hash.row_hashes(sections, self._seed)
