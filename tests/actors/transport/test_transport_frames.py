"""Frames: what a trailer catches. Pure numpy."""

import numpy as np
import pytest

from rlhfspec.actors.transport.frames import TRAILER_BYTES, claimed_sequence, frame_bytes, open_frame, seal
from rlhfspec.core.errors import TransferError

SIZES = [1, 8, 13, 4096, 4097, 65536, 262_144 + 5, 1 << 20]


def sealed(size: int, sequence: int = 3, seed: int = 0) -> np.ndarray:
    frame = np.empty(frame_bytes(size), dtype=np.uint8)
    frame[:size] = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    seal(frame, sequence)
    return frame


def refuses(frame: np.ndarray, sequence: int = 3) -> str:
    with pytest.raises(TransferError) as caught:
        open_frame(frame, sequence, peer="gen-1", channel="ab")
    assert caught.value.peer == "gen-1" and caught.value.channel == "ab"
    return str(caught.value)


@pytest.mark.parametrize("size", SIZES)
def test_a_sealed_frame_opens_to_its_payload_without_a_copy(size):
    frame = sealed(size)
    payload = open_frame(frame, 3)
    assert payload.size == size and np.shares_memory(payload, frame)
    expected = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    assert np.array_equal(payload, expected)


@pytest.mark.parametrize("size", [1, 13, 4099, 70_001])
def test_every_flipped_bit_is_caught(size):
    frame = sealed(size)
    places = np.random.default_rng(1).choice(size, min(size, 150), replace=False)
    for place in [*places, *range(size, frame.size)]:
        for bit in (0, 7):
            frame[place] ^= 1 << bit
            refuses(frame)
            frame[place] ^= 1 << bit
    open_frame(frame, 3)


@pytest.mark.parametrize("size", [4096, 65536, 262_144, 1 << 20])
def test_every_swapped_pair_of_words_is_caught(size):
    frame = sealed(size)
    words = frame[:size].view(np.uint64)
    rng = np.random.default_rng(2)
    pairs = [*rng.integers(0, words.size, (100, 2)), (0, 1), (0, words.size - 1)]
    pairs += [(0, d) for d in (256, 511, 512, 513, 1024) if d < words.size]
    for left, right in pairs:
        if left != right:
            words[[left, right]] = words[[right, left]]
            refuses(frame)
            words[[left, right]] = words[[right, left]]
    open_frame(frame, 3)


def test_swapped_words_that_differ_in_their_highest_bit_alone_are_caught():
    frame = sealed(8192)
    words = frame[:8192].view(np.uint64)
    for right in (1, 2, 512, 1023):
        words[0], words[right] = 5, 5 | 1 << 63
        seal(frame, 3)
        words[[0, right]] = words[[right, 0]]
        refuses(frame)


def test_swapped_blocks_are_caught():
    frame = sealed(1 << 18)
    for block in (2048, 4096, 8192, 65536):
        blocks = frame[: 1 << 18].reshape(-1, block)
        blocks[[0, 3]] = blocks[[3, 0]]
        refuses(frame)
        blocks[[0, 3]] = blocks[[3, 0]]
    open_frame(frame, 3)


def test_a_dropped_or_repeated_frame_is_named():
    assert "frame 4" in refuses(sealed(100, sequence=3), sequence=4)
    message = refuses(sealed(100, sequence=5), sequence=4)
    assert "frame 4" in message and "frame 5" in message


def test_the_sequence_number_can_be_read_before_a_frame_is_opened():
    assert claimed_sequence(sealed(100, sequence=(1 << 48) - 1)) == (1 << 48) - 1


def test_a_truncated_or_joined_frame_is_caught():
    frame = sealed(5000)
    refuses(frame[:-1])
    refuses(frame[8:])
    refuses(np.concatenate([frame, frame]))
    refuses(frame[: TRAILER_BYTES - 1])


def test_an_unsealed_buffer_of_zeros_is_refused_and_a_sealed_one_opens():
    zeros = np.zeros(frame_bytes(1000), dtype=np.uint8)
    refuses(zeros, sequence=0)
    seal(zeros, 0)
    assert not open_frame(zeros, 0).any()


def test_equal_payloads_at_odd_addresses_have_equal_trailers():
    aligned = sealed(5001)
    shifted = np.empty(aligned.size + 3, dtype=np.uint8)[3:]
    shifted[:] = aligned
    assert np.array_equal(open_frame(shifted, 3), open_frame(aligned, 3))
    seal(shifted, 3)
    assert np.array_equal(shifted, aligned)
