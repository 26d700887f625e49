"""Shared memory, with both sides in this process."""

from __future__ import annotations

import gc
import os
import threading

import numpy as np
import pytest

from edge.sources.wire import PICTURE, SLOTS, Gallery, Picture, Pool


def shared(picture_bytes: int = 48 * 64 * 3) -> tuple[Pool, Gallery]:
    pool = Pool(picture_bytes)
    return pool, Gallery(os.dup(pool.fd), pool.announce()[1:])


def picture(slot: int, width: int = 64, height: int = 48) -> Picture:
    return Picture(slot, width, height, 0, 1.5, 2, 0)


def test_what_is_said_of_a_picture_survives_the_journey() -> None:
    said = Picture(5, 7680, 4320, 2**40, 12345.678, 1_800_000_000_123_456, 0xFFFFFFFF)

    message = said.pack()

    assert message[:1] == PICTURE
    assert Picture.unpack(message[1:]) == said


def test_a_picture_is_seen_where_it_was_written_and_cannot_be_written_to() -> None:
    pool, gallery = shared()
    pool.view(2, 64, 48)[:] = np.arange(3, dtype=np.uint8) + 7

    image = gallery.show(picture(2))

    assert image.shape == (48, 64, 3)
    assert (image == [7, 8, 9]).all()
    with pytest.raises(ValueError, match="read-only"):
        image[0, 0] = 1
    pool.close()


def test_a_slot_is_free_again_when_the_picture_and_all_that_was_made_from_it_are_forgotten() -> None:
    pool, gallery = shared()
    for slot in range(SLOTS):
        assert pool.free() == slot
        pool.take(slot)
    assert pool.free() is None

    image = gallery.show(picture(3))
    corner, raw = image[:4, :4][1:], memoryview(image)
    del image
    gc.collect()
    assert pool.free() is None
    del corner
    gc.collect()
    assert pool.free() is None
    raw.release()
    del raw
    gc.collect()
    assert pool.free() == 3
    pool.close()


def test_a_slot_may_be_given_back_by_any_thread_and_after_the_process_has_gone() -> None:
    pool, gallery = shared()
    pool.take(0)
    image = gallery.show(picture(0))
    fd = os.dup(pool.fd)
    pool.close()
    del pool, gallery  # the process, and the daemon's hold on it
    gc.collect()
    kept = [image]
    del image

    thread = threading.Thread(target=kept.clear)
    thread.start()
    thread.join()

    assert os.pread(fd, 1, 0) == b"\0"
    os.close(fd)


def test_a_picture_that_nobody_looks_at_is_given_back() -> None:
    pool, gallery = shared()
    pool.take(0)

    gallery.give_back(picture(0))

    assert pool.free() == 0
    pool.close()


def test_what_was_grabbed_is_counted_in_shared_memory() -> None:
    pool, gallery = shared()
    assert gallery.grabbed == 0

    pool.count(2**40 + 1)

    assert gallery.grabbed == 2**40 + 1
    pool.close()


def test_pages_that_the_daemon_looks_at_cannot_be_cut_off() -> None:
    pool, _ = shared()

    with pytest.raises(PermissionError):
        os.ftruncate(pool.fd, 0)
    pool.close()


def test_memory_is_taken_only_by_slots_that_are_used() -> None:
    pool, _ = shared(4 << 20)
    pool.view(0, 64, 48)[:] = 1

    assert os.fstat(pool.fd).st_blocks * 512 < 1 << 20
    pool.close()
