"""A second reader of checkpoint stores, owed to docs/format.md alone: `read_run`, `restore`.

Its authors saw the page and the golden runs, and no line of the package. It
verifies every hash and keeps the law of which entries count; bounds of single fields, which the package checks too, it
leaves out.
"""

import hashlib
import io
import json
import logging
import math
import re
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path

import numpy as np
import xxhash

KINDS = ("genesis", "attempt", "checkpoint", "compact", "retire", "reclaim", "repair", "pin", "rewind")
INDEX = "format run attempt cut step rank token tables* packs* frames* boxes* covers raw_bytes kind"
FRAME = "kind pack offset length hash step table row_min row_max rows col_start col_stop encoding name "
FRAME += "blob_offset blob_bytes since again tail"
DTYPES = "float32 float16 bfloat16 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool complex64 "
DTYPES += "complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz"
DTYPES = ["", *DTYPES.split()]  # the first four are also what raw encodings of these numbers hold
STORAGE = {d: "u2" if d == "bfloat16" else "u1" if "float8" in d else d for d in DTYPES[1:]}
BITS = {5: 8, 6: 4, 7: 3, 8: 2}  # of a code, by number of the encoding
CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode
LISTS = {b"l": list, b"t": tuple, b"S": set, b"Z": frozenset}
DICTS = {b"d": dict, b"O": OrderedDict, b"C": Counter}
FACTORIES = (int, float, complex, bool, str, bytes, list, tuple, dict, set, frozenset)
FACTORIES = {"": None} | {f.__name__: f for f in FACTORIES}


class Refused(Exception):
    """Whatever this reader refuses."""


def need(condition, what):
    """Refuse, and say what, unless the condition holds."""
    if not condition:
        raise Refused(what)


def parse_document(data):
    """A canonical JSON object that has the hash that it says."""
    try:
        document = json.loads(data)
        need(type(document) is dict and CANONICAL(document).encode() == data, "no canonical JSON object")
    except ValueError as error:
        raise Refused(f"no JSON: {error}") from None
    body = CANONICAL({name: value for name, value in document.items() if name != "hash"})
    need(document.get("hash") == hashlib.sha256(body.encode()).hexdigest(), "a document without its hash")
    return document


def covers(e):
    """The checkpoints that the parts of one cover."""
    return {*(e["covers"] if "manifest" in e else (part["covers"] for part in e["parts"]))} - {None}


def ranks(e):
    """How many parts a checkpoint has."""
    return e["world_size"] if "manifest" in e else len(e["parts"])


def read_layout(root, digest, size):
    """Boxes of each rank, as a part has them; together they tile all tables."""
    data = (root / "layout" / digest).read_bytes()
    need(xxhash.xxh3_128_hexdigest(data) == digest, "a layout without the hash in its name")
    at = io.BytesIO(data)
    magic, version, world_size, number, zero, n = unpack(at, "8sIIIIQ")
    need(
        (magic, version, world_size, zero) == (b"DSLAYOUT", 1, size, 0), "no layout of version 1 for so many"
    )
    tables = []
    for _ in range(number):
        rows, columns, length = unpack(at, "QII")
        tables.append((at.read(length).decode(), np.zeros((rows, columns), int)))
    section(at, 0, 8)
    columns = [array(at, dtype, n, multiple=8).tolist() for dtype in ("u4", "u4", "u8", "u8", "u4", "u4")]
    boxes = list(zip(*columns, strict=True))
    need(boxes == sorted(boxes) and not at.read(), "boxes that are not in order, or more")
    found = [[] for _ in range(world_size)]
    for rank, table, r0, r1, c0, c1 in boxes:
        found[rank].append([tables[table][0], r0, r1, c0, c1])
        tables[table][1][r0:r1, c0:c1] += 1
    need(all((cells == 1).all() for _, cells in tables), "boxes that do not tile a table")
    return found


class Run:
    """The state of a run up to slot `tip`; `stopped` says why the log ends earlier, if it does."""

    def __init__(self, path, fold):
        self.root, self.name, self.stopped = Path(path), Path(path).name, None
        self.began_at = self.tip = fold.get("tip", -1)
        self.tip_hash, self.owner, self.attempt = (fold.get(k, "") for k in ("tip_hash", "owner", "attempt"))
        self.attempts = {a[0]: (a[1], a[4], a[6], a[9] or None) for a in fold.get("attempts", [])}
        self.resumes = {a[0]: a[2:4] for a in fold.get("attempts", [])}
        self.aside, self.words = set(fold.get("aside", [])), {n: w for n, *w in fold.get("pins", [])}
        self.checkpoints = {e["seq"]: e for e in fold.get("checkpoints", [])}
        self.compacted = {e["replaces"]: e for e in fold.get("compactions", [])}

    def parts(self, c):
        """The parts that a live checkpoint is read from: its compaction's, its own, or those that a manifest lists."""
        e = self.checkpoints[c]
        if c in self.compacted or "parts" in e:
            return self.compacted.get(c, e)["parts"]
        prefix = f"data/{e['attempt']:020d}/{e['cut']:08d}/"
        data = (self.root / f"{prefix}{e['manifest']}.manifest").read_bytes()
        need(
            hashlib.sha256(data).hexdigest()[:32] == e["manifest"], "a manifest without the hash in its name"
        )
        listed = json.loads(data)
        said = [listed[k] for k in ("kind", "format", "run", "attempt", "cut", "step", "layout")]
        law = [
            "rows",
            1,
            self.name,
            *(e[k] for k in ("attempt", "cut", "step", "layout")),
        ]
        need(CANONICAL(listed).encode() == data and said == law, "a manifest that is not its entry's")
        covered = {part[2] for part in listed["parts"]}
        need(covered == set(e["covers"]) and len(listed["parts"]) == e["world_size"], "a manifest of others")
        boxes = read_layout(self.root, e["layout"], e["world_size"])
        keys = ("rank", "index_key", "boxes", "covers")
        names = [f"{prefix}{rank:05d}-{part[0]}-{part[1]}.index" for rank, part in enumerate(listed["parts"])]
        ranks = zip(range(len(names)), names, boxes, (part[2] for part in listed["parts"]), strict=True)
        return [dict(zip(keys, values, strict=True)) for values in ranks]

    def take(self, e):
        """Let an entry change the state, unless the law refuses it."""
        kind, seq, live = e.get("kind"), e.get("seq"), self.checkpoints
        known = e.get("format") == 1 and (kind in KINDS or e.get("ignorable") is True)
        need(known and (kind == "genesis") == (seq == 0), f"slot {seq} is newer, or genesis: {kind}")
        voids = kind == "attempt" and e["voids"] is not None
        need(voids or e.get("previous") == self.tip_hash, f"slot {seq} does not follow the one before")
        if kind == "genesis":
            need(e["run"] == self.name, "genesis of another run")
            self.owner = e["owner"]
        elif kind == "attempt":
            need(e["owner"] == self.owner or e["takeover"], f"attempt {seq} is of another owner")
            need(e["resumes_from"] in {None, *live}, f"attempt {seq} resumes from what is not live")
            step = 0 if e["resumes_from"] is None else live[e["resumes_from"]]["step"]
            opened = e["world_size"], None, step, e.get("layout")
            self.owner, self.attempt, self.attempts[seq] = e["owner"], seq, opened
            self.resumes[seq] = (e["resumes_from"], live.get(e["resumes_from"], {}).get("attempt"))
        elif kind == "rewind":
            need(e["to"] in live, f"slot {seq} rewinds to what is not live")
            to, line, bound, at = live[e["to"]], set(), e["to"], live[e["to"]]["attempt"]
            self.attempt, self.attempts[seq] = seq, (0, None, to["step"], None)
            self.resumes[seq] = (e["to"], at)
            while at is not None:
                line |= {c for c in live if live[c]["attempt"] == at and c <= bound}
                bound, at = self.resumes[at]
            self.aside = {c for c in live if c > e["to"]} | (self.aside - line)
        elif kind == "pin":
            need(e["checkpoint"] in {None, *live}, f"slot {seq} pins what is not live")
            self.words[e["name"]] = [seq, e["checkpoint"]]
        elif kind == "checkpoint":
            need(e["attempt"] == self.attempt, f"checkpoint {seq}: its attempt is fenced")
            size, cut, step, layout = self.attempts[self.attempt]
            newer = (cut is None or e["cut"] > cut) and e["step"] >= (step or 0)
            fits = (ranks(e), e.get("layout")) == (size, layout) and covers(e) <= live.keys()
            fits = fits and all(live[c].get("layout") == layout for c in covers(e))
            need(newer and fits, f"checkpoint {seq} is no next")
            self.checkpoints[seq], self.attempts[self.attempt] = e, (size, e["cut"], e["step"], layout)
        elif kind == "compact":
            need(e["replaces"] in live, f"slot {seq} compacts what is not live")
            need("parts" in live[e["replaces"]], f"slot {seq} compacts what many ranks wrote")
            self.compacted[e["replaces"]] = e
        elif kind == "retire":
            gone, stays = set(e["checkpoints"]), live.keys() - set(e["checkpoints"])
            needed = {d for c in stays - self.compacted.keys() for d in covers(live[c])}
            fine = gone <= live.keys() and needed <= stays and (stays or not live)
            need(fine, f"slot {seq} retires too much")
            self.aside -= gone
            self.words = {n: [at, None if c in gone else c] for n, (at, c) in self.words.items()}
            self.checkpoints = {c: e for c, e in live.items() if c in stays}
            self.compacted = {c: e for c, e in self.compacted.items() if c in stays}

    def newest(self):
        """The checkpoint that a restore takes, and who has which pinned name."""
        live, pins = self.checkpoints, {}
        for c in sorted(live):
            pins |= {n: c for n in live[c]["pins"] if c > self.words.get(n, [-1])[0]}
        said = {n: c for n, (_, c) in self.words.items() if c is not None}
        return max(live.keys() - self.aside), said | pins

    def fold(self, tip):
        """Fold the slots behind the state's; gives the folded states that they name, and what is void."""
        entries, void, named = [], [], set()
        for seq in range(self.tip + 1, tip + 1):
            data = (self.root / f"log/{seq:020d}.json").read_bytes()
            try:
                entry = parse_document(data)
                need(entry.get("seq") == seq, f"slot {seq} has another seq")
                if entry.get("kind") == "attempt" and entry["voids"] is not None:
                    void = [r for r in void if r.stop < entry["voids"]] + [range(entry["voids"], seq)]
            except Refused as error:
                entry = {"hash": hashlib.sha256(data).hexdigest(), "error": error}
            entries.append((seq, entry))
        for seq, entry in entries:
            if not self.stopped and not any(seq in r for r in void):
                try:
                    need(not isinstance(entry.get("error"), Refused), entry.get("error"))
                    self.take(entry)
                    named.update(re.findall(r"-fold-(\d+)-([0-9a-f]{32})$", str(entry.get("writer"))))
                except Refused as error:
                    self.stopped = error
            self.tip, self.tip_hash = seq, entry["hash"]
        return {(int(slot), digest) for slot, digest in named}, void


def hinted(data):
    """The slot that HINT says is taken; 0 if it is none."""
    try:
        said = json.loads(data)
        digest = hashlib.sha256(
            CANONICAL({k: said[k] for k in ("fold", "seq", "whole")}).encode()
        ).hexdigest()
        need(CANONICAL({**said, "hash": digest[:32]}).encode() == data, "no HINT")
        return said["seq"]
    except (ValueError, KeyError, TypeError, Refused):
        return 0


def read_run(path):
    """Judge the log of a run: from the newest folded state that holds, or else from genesis."""
    log = {p.name: p for p in Path(path, "log").iterdir()}
    slots = {int(name[:20]) for name in log if re.fullmatch(r"\d{20}\.json", name)}
    tip = max(slots, default=-1)
    need(
        slots and tip >= hinted(log["HINT"].read_bytes() if "HINT" in log else b""),
        "the log has lost its end",
    )
    for name in sorted((name for name in log if name.startswith("fold-")), reverse=True):
        slot, digest, data = int(name[5:25]), name[26:58], log[name].read_bytes()
        try:
            need(slot < tip and slots.issuperset(range(slot + 1, tip + 1)), "slots behind it are missing")
            fold = parse_document(data)
            law = [1, Path(path).name, slot]
            need(hashlib.sha256(data).hexdigest()[:32] == digest, "not the digest in its name")
            need([fold.get(k) for k in ("format", "run", "tip")] == law, "newer, or of another run or slot")
            for entry in fold["checkpoints"] + fold["compactions"]:
                parse_document(CANONICAL(entry).encode())
        except Refused:
            continue
        run = Run(path, fold)
        named, void = run.fold(tip)
        if (slot, digest) in named and all(r.start > slot for r in void):
            break
    else:
        need(len(slots) == tip + 1, "slots of the log are missing")
        run = Run(path, {})
        run.fold(tip)
    if run.stopped:
        logging.getLogger(__name__).error("newer checkpoints may be lost: %s", run.stopped)
    return run


def section(at, n, multiple=64):
    """The next n bytes, and zeros up to a multiple behind them."""
    data = at.read(n)
    need(len(data) == n and not any(at.read(-at.tell() % multiple)), "sections that are none")
    return data


def array(at, dtype, *shape, multiple=64):
    """The next section as an array."""
    return np.ndarray(shape, dtype, section(at, np.dtype(dtype).itemsize * math.prod(shape), multiple))


def unpack(at, layout):
    """The next values of these types."""
    return struct.unpack("<" + layout, at.read(struct.calcsize("<" + layout)))


def varint(at):
    """LEB128."""
    (byte,) = at.read(1)
    return byte if byte < 128 else byte - 128 + (varint(at) << 7)


def decode_message(data, names):
    """A protobuf message by its names of fields; unknown numbers are passed over."""
    names, at = names.split(), io.BytesIO(data)
    message = {name.strip("*"): [] if "*" in name else 0 for name in names}
    while at.tell() < len(data):
        number, wire = divmod(varint(at), 8)
        value = varint(at) if wire == 0 else at.read({1: 8, 5: 4}.get(wire) or varint(at))
        if number <= len(names):
            name = names[number - 1]
            message[name.strip("*")] = [*message[name[:-1]], value] if "*" in name else value
    return message


def read_index(run, c, part):
    """Frames of a part of a checkpoint, newest first; its index says what its name and the entry say."""
    key, entry, data = part["index_key"], run.checkpoints[c], (run.root / part["index_key"]).read_bytes()
    need(xxhash.xxh3_128_hexdigest(data) == key[-38:-6], f"{key}: not the hash in its name")
    index = decode_message(data, INDEX)
    says = [index[k] for k in ("kind", "format", "run", "attempt", "cut", "step", "rank", "covers")]
    law = [b"rows", 1, run.name.encode(), *(entry[k] for k in ("attempt", "cut", "step")), part["rank"]]
    need(says == [*law, part["covers"] or 0], f"{key}: says {says}, not {law}")
    tables = [decode_message(table, "fqn")["fqn"].decode() for table in index["tables"]]
    packs = [decode_message(pack, "key")["key"].decode() for pack in index["packs"]]
    frames = [decode_message(frame, FRAME) for frame in index["frames"]]
    for f in frames:
        f["pack"], f["table"] = packs[f["pack"]], None if f["kind"] == 2 else tables[f["table"]]
        if f["tail"]:
            f["tail"] = decode_message(f["tail"], "pack offset length hash")
            f["tail"]["pack"] = packs[f["tail"]["pack"]]
            need(re.search(r"[-/]s\d{5}\.pack$", f["tail"]["pack"]), "a tail among frames")
        need(not re.search(r"[-/]s\d{5}\.pack$", f["pack"]), "a frame among tails")
    return sorted(frames, key=lambda f: (-f["step"], f["kind"], not f["again"], f["pack"], f["offset"]))


def to_odd(t, error):
    """If `t` was rounded, by that error, and its last bit is 0: its neighbour towards the error."""
    move = np.isfinite(t) & (error != 0) & ~np.isnan(error) & (t.view(f"u{t.itemsize}") & 1 == 0)
    return np.where(move, np.nextafter(t, np.copysign(np.inf, error).astype(t.dtype)), t)


def convert(values, source, target):
    """Values of one float dtype in another, rounded once to nearest even."""
    if source == target:
        return values
    wide = ((values.astype("u4") << 16).view("f4") if source == "bfloat16" else values).astype("f8")
    if target != "bfloat16":
        return wide.astype(STORAGE[target])
    narrow = wide.astype("f4")
    bits = to_odd(narrow, wide - narrow).view("u4")
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(wide), bits >> 16 | 0x40, rounded).astype("u2")


def dequantize(at, bits, exponent, count, width):
    """float32 values of quantized rows."""
    scales, biases = (array(at, "f4" if bits == 8 else "f2", count, 1) for _ in "sb")
    packed = array(at, "u1", count, -(-width * bits // 8))
    codes = np.unpackbits(packed, axis=1, bitorder="little")[:, : width * bits].reshape(count, width, bits)
    codes = codes @ (1 << np.arange(bits))
    if bits == 8:
        p, b = codes * scales.astype("f8"), biases.astype("f8")
        t = p + b
        z = t - p
        return to_odd(t, (p - (t - z)) + (b - z)).astype("f4")
    s, b = (np.ldexp(x.astype("f4"), exponent) for x in (scales, biases))
    words = scales.view("u2").astype("u4")
    constant = biases.view("u2").astype("u4") << 16 | packed[:, :1].astype("u4") << 8 | words & 0xFF
    return np.where(words >> 8 == 0x7D, constant.view("f4"), codes.astype("f4") * s + b)


def open_frame(run, f):
    """The bytes of a frame or a tail, behind the header; and the header."""
    with (run.root / f["pack"]).open("rb") as file:
        file.seek(f["offset"])
        data = file.read(f["length"])
    digest = xxhash.xxh3_128_digest(data[:48] + data[64:])
    need(len(data) == f["length"] and data[48:64] == digest == f["hash"], "a frame without its hash")
    at = io.BytesIO(data)
    magic, version, *header = unpack(at, "4sHBBBbHIIIIIQQ16s")
    need((magic, version) == (b"DSFR", 1), "a newer frame")
    return at, header


def read_tail(run, f, count, table):
    """Optimizer state of the rows of a frame, by field; `table` is what both say of table, columns and rows."""
    at, (kind, _, _, _, _, _, _, _, rows, _, step, _, _) = open_frame(run, f["tail"])
    need((kind, rows, step) == (4, count, f["step"]), "a tail of another frame")
    said = (at.read(*unpack(at, "H")), *unpack(at, "QIBIIQQ"))
    need(said == table, "a tail of other rows")
    specs = [(at.read(*unpack(at, "B")).decode(), *unpack(at, "BBB")) for _ in range(*unpack(at, "B"))]
    section(at, 0)
    values = {}
    for name, pointwise, real, stored in specs:
        found = array(at, STORAGE[DTYPES[stored]], count, *[said[5] - said[4]] * pointwise)
        values[name] = convert(found, DTYPES[stored], DTYPES[real])
    need(not at.read(), "more in a tail than it says")
    return values


def read_frame(run, f):
    """A frame: a blob's chunk, or (rows, values by field, "": weights); tombstones have no values."""
    at, (kind, encoding, form, exponent, _, _, ids, extra, count, _, step, _, _) = open_frame(run, f)
    need(encoding <= 8 and form <= 2, "a newer frame")
    need((kind, step) == (f["kind"], f["step"]), "a frame that is not as its index says")
    name = at.read(*unpack(at, "H"))
    if kind == 2:
        _, _, size = unpack(at, "QQQ")
        section(at, 0)
        return section(at, size)
    table = (name, *unpack(at, "QIBIIQQ"))
    _, _, _, dtype, c0, c1, _, _ = table
    tail = f["tail"] or {"length": 0, "hash": bytes(16)}
    need(unpack(at, "I16s") == (tail["length"], tail["hash"]), "a frame of another tail")
    section(at, 0)
    if form == 2:
        rows = np.cumsum([varint(at) + (i > 0) for i in range(count)])
        section(at, 0)
    else:
        (first,), bitmap = unpack(at, "Q"), np.frombuffer(section(at, ids - 8), "u1")
        bits = np.unpackbits(bitmap, bitorder="little") if form else np.ones(count)
        rows = first + np.flatnonzero(bits)
    if kind == 3:
        return rows, None
    width, raw, dtype = c1 - c0, DTYPES[1 if encoding in BITS else encoding], DTYPES[dtype]
    if encoding in BITS:
        weights = dequantize(at, BITS[encoding], exponent, count, width)
    else:
        weights = array(at, STORAGE[raw], count, width)
    values = {"": convert(weights, raw, dtype).copy()}
    if extra:
        n, size = unpack(at, "II")
        where = np.frombuffer(section(at, 4 * n, 8), "u4")
        values[""][where] = convert(array(at, f"f{size}", n, width), f"float{8 * size}", dtype)
    need(not at.read(), "more in a frame than it says")
    return rows, values | (read_tail(run, f, count, table) if f["tail"] else {})


def find_frames(run, seq, table):
    """(frame, wanted cells) of all that restores a table of a checkpoint, newest first."""
    wanted = {seq: np.ones((table["rows"], table["columns"]), bool)}
    while wanted:
        c = max(wanted)
        left = wanted.pop(c)
        for part in run.parts(c):
            piece = np.zeros_like(left)
            for _, r0, r1, c0, c1 in (box for box in part["boxes"] if box[0] == table["fqn"]):
                piece[r0:r1, c0:c1] = left[r0:r1, c0:c1]
            left &= ~piece
            if piece.any() and part["covers"] is not None:
                wanted[part["covers"]] = wanted.get(part["covers"], np.False_) | piece
            for f in read_index(run, c, part) if piece.any() else []:
                cells = slice(f["row_min"], f["row_max"] + 1), slice(f["col_start"], f["col_stop"])
                if f["table"] == table["fqn"] and piece[cells].any():
                    yield piece, cells[1], *read_frame(run, f)
        need(not left.any(), f"checkpoint {c} is incomplete")


def round_once(values, dtype):
    """float64 values as another float type; into bfloat16 by a float32 whose last bit tells what was cut off."""
    if dtype != "bfloat16":
        return convert(values, "float64", dtype)
    near = values.astype("<f4")
    even = (near != values) & (near.view("<u4") % 2 == 0)
    toward = np.where(values > near, np.inf, -np.inf).astype("<f4")
    return convert(np.where(even, np.nextafter(near, toward), near), "float32", dtype)


def restore_table(run, seq, table):
    """Arrays of a table by field, "" for the weights: of each cell the newest frame counts."""
    shape, fields = (table["rows"], table["columns"]), [["", "pointwise", table["dtype"]], *table["fields"]]
    shapes, missing = {"pointwise": shape, "rowwise": shape[:1]}, np.ones(shape, bool)
    arrays = {name: np.zeros(shapes[kind], STORAGE[dtype]) for name, kind, dtype in fields}
    sums = {name: np.zeros(shape[0]) for name in arrays}  # of row-wise shares, before rounding
    differ = {name: np.zeros(shape[0], bool) for name in arrays}  # rows of which frames said different things
    for piece, columns, rows, values in find_frames(run, seq, table):
        fresh, had = piece[rows, columns] & missing[rows, columns], ~missing[rows].all(axis=1)
        share = fresh.sum(axis=1) / shape[1]
        for name, kind, dtype in fields if fresh.any() else []:
            out, cells = arrays[name], (rows, columns) if kind == "pointwise" else rows
            new = values[name] if values else np.zeros_like(out[cells])
            if kind == "rowwise":
                mixed, shared = np.where(had, out[rows], new), (share > 0) & (share < 1)
                differ[name][rows] |= shared & (
                    mixed.view(f"u{mixed.itemsize}") != new.view(f"u{new.itemsize}")
                )
                if dtype in DTYPES[1:5]:
                    sums[name][rows] += np.where(shared, share * convert(new, dtype, "float64"), 0)
                    mixed = np.where(differ[name][rows], round_once(sums[name][rows], dtype), mixed)
                else:
                    need(not dtype.startswith("float") or not differ[name].any(), f"{name} cannot be joined")
                new = np.where(share < 1, mixed, new)
            out[cells] = np.where(fresh if kind == "pointwise" else share > 0, new, out[cells])
        missing[rows, columns] &= ~fresh
    need(not missing.any(), f"{table['fqn']} of checkpoint {seq} has cells that no frame fills")
    return arrays


@np.errstate(all="ignore")
def restore(run, seq):
    """(arrays, blobs) of a live checkpoint; arrays by `{table}` and `{table}.{field}`."""
    arrays, blobs, chunks = {}, {}, defaultdict(list)
    frames, encodings = [f for part in run.parts(seq) for f in read_index(run, seq, part)], defaultdict(set)
    for f in (f for f in frames if f["kind"] == 1):
        encodings[f["table"]].add(f["encoding"].decode())
    said = run.compacted.get(seq, run.checkpoints[seq])["encodings"]
    need(said == {name: sorted(held) for name, held in encodings.items()}, f"encodings of {seq} are others")
    for f in (f for f in frames if f["kind"] == 2):
        chunks[f["name"].decode()].append((f["blob_offset"], read_frame(run, f), f["blob_bytes"]))
    for name, found in chunks.items():
        ends = [0, *(offset + len(chunk) for offset, chunk, _ in sorted(found))]
        starts = [offset for offset, *_ in sorted(found)]
        need(starts == ends[:-1] and {n for *_, n in found} == {ends[-1]}, f"blob {name} is incomplete")
        blobs[name] = b"".join(chunk for _, chunk, _ in sorted(found))
    for table in run.checkpoints[seq]["tables"]:
        for name, array in restore_table(run, seq, table).items():
            arrays[f"{table['fqn']}.{name}" if name else table["fqn"]] = array
    return arrays, blobs


def decode_node(at, leaves):
    """A node of a typed tree, and what it holds; a tensor is (dtype, array), an own type (name, value)."""
    tag = at.read(1)
    need(tag in b"NTFfcirsbygaxGltSZqdOCD", f"unknown tag {tag!r} of a tree")
    if tag in b"NTF":
        return {b"N": None, b"T": True, b"F": False}[tag]
    if tag in b"fc":
        return unpack(at, "d")[0] if tag == b"f" else complex(*unpack(at, "dd"))
    if tag in b"ir":
        texts = [at.read(varint(at)) for _ in range(3 if tag == b"r" else 1)]
        numbers = [int.from_bytes(text, "little", signed=True) for text in texts]
        return range(*numbers) if tag == b"r" else numbers[0]
    text = at.read(varint(at)) if tag in b"bysgaxGD" else b""
    if tag in b"by":
        return text if tag == b"b" else bytearray(text)
    name = text.decode("utf-8", "surrogatepass")
    if tag == b"s":
        return name
    if tag == b"g":
        return np.frombuffer(at.read(np.dtype(name).itemsize), name)[0]
    if tag in b"ax":
        shape = [varint(at) for _ in range(varint(at))]
        return array(leaves, name, *shape) if tag == b"a" else (name, array(leaves, STORAGE[name], *shape))
    if tag == b"G":
        return name, decode_node(at, leaves)
    limit = varint(at) - 1 if tag == b"q" else None
    nodes = [decode_node(at, leaves) for _ in range(varint(at) * (2 if tag in b"dOCD" else 1))]
    if tag == b"q":
        return deque(nodes, None if limit < 0 else limit)
    if tag in LISTS:
        return LISTS[tag](nodes)
    pairs = dict(zip(nodes[::2], nodes[1::2], strict=True))
    return defaultdict(FACTORIES[name], pairs) if tag == b"D" else DICTS[tag](pairs)


def decode_tree(data):
    """The value that a blob holds."""
    at, leaves = io.BytesIO(data), io.BytesIO(data)
    magic, version, size, total, _, _ = unpack(at, "6sHQQII")
    need((magic, version, total) == (b"DSTREE", 1, len(data)), "no typed tree of version 1")
    section(leaves, 32 + size)
    return decode_node(at, leaves)
