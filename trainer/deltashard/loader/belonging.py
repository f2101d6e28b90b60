"""What lies below a loader and moves while samples are drawn: generators, counters, small containers, small arrays.

A dataset's `np.random.Generator`, a counter in a transform, a cell of a closure, a `random.Random` in a module that
`collate_fn` names: none of it is in `state=`, and all of it decides what the next batch holds. They are found by
walking attributes, elements, closures and the globals that functions name, from the dataset, the sampler and
`collate_fn` on, so deep and so many. Generators are always taken; everything else only when it is not what it was when
the loader was wrapped, so that a value the program was restarted with on purpose stays.

What changed and cannot be taken (large, or of an unknown type) is fingerprinted by a sample; when it is not the same at
the resume it is said. Descriptors, process ids, handles, locks and whatever libraries keep inside are left alone;
a large dict that only grows is a cache, and so is a large list of nothing that is filled.
"""

from __future__ import annotations

import collections
import dis
import functools
import hashlib
import inspect
import itertools
import logging
import os
import random
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from deltashard.state.rng import apply_own, capture_own, is_generator
from deltashard.state.value import decode_value, encode_value, why_unstorable

log = logging.getLogger("deltashard")

MOST_SLOTS = 2000
DEEPEST = 10
MOST_ELEMENTS = 64
"""Of a container that holds objects, so many are walked."""
PLAIN_ELEMENTS = 4096
VALUE_BYTES = 1 << 16
TOTAL_BYTES = 4 << 20
"""Of all values of a capture together."""

_SCALARS = (type(None), bool, int, float, str, bytes, complex)
_OF_THE_PROCESS = re.compile(
    r"(^|[._\[])(fds?|fileno|handle|pid|ppid|tid|ident|socket|sock|port|lock|mtime|rank|worker_id)\]?$"
)
_FOREIGN = frozenset(
    [
        "pandas",
        "pyarrow",
        "polars",
        "numpy",
        "PIL",
        "h5py",
        "lmdb",
        "tensorflow",
        "jax",
        "sklearn",
        "scipy",
        "fsspec",
        "s3fs",
        "boto3",
        "botocore",
        "requests",
        "urllib3",
        "aiohttp",
        "grpc",
        "google",
        "psutil",
        "tqdm",
        "cv2",
        "zarr",
        "duckdb",
        "sqlalchemy",
        "redis",
        "deltashard",
        "pytest",
        "hypothesis",
    ]
)
_OWN_TORCH = ("torch.utils.data", "torchvision", "torchdata", "torchaudio")
_MAKING = frozenset(["__init__", "__new__", "__post_init__"])
"""Methods that make an object: what they name is done once, not for each sample."""
_DRAWING = frozenset(
    [
        "rand",
        "randn",
        "randint",
        "randperm",
        "rand_like",
        "randn_like",
        "randint_like",
        "multinomial",
        "bernoulli",
        "normal_",
        "uniform_",
        "bernoulli_",
        "random_",
        "exponential_",
        "random",
        "default_rng",
        "randrange",
    ]
)

Put = Callable[[Any], None]


@dataclass(slots=True, eq=False)
class Slot:
    """One value below a loader."""

    path: str
    value: Any
    put: Put | None
    """Sets another value in its place; None where that cannot be done."""


def _foreign(value: object) -> bool:
    """Whether a library keeps it: its insides are its own business."""
    module = getattr(type(value), "__module__", "") or ""
    top = module.partition(".")[0]
    if top == "torch":
        return not (module.startswith(_OWN_TORCH) or isinstance(value, nn.Module))
    return top in _FOREIGN or (top in sys.stdlib_module_names and top != "__main__")


def _is_plain(value: object, budget: list[int]) -> bool:
    """Whether a container holds nothing but scalars, arrays, tensors and such containers, within the budget."""
    budget[0] -= 1
    if budget[0] < 0 or isinstance(value, _SCALARS):
        return True  # what was looked at was plain
    if isinstance(value, nn.Parameter):
        return False
    if isinstance(value, torch.Tensor):
        return value.layout == torch.strided
    if isinstance(value, np.ndarray):
        return bool(value.dtype != object)
    if isinstance(value, np.generic):
        return True
    if type(value) in (dict, collections.OrderedDict, collections.defaultdict, collections.Counter):
        some = itertools.islice(cast("dict[Any, Any]", value).items(), PLAIN_ELEMENTS)
        return all(_is_plain(k, budget) and _is_plain(v, budget) for k, v in some)
    if type(value) in (list, tuple, set, frozenset, collections.deque):
        each = itertools.islice(cast("Iterable[Any]", value), PLAIN_ELEMENTS)
        return all(_is_plain(one, budget) for one in each)
    return False


def _is_leaf(value: object) -> bool:
    if isinstance(value, _SCALARS) or is_generator(value) or isinstance(value, np.random.RandomState):
        return True
    if isinstance(value, nn.Parameter):
        return False
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic, bytearray)):
        return True
    if isinstance(value, (dict, list, tuple, set, frozenset, collections.deque)):
        return _is_plain(value, [PLAIN_ELEMENTS])
    return False


def _set_attribute(owner: object, name: str) -> Put:
    return lambda value: object.__setattr__(owner, name, value)


def _set_item(owner: Any, key: Any) -> Put:
    def put(value: Any) -> None:
        owner[key] = value

    return put


def _set_cell(cell: types.CellType) -> Put:
    def put(value: Any) -> None:
        cell.cell_contents = value

    return put


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


class Walk:
    """One walk over what is reachable."""

    def __init__(self, roots: Mapping[str, object]) -> None:
        self.slots: dict[str, Slot] = {}
        self.names: set[str] = set()
        """Names that the functions use, but for those that only make objects."""
        self.iterators: list[str] = []
        """Iterators that were found: their position cannot be seen."""
        self.generators = 0
        self.opaque: set[str] = set()
        """Paths of objects whose insides are their own business: files, environments, libraries' objects."""
        self._seen: set[int] = set()
        self._queue: collections.deque[tuple[str, Any, Put | None, int]] = collections.deque(
            (path, value, None, 0) for path, value in roots.items()
        )
        self._making: list[tuple[str, Any, Put | None, int]] = []
        self._making_now = False
        self._steps = 0
        self._go()
        # Last, so that what drawing samples reaches, too, was reached by that.
        self._queue.extend(self._making)
        self._making_now = True
        self._go()

    def _go(self) -> None:
        while self._queue and len(self.slots) < MOST_SLOTS and self._steps < 4 * MOST_SLOTS:
            self._steps += 1
            self._visit(*self._queue.popleft())

    def _add(self, path: str, value: Any, put: Put | None, depth: int) -> None:
        self._queue.append((path, value, put, depth + 1))

    def _visit(self, path: str, value: Any, put: Put | None, depth: int) -> None:
        if _is_leaf(value):
            drawn = is_generator(value) or isinstance(value, np.random.RandomState)
            if drawn and (id(value) in self._seen or isinstance(value, random.SystemRandom)):
                return
            if drawn:
                self._seen.add(id(value))
                self.generators += not self._making_now
            self.slots.setdefault(path, Slot(path, value, put))
            return
        if depth >= DEEPEST or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, (types.ModuleType, nn.Parameter)):
            return
        if isinstance(value, type):
            if not _foreign_class(value):
                self._class(path, value, depth)
        elif isinstance(value, types.FunctionType):
            self._function(path, value, depth)
        elif isinstance(value, types.MethodType):
            self._add(f"{path}.self", value.__self__, None, depth)
            self._add(path, value.__func__, None, depth)
        elif isinstance(value, functools.partial):
            self._add(f"{path}.func", value.func, None, depth)
            for n, each in enumerate(value.args):
                self._add(f"{path}.args[{n}]", each, None, depth)
            for name, each in value.keywords.items():
                self._add(f"{path}.{name}", each, _set_item(value.keywords, name), depth)
        elif isinstance(value, Mapping) and isinstance(value, dict):
            for n, (key, each) in enumerate(value.items()):
                if n == MOST_ELEMENTS:
                    break
                if isinstance(key, (str, int)):
                    self._add(f"{path}[{key!r}]", each, _set_item(value, key), depth)
        elif isinstance(value, (list, tuple, collections.deque)):
            for n, each in enumerate(value):
                if n == MOST_ELEMENTS:
                    break
                self._add(
                    f"{path}[{n}]", each, None if isinstance(value, tuple) else _set_item(value, n), depth
                )
        elif isinstance(value, Iterator) and not hasattr(value, "fileno") and not hasattr(value, "__dict__"):
            self.iterators.append(path)
        elif _foreign(value):
            self.opaque.add(path)
        else:
            self._object(path, value, depth)

    def _object(self, path: str, value: object, depth: int) -> None:
        module = isinstance(value, nn.Module)
        for name, each in list(getattr(value, "__dict__", {}).items()):
            if module and name in (
                "_parameters",
                "_buffers",
                "training",
                "_forward_hooks",
                "_backward_hooks",
            ):
                continue
            self._add(f"{path}.{name}", each, _set_attribute(value, name), depth)
        for kind in type(value).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                member = kind.__dict__.get(name)
                if isinstance(member, types.MemberDescriptorType):
                    try:
                        self._add(f"{path}.{name}", member.__get__(value), _set_attribute(value, name), depth)
                    except AttributeError:
                        continue
        self._add(f"{path}.{type(value).__name__}", type(value), None, depth)

    def _class(self, path: str, kind: type, depth: int) -> None:
        for base in kind.__mro__:
            if _foreign_class(base):
                continue
            for name, held in list(base.__dict__.items()):
                each = held.__func__ if isinstance(held, (staticmethod, classmethod)) else held
                if isinstance(each, types.FunctionType) and name in _MAKING and not self._making_now:
                    self._making.append((f"{path}.{name}", each, None, depth))
                elif isinstance(each, types.FunctionType):
                    self._add(f"{path}.{name}", each, None, depth - 1)
                elif not name.startswith("__") and not isinstance(
                    each, (property, types.MemberDescriptorType)
                ):
                    self._add(f"{path}.{name}", each, functools.partial(setattr, base, name), depth)

    def _function(self, path: str, function: types.FunctionType, depth: int) -> None:
        if (function.__module__ or "").partition(".")[0] in _FOREIGN | {"torch"} | sys.stdlib_module_names - {
            "__main__"
        }:
            return
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            try:
                self._add(f"{path}:{name}", cell.cell_contents, _set_cell(cell), depth)
            except ValueError:  # an empty cell
                continue
        for n, each in enumerate(function.__defaults__ or ()):
            self._add(f"{path}(default {n})", each, None, depth)
        for name, each in (function.__kwdefaults__ or {}).items():
            self._add(f"{path}({name})", each, None, depth)
        for code in _codes(function.__code__):
            if not self._making_now:
                self.names.update(code.co_names)
            done = [(i.opname, i.argval) for i in dis.get_instructions(code)]
            stored = {name for what, name in done if what == "STORE_GLOBAL"}
            # `co_names` has attributes too, and those of the same name as a global of the script's are none of ours.
            named = {name for what, name in done if what in _BY_NAME}
            for name in code.co_names:
                if name not in named or name not in function.__globals__:
                    continue
                each = function.__globals__[name]
                if name in stored or not isinstance(each, (*_SCALARS, types.ModuleType, type)):
                    self._add(
                        f"{function.__module__}:{name}", each, _set_item(function.__globals__, name), depth
                    )


_BY_NAME = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL")
"""What code does with a global."""


def _foreign_class(kind: type) -> bool:
    top = kind.__module__.partition(".")[0]
    return top in _FOREIGN or top == "torch" or (top in sys.stdlib_module_names and top != "__main__")


def fingerprint(value: object) -> str:
    """Of anything plain; of what is large, a sample."""
    digest = hashlib.blake2b(digest_size=12)
    _digest(value, digest.update, [512])
    return digest.hexdigest()


def _digest(value: Any, update: Callable[[bytes], None], budget: list[int]) -> None:
    budget[0] -= 1
    if budget[0] < 0:
        return
    if isinstance(value, torch.Tensor):
        if why_unstorable(value) is not None or value.layout != torch.strided or value.is_meta:
            update(type(value).__name__.encode())
            return
        flat = value.detach().reshape(-1)
        update(f"{value.dtype}{tuple(value.shape)}".encode())
        if flat.numel():
            flat = flat if flat.numel() <= 1024 else flat[_spread(flat.numel())]
            update(flat.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray):
        update(f"{value.dtype}{value.shape}".encode())
        if value.dtype != object and value.size:
            flat_array = value.reshape(-1)
            update(
                np.ascontiguousarray(
                    flat_array if value.size <= 1024 else flat_array[_spread(value.size)]
                ).tobytes()
            )
    elif isinstance(value, Mapping):
        update(f"{type(value).__name__}{len(value)}".encode())
        for key, each in value.items():
            if budget[0] < 0:
                return
            _digest(key, update, budget)
            _digest(each, update, budget)
    elif isinstance(value, (list, tuple, collections.deque)):
        update(f"{type(value).__name__}{len(value)}".encode())
        numbers = range(len(value)) if len(value) <= 256 else _spread(len(value))
        for n in numbers:
            _digest(value[n], update, budget)
    elif isinstance(value, (set, frozenset)):
        update(f"{type(value).__name__}{len(value)}".encode())
        if len(value) <= 1024:
            update(repr(sorted(map(repr, value))).encode())
    elif isinstance(value, (*_SCALARS, np.generic, bytearray)):
        update(f"{type(value).__name__} {value!r}".encode())
    else:
        update(type(value).__name__.encode())


def _spread(count: int) -> Any:
    """256 positions, the first and the last among them."""
    return np.linspace(0, count - 1, 256).astype(np.int64)


def _open_descriptor(value: int) -> bool:
    """Whether the process has a file open under this number."""
    try:
        return Path(f"/proc/self/fd/{value}").readlink().is_absolute()
    except OSError:
        return False


class Belongings:
    """What moves below one loader, against what it was when this was made."""

    def __init__(self, roots: Callable[[], Mapping[str, object]]) -> None:
        self._roots = roots
        walk = self.walk()
        self._opaque = walk.opaque
        self._baseline = {path: _mark(slot.value) for path, slot in walk.slots.items()}
        self._kinds = {path: (type(slot.value), _size(slot.value)) for path, slot in walk.slots.items()}
        self._empty = {path: len(slot.value) for path, slot in walk.slots.items() if _is_empty(slot.value)}
        """Lists that held None only, and how many."""
        self._filled: dict[str, dict[int, str]] = {}
        """What was seen in them, by position; a cache does not change it."""
        self._seen: dict[str, set[int]] = {}
        self._room = 0

    def walk(self) -> Walk:
        """What is reachable now."""
        return Walk(self._roots())

    def capture(self) -> dict[str, Any]:
        """Path -> what it holds, as plain data of its own; only generators, and what changed."""
        held: dict[str, Any] = {}
        self._room = TOTAL_BYTES
        walk = self.walk()
        # What opened something since, a file or an environment, opens it again: it must not believe that it has.
        opened = {_owner(path) for path in walk.opaque - self._opaque}
        opened |= {
            _owner(path) for path, slot in walk.slots.items() if self._may_be_descriptor(path, slot.value)
        }
        for path, slot in walk.slots.items():
            value = slot.value
            lazy = self._baseline.get(path, _NOTHING)[0] == "NoneType"
            if is_generator(value) or isinstance(value, np.random.RandomState):
                unsure = lazy and _owner(path) in opened
                held[path] = {"unsure": True} if unsure else _generator_state(value)
            elif not _OF_THE_PROCESS.search(path) and _mark(value) != self._baseline.get(path):
                if self._may_be_descriptor(path, value):
                    held[path] = {"unsure": True}
                elif _owner(path) in opened and (lazy or isinstance(value, (bool, str))):
                    continue
                elif (entry := self._entry(path, value)) is not None:
                    held[path] = entry
        return held

    def apply(self, held: Mapping[str, Any]) -> list[str]:
        """Put `capture` back; returns the paths where that was not possible."""
        slots = self.walk().slots
        misfits = []
        for path, entry in held.items():
            slot = slots.get(path)
            try:
                if slot is None:
                    # Made when the first sample is drawn: it has no place yet.
                    owner_path, _, name = path.rpartition(".")
                    if not self._make(owner_path, name, entry):
                        misfits.append(path)
                elif not _apply(slot, entry):
                    misfits.append(path)
            except Exception:  # noqa: BLE001 - somebody's setter; it is said
                misfits.append(path)
        return misfits

    def _make(self, owner_path: str, name: str, entry: Mapping[str, Any]) -> bool:
        """An attribute that does not exist yet, of an object that does."""
        owner = _follow(self._roots(), owner_path)
        if (
            entry.keys() & {"print", "unsure"}
            or not name.isidentifier()
            or owner is None
            or not hasattr(owner, "__dict__")
        ):
            return False
        object.__setattr__(owner, name, _revived(entry))
        return True

    def _may_be_descriptor(self, path: str, value: object) -> bool:
        """Whether a number that was none before may be a descriptor, or a process id: such are never put back."""
        if not isinstance(value, int) or isinstance(value, bool) or _mark(value) == self._baseline.get(path):
            return False
        if value == os.getpid():
            return True
        seen = self._seen.setdefault(path, set())
        if len(seen) < 3:
            seen.add(value)
        was = self._baseline.get(path, _NOTHING)
        lazily = was[0] == "NoneType" or (was[0] == "int" and int(was[1]) < 0)
        return lazily and len(seen) == 1 and value >= 0 and _open_descriptor(value)

    def _entry(self, path: str, value: Any) -> dict[str, Any] | None:
        try:
            if _roughly(value, [PLAIN_ELEMENTS]) <= min(VALUE_BYTES, self._room):
                tree = encode_value(value)
                self._room -= tree.total_bytes
                return {"value": decode_value(tree.to_bytes())}
        except Exception:
            log.debug("%s cannot be stored", path, exc_info=True)
        kind, size = self._kinds.get(path, (type(value), 0))
        if isinstance(value, dict) and kind is type(value) and len(value) >= size:
            return None  # a cache
        if path in self._empty and self._only_fills(path, value):
            return None
        return {"print": fingerprint(value)}

    def _only_fills(self, path: str, value: Any) -> bool:
        """Whether a list that held None only was given values since, but never another one in a value's place."""
        if type(value) is not list or len(value) != self._empty[path]:
            return False
        seen = self._filled.setdefault(path, {})
        numbers = range(len(value)) if len(value) <= 256 else _spread(len(value))
        now = {int(n): fingerprint(value[n]) for n in numbers if value[n] is not None}
        if any(now.get(n) != was for n, was in seen.items()):
            del self._empty[path]
            return False
        seen.update(now)
        return True


def _roughly(value: Any, budget: list[int]) -> int:
    """Bytes that a value takes, not exactly; more than anything when it has more elements than the budget."""
    budget[0] -= 1
    if budget[0] < 0:
        return sys.maxsize
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if isinstance(value, (str, bytes, bytearray)):
        return len(value)
    if isinstance(value, (dict, list, tuple, set, frozenset, collections.deque)) and len(value) > budget[0]:
        return sys.maxsize
    if isinstance(value, dict):
        return sum(8 + _roughly(each, budget) for pair in value.items() for each in pair)
    if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        return sum(8 + _roughly(each, budget) for each in value)
    return 8


_NOTHING = ("NoneType", "None")


def _owner(path: str) -> str:
    return path.rpartition(".")[0]


def _generator_state(value: Any) -> dict[str, Any]:
    if isinstance(value, np.random.RandomState):
        return {"state": value.get_state(legacy=False)}
    return {"own": capture_own(value)}


def _is_empty(value: object) -> bool:
    return type(value) is list and bool(value) and all(each is None for each in value)


def _size(value: object) -> int:
    return len(value) if isinstance(value, dict) else 0


def _mark(value: object) -> tuple[str, str]:
    if isinstance(value, _SCALARS):
        return type(value).__name__, repr(value)
    if is_generator(value) or isinstance(value, np.random.RandomState):
        return "generator", ""
    return type(value).__name__, fingerprint(value)


def _own(value: Any) -> Any:
    """A copy that nobody else holds."""
    return decode_value(encode_value(value).to_bytes())


def _revived(entry: Mapping[str, Any]) -> Any:
    """A value of its own; a generator is made anew, in the captured state."""
    if "value" in entry:
        return _own(entry["value"])
    if "state" in entry:
        legacy = np.random.RandomState()
        legacy.set_state(entry["state"])
        return legacy
    held = entry["own"]
    generator: Any
    if held["kind"] == "torch":
        generator = torch.Generator(held["device"])
    elif held["kind"] == "numpy":
        generator = np.random.Generator(getattr(np.random, held["state"]["bit_generator"])())
    else:
        generator = random.Random()  # noqa: S311 - the user's own kind
    apply_own(generator, held)
    return generator


def _apply(slot: Slot, entry: Mapping[str, Any]) -> bool:
    target = slot.value
    if "unsure" in entry:
        return False
    if "own" in entry and is_generator(target):
        apply_own(target, entry["own"])
        return True
    if "state" in entry and isinstance(target, np.random.RandomState):
        target.set_state(entry["state"])
        return True
    if "print" in entry:
        return bool(fingerprint(target) == entry["print"])
    value = _revived(entry)
    if _in_place(target, value):
        return True
    if slot.put is None:
        return fingerprint(target) == fingerprint(value)
    slot.put(value)
    return True


def _in_place(target: Any, value: Any) -> bool:
    """Into the object that is there, which others may hold, too; False when it has to be replaced."""
    if type(target) is not type(value):
        return False
    if isinstance(target, torch.Tensor):
        if (
            target.shape != value.shape
            or target.dtype != value.dtype
            or not target.is_leaf
            or target.requires_grad
        ):
            return False
        target.copy_(value)
    elif isinstance(target, np.ndarray):
        if target.shape != value.shape or target.dtype != value.dtype or not target.flags.writeable:
            return False
        target[...] = value
    elif isinstance(target, (dict, set)):
        target.clear()
        target.update(value)
    elif isinstance(target, (list, bytearray)):
        target[:] = value
    elif isinstance(target, collections.deque):
        target.clear()
        target.extend(value)
    else:
        return False
    return True


def _follow(roots: Mapping[str, object], path: str) -> object | None:
    """The object at an attribute path below a root; None when there is none."""
    for root, value in roots.items():
        if path == root:
            return value
        if path.startswith(f"{root}."):
            found: object | None = value
            for name in path[len(root) + 1 :].split("."):
                found = inspect.getattr_static(found, name, None) if name.isidentifier() else None
                if found is None:
                    return None
            return found
    return None


def draws(walk: Walk) -> bool:
    """Whether the functions name something that draws random numbers, or hold a generator."""
    return walk.generators > 0 or bool(walk.names & _DRAWING)
