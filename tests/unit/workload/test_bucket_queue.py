# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The hidden-state queue: bounds, buckets, fairness, and no way to wait forever."""

import contextlib
import threading

import pytest
from common.bucket_queue import BucketQueue, Closed, quartile_edges

LENGTHS = [10] * 50 + [100] * 30 + [300] * 15 + [500] * 5
EDGES = [50, 200, 400]


def make(min_ready=1, max_depth=1000, producers=1, lengths=LENGTHS, seed=0) -> BucketQueue:
    return BucketQueue(lengths, EDGES, min_ready, max_depth, producers, seed)


def in_thread(action) -> tuple[threading.Thread, list]:
    result = []

    def run():
        with contextlib.suppress(Closed):
            result.append(action())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, result


def test_edges_are_quartiles_without_repeats():
    assert quartile_edges(list(range(1, 101))) == [26, 51, 76]
    assert quartile_edges([5] * 10 + [9]) == [5]


def test_an_edge_belongs_to_the_bucket_below():
    assert [make().bucket(length) for length in (1, 50, 51, 200, 400, 401, 9999)] == [0, 0, 1, 1, 2, 3, 3]


@pytest.mark.shows("W44")
def test_caps_are_one_and_a_half_shares():
    assert make(max_depth=100).caps == [75, 45, 23, 8]


@pytest.mark.parametrize(("min_ready", "max_depth"), [(0, 5), (6, 5)])
def test_bounds_that_make_no_sense_are_refused(min_ready, max_depth):
    with pytest.raises(ValueError, match="min_ready"):
        make(min_ready, max_depth)


@pytest.mark.shows("W44")
def test_put_blocks_at_max_depth_until_something_is_drawn():
    queue = make(max_depth=4, lengths=[10])
    for n in range(4):
        queue.put(n, 10)
    thread, _ = in_thread(lambda: queue.put(4, 10))
    thread.join(0.1)
    assert thread.is_alive()
    queue.get(1)
    thread.join(5)
    assert not thread.is_alive() and sum(queue.depths()) == 4


@pytest.mark.shows("W44")
def test_put_blocks_at_the_cap_of_its_bucket_alone():
    queue = make(max_depth=20)
    assert queue.caps == [15, 9, 5, 2]
    queue.put("a", 500)
    queue.put("b", 500)
    thread, _ = in_thread(lambda: queue.put("c", 500))
    thread.join(0.1)
    assert thread.is_alive()
    queue.put("d", 10)
    queue.close()
    thread.join(5)


@pytest.mark.shows("W45")
def test_get_waits_for_min_ready():
    queue = make(min_ready=3)
    thread, result = in_thread(lambda: queue.get(1))
    queue.put(1, 10)
    queue.put(2, 10)
    thread.join(0.1)
    assert thread.is_alive()
    queue.put(3, 10)
    thread.join(5)
    assert result == [[1]]


@pytest.mark.shows("W45")
def test_get_does_not_wait_for_a_producer_that_waits_at_a_cap():
    queue = make(min_ready=10, max_depth=20)
    thread, _ = in_thread(lambda: [queue.put(n, 500) for n in range(5)])
    for k, drawn in ((4, [0, 1]), (1, [2])):
        getter, result = in_thread(lambda k=k: queue.get(k))
        getter.join(5)
        assert result == [drawn]
    queue.close()
    thread.join(5)


def test_with_two_producers_one_waiting_at_a_cap_is_not_enough():
    queue = make(min_ready=10, max_depth=20, producers=2)
    blocked, _ = in_thread(lambda: [queue.put(n, 500) for n in range(3)])
    drawn, result = in_thread(lambda: queue.get(1))
    drawn.join(0.1)
    assert drawn.is_alive()
    for n in range(8):
        queue.put(n, 10)
    drawn.join(5)
    assert len(result) == 1
    queue.close()
    blocked.join(5)


@pytest.mark.shows("W46")
@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_draws_follow_occupancy_within_ten_percent(seed, k):
    queue = make(max_depth=1000, seed=seed)
    for length, count in ((10, 500), (100, 300), (300, 150), (500, 50)):
        for _ in range(count):
            queue.put(length, length)
    drawn = dict.fromkeys((10, 100, 300, 500), 0)
    for _ in range(10_000 // k):
        for length in queue.get(k):
            drawn[length] += 1
            queue.put(length, length)
    assert queue.counters.drawn == list(drawn.values()) and sum(drawn.values()) == 10_000
    for length, share in ((10, 0.5), (100, 0.3), (300, 0.15), (500, 0.05)):
        # Far within the ten percent that are asked for, whatever the seed.
        assert drawn[length] == pytest.approx(10_000 * share, rel=0.02), drawn


def test_the_order_within_is_random():
    def buckets(seed: int) -> list[int]:
        queue = make(max_depth=1000, seed=seed)
        for length in LENGTHS:
            queue.put(length, length)
        return [queue.get(1)[0] for _ in range(50)]

    assert buckets(1) != buckets(2)


@pytest.mark.shows("W47")
@pytest.mark.parametrize("seed", range(20))
def test_no_batch_comes_from_the_longest_bucket_alone(seed):
    queue = make(max_depth=100, lengths=[500] * 90 + [10] * 10, seed=seed)
    for _n in range(90):
        queue.put(500, 500)
    queue.put(10, 10)
    assert 10 in queue.get(4)
    assert queue.get(4) == [500] * 4, "with nothing else there, the longest bucket is better than nothing"


def test_within_a_bucket_first_in_is_first_out():
    queue = make(lengths=[10])
    for n in range(10):
        queue.put(n, 10)
    assert queue.get(4) + queue.get(4) == list(range(8))


def test_close_wakes_whoever_waits():
    queue = make(min_ready=5, max_depth=5, lengths=[10])
    waits = []
    for action in (lambda: queue.get(1), lambda: [queue.put(n, 10) for n in range(20)]):

        def closed(action=action):
            with pytest.raises(Closed):
                while True:
                    action()

        waits.append(in_thread(closed)[0])
    queue.close()
    for thread in waits:
        thread.join(5)
        assert not thread.is_alive()
