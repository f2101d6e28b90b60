"""An index that differs from its frames: reads are exact or refused by name, in bounded memory."""

import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from deltashard_checkpoint.errors import DeltashardError, FormatError, InvalidCheckpoint
from deltashard_checkpoint.format.frame import FrameInfo, FrameKind
from deltashard_checkpoint.format.index import Index, encode_index, parse_index
from deltashard_checkpoint.restore.checkpoint_reader import (
    load_indexes,
    plan_restore,
    target_of,
    whole_tables,
)
from deltashard_checkpoint.restore.fetcher import Fetcher
from deltashard_checkpoint.restore.frame_applier import FrameApplier
from deltashard_checkpoint.restore.plan import Plan
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.checkpoint.sample import RUN, SampleModel, SampleRun, schema, whole

LIMIT_BYTES = 32 << 20
"""The sample's stored bytes are 300 KB, its requests 8 MiB at most."""
NUMBERS = (
    "length", "step", "row_min", "row_max", "rows", "col_start", "col_stop", "blob_offset", "blob_bytes",
)  # fmt: skip


class AlteredRun:
    """A baseline and a delta of one table, with a blob; and what a restore reads."""

    def __init__(self, directory: Path) -> None:
        self.run = SampleRun(directory)
        self.model = model = SampleModel(schema(rows=1000))
        boxes = [whole(model.table)]
        frames = model.frames(range(1000), per_frame=100, encoding="q4")
        first = self.run.save([model.table], [(boxes, frames)], step=1)
        frames = model.frames(model.train(), step=2, per_frame=50)
        self.run.save(
            [model.table], [(boxes, frames)], step=2, covers=first, blobs={"rng": bytes(range(256)) * 20}
        )
        self.state = self.run.log.refresh()
        parts = [part for entry in self.state.checkpoints.values() for part in entry.parts]
        self.indexes = load_indexes(self.run.store, RUN, parts)
        self.whole = self.restored(self.indexes)

    def restored(self, indexes: dict[str, Index]) -> dict[str, bytes]:
        """Return all that a restore of the newest checkpoint reads, by name."""
        wants = whole_tables([self.model.table])
        plan = plan_restore(self.run.store, self.state, self.state.newest().seq, wants, indexes=indexes)
        target = target_of(self.model.table, wants[0].boxes[0], fields=True)
        applier = FrameApplier([target])
        for fetched in Fetcher(self.run.store, RUN).fetch(plan):
            applier.apply(fetched.data, fetched.tail)
        applier.finish(blobs=plan.blobs)
        found = {name: values.tobytes() for name, values in target.fields.items()}
        found |= {name: bytes(blob) for name, blob in applier.blobs.items()}
        return found | {"": target.weights.tobytes()}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> AlteredRun:
    return AlteredRun(tmp_path_factory.mktemp("run"))


@settings(max_examples=150)
@given(data=st.data())
def test_an_altered_index_is_refused_or_reads_the_same(written: AlteredRun, data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(sorted(written.indexes)))
    index = written.indexes[key]
    at = data.draw(st.integers(0, len(index.places) - 1))
    name = data.draw(st.sampled_from(NUMBERS))
    now: int = getattr(index.places[at].info, name)
    value = data.draw(st.sampled_from([0, 1, 64, now - 1, now + 1, now + 64, 2 * now, 1 << 23, 1 << 40]))
    places = list(index.places)
    places[at] = replace(places[at], info=replace(places[at].info, **{name: max(value, 0)}))
    tracemalloc.start()
    try:
        altered = parse_index(encode_index(replace(index, places=tuple(places))))
        found = written.restored({**written.indexes, key: altered})
    except (DeltashardError, ValueError):  # ValueError: the value is not valid in an index
        pass
    else:
        assert found == written.whole
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < LIMIT_BYTES


@pytest.mark.parametrize("name", ["step", "blob_bytes", "col_start", "rows"])
def test_frame_not_matching_its_index_is_invalid(written: AlteredRun, name: str) -> None:
    """The hash is right and the index was made to match. A read and `verify` agree."""
    wants = whole_tables([written.model.table])
    plan = plan_restore(written.run.store, written.state, written.state.newest().seq, wants)
    kind = FrameKind.BLOB if name == "blob_bytes" else FrameKind.ROWS

    def altered(info: FrameInfo) -> FrameInfo:
        return replace(info, **{name: getattr(info, name) + 1}) if info.kind is kind else info

    requests = tuple(
        replace(each, frames=tuple(replace(one, info=altered(one.info)) for one in each.frames))
        for each in plan.requests
    )
    wrong: Plan = replace(plan, requests=requests)
    with pytest.raises(InvalidCheckpoint, match="is where the index has"):
        list(Fetcher(written.run.store, RUN).fetch(wrong))


def test_row_counts_larger_than_their_bytes_are_refused(written: AlteredRun) -> None:
    index = next(iter(written.indexes.values()))
    table = replace(index.tables[0], rows=1 << 40)
    place = index.places[0]
    info = replace(place.info, rows=1 << 22, row_min=0, row_max=1 << 30)
    with pytest.raises(FormatError, match="4194304 rows"):
        parse_index(encode_index(replace(index, tables=(table,), places=(replace(place, info=info),))))
