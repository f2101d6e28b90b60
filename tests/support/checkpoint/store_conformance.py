"""The requirements of every store, as a test class: a back-end's test inherits it, with a fixture `store` of an empty store."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from deltashard_checkpoint.errors import CorruptObject
from deltashard_checkpoint.stores.abc import ObjectExists, ObjectNotFound, Store, StoreUnavailable
from deltashard_checkpoint.stores.key_rule import BadKey
from deltashard_checkpoint.stores.probe import probe


def get_range(store: Store, key: str, offset: int, length: int) -> bytes:
    out = bytearray(length)
    store.get_into(key, offset, memoryview(out))
    return bytes(out)


class StoreTests:
    """Inherit this class and define a fixture `store`: an empty store."""

    big_bytes = 24 * 1024 * 1024 + 13
    racers = 8
    raced_keys = 50
    listed_keys = 1100
    """More than one page of an S3 listing."""

    def test_get_returns_last_put(self, store: Store) -> None:
        for data in (b"", bytes(range(256)) * 5, b"\0", bytearray(b"array"), memoryview(b"a view")[2:]):
            store.put("some/key", data)
            assert store.get("some/key") == data
            assert store.head("some/key").size_bytes == len(data)

    def test_missing_key_is_not_found(self, store: Store) -> None:
        store.put("there/is", b"one")
        for key in ("missing", "there", "there/is/no", "there/isn't"):
            for read in (store.get, store.head, lambda key: get_range(store, key, 0, 1)):
                with pytest.raises(ObjectNotFound):
                    read(key)

    def test_ranges_are_read_and_a_range_beyond_the_end_is_corrupt(self, store: Store) -> None:
        """The cases include a read into the middle of a buffer. A range beyond the end is never padded."""
        data = random.Random(1).randbytes(10_000)
        store.put("ranged", data)
        for offset, length in [(0, 10_000), (0, 1), (9_999, 1), (17, 4_096), (10_000, 0), (0, 0)]:
            assert get_range(store, "ranged", offset, length) == data[offset : offset + length]
        out = bytearray(20)
        store.get_into("ranged", 100, memoryview(out)[5:15])
        assert out == bytes(5) + data[100:110] + bytes(5)
        for offset, length in [(0, 10_001), (9_999, 2), (10_000, 1), (50_000, 10)]:
            with pytest.raises(CorruptObject):
                get_range(store, "ranged", offset, length)

    def test_large_object_round_trips(self, store: Store) -> None:
        """The object is as large as a pack, written from a view and read back into a buffer, whole and in part."""
        data = random.Random(2).randbytes(self.big_bytes)
        store.put("big.pack", memoryview(data))
        out = bytearray(len(data))
        store.get_into("big.pack", 0, memoryview(out))
        assert out == data
        middle = len(data) // 2
        assert get_range(store, "big.pack", middle, 100_000) == data[middle : middle + 100_000]

    def test_put_if_absent_rejects_existing_key(self, store: Store) -> None:
        store.put_if_absent("log/0", b"first")
        store.put("plain", b"x")
        for key, data in (("log/0", b"second"), ("log/0", b"first"), ("plain", b"y")):
            with pytest.raises(ObjectExists):
                store.put_if_absent(key, data)
        assert store.get("log/0") == b"first"
        store.delete(["log/0"])
        store.put_if_absent("log/0", b"third")
        assert store.get("log/0") == b"third"

    def test_one_racing_creator_wins(self, store: Store) -> None:
        """Many threads race: each key has one winner, and the content is the winner's."""
        barrier = threading.Barrier(self.racers)

        def content(racer: int, number: int) -> bytes:
            return f"{racer} won {number}".encode() * 50

        def race(racer: int) -> list[bool | None]:
            won: list[bool | None] = []
            try:
                for number in range(self.raced_keys):
                    barrier.wait(60)
                    try:
                        store.put_if_absent(f"race/{number:03d}", content(racer, number))
                        won.append(True)
                    except ObjectExists:
                        won.append(False)
                    except StoreUnavailable:  # the answer was lost: only the content shows the result
                        won.append(None)
            except BaseException:
                barrier.abort()
                raise
            return won

        with ThreadPoolExecutor(self.racers) as pool:
            racing = [pool.submit(race, racer) for racer in range(self.racers)]
        failures = [error for each in racing if (error := each.exception()) is not None]
        if failures:  # the first cause, not its consequences
            raise next((e for e in failures if not isinstance(e, threading.BrokenBarrierError)), failures[0])
        results = [each.result() for each in racing]
        for number in range(self.raced_keys):
            found = store.get(f"race/{number:03d}")
            claims = [racer for racer in range(self.racers) if results[racer][number] is True]
            unsure = [racer for racer in range(self.racers) if results[racer][number] is None]
            winners = claims or [racer for racer in unsure if found == content(racer, number)]
            assert len(winners) == 1, f"key {number} has winners {winners}"
            assert found == content(winners[0], number)

    def test_list_is_in_key_order(self, store: Store) -> None:
        keys = ["a-b", "a.b", "a/b/c", "a/b-c", "a/b.c", "ab", "a0", "B", "z/1/2", "z/10", "z-"]
        for key in keys:
            store.put(key, key.encode())
        listed = list(store.list(""))
        assert [found.key for found in listed] == sorted(keys)
        assert [found.size_bytes for found in listed] == [len(key) for key in sorted(keys)]
        for start_after in [*keys, "a", "a/", "a/b", "a/b/", "zz", "A"]:
            expected = [key for key in sorted(keys) if key > start_after]
            assert [found.key for found in store.list("", start_after=start_after)] == expected, start_after

    def test_list_returns_only_keys_with_the_prefix(self, store: Store) -> None:
        keys = ["log/1", "log/2", "log/20", "log/3", "logs/1", "data/1/x", "data/10/x", "data/2/x"]
        for key in keys:
            store.put(key, b"")
        for prefix in ["", "log", "log/", "log/2", "data/1", "data/1/", "nothing", "data/1/x", "data/1/x/"]:
            expected = sorted(key for key in keys if key.startswith(prefix))
            assert [found.key for found in store.list(prefix)] == expected, prefix
        assert [found.key for found in store.list("log/", start_after="log/2")] == ["log/20", "log/3"]
        every = ["log/1", "log/2", "log/20", "log/3"]
        assert [found.key for found in store.list("log/", start_after="data/1")] == every
        assert [found.key for found in store.list("data/", start_after="log/1")] == []

    def test_list_spans_pages(self, store: Store) -> None:
        """Every key is listed once and in order when one page cannot hold all; a put is listed at once."""
        keys = [f"many/{number:05d}" for number in range(self.listed_keys)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda key: store.put(key, b"x"), keys))
        assert [found.key for found in store.list("many/")] == keys
        assert [found.key for found in store.list("many/", start_after=keys[-3])] == keys[-2:]
        store.delete(keys)
        assert list(store.list("many/")) == []

    def test_delete_is_idempotent(self, store: Store) -> None:
        store.put("keep/a", b"1")
        store.put("drop/a", b"2")
        store.put("drop/b", b"3")
        store.delete(["drop/a", "never/was", "drop/b"])
        store.delete(["drop/a", "keep"])
        store.delete([])
        assert [found.key for found in store.list("")] == ["keep/a"]
        store.put("drop/a", b"again")
        assert store.get("drop/a") == b"again"

    def test_store_clock_matches_last_modified(self, store: Store) -> None:
        """Last-Modified is between a reading of the store's clock before the put and one after the put."""
        before_s = store.now_s()
        store.put("dated", b"x")
        after_s = store.now_s()
        for modified_at_s in (store.head("dated").modified_at_s, next(store.list("dated")).modified_at_s):
            assert before_s - 1.0 <= modified_at_s <= after_s + 1.0  # S3's clock ticks in whole seconds
        assert abs(store.now_s() - time.time()) < 60.0

    @pytest.mark.parametrize(
        "key",
        [
            *("", "/", "/absolute", "a//b", "a/", "../up", "a/../../up", "a/./b", "..", "."),
            *("a\\b", "a\nb", "é", "a\0b", "x" * 900, "a/" + "x" * 256, "a/.tmp-b"),
        ],
    )
    def test_unsafe_keys_are_rejected(self, store: Store, key: str) -> None:
        for call in (lambda: store.put(key, b"x"), lambda: store.get(key), lambda: store.delete([key])):
            with pytest.raises(BadKey):
                call()
        assert list(store.list("")) == []

    def test_probe_passes_and_leaves_no_object(self, store: Store) -> None:
        """The probe of a log's first append verifies create-only, and leaves no object."""
        probe(store, "probe/token")
        assert list(store.list("")) == []
