"""The cipher by integer operations: the library's bits on any device."""

import random

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from hypothesis import given, settings
from hypothesis import strategies as st

from dpft.device_noise import BLOCKS, CHUNK, device_bits, device_pieces, scrambled, words_of
from dpft.noise import SHARE, Keystream, add_pieces, cipher_bits, cipher_pieces, in_threads
from dpft.processes import Processes
from dpft.step import add_noise, release

SECRET = bytes(range(32))


# the cipher --------------------------------------------------------------------------------------------------------------------------


@given(st.binary(min_size=48, max_size=48), st.integers(0, 2**31 - 1))
@settings(max_examples=25, deadline=None)
def test_a_block_of_any_key_counter_and_nonce_is_the_librarys(raw, counter):
    key, nonce = raw[:32], counter.to_bytes(4, "little") + raw[32:44]
    square = torch.tensor(words_of(b"expand 32-byte k" + key + nonce), dtype=torch.int32)[:, None]
    block = scrambled(square)[:, 0].numpy().tobytes()
    assert block == Cipher(ChaCha20(key, nonce), mode=None).encryptor().update(bytes(64))


def test_the_bits_of_every_chunk_are_those_of_the_cpu():
    key = random.Random(0).randbytes(32)
    wanted = np.concatenate([bits.copy() for bits in cipher_bits(key, 3 * CHUNK)]).view("<i8")
    assert np.array_equal(device_bits(key, 0, 3, "cpu").flatten().numpy(), wanted)
    assert np.array_equal(device_bits(key, 2, 1, "cpu")[0].numpy(), wanted[2 * CHUNK:])
    assert BLOCKS * 64 == CHUNK * 8


@pytest.mark.parametrize("numbers", [1, 2, 5, CHUNK - 1, CHUNK, CHUNK + 2, 2 * CHUNK + 7])
def test_numbers_of_a_device_are_those_of_the_cpu(numbers):
    "Up to a few units in the last place, of numbers below 9: 9 * 8 * 2^-53 is below 1e-14."
    key, wanted, found = Keystream(SECRET).key("a"), torch.zeros(numbers, dtype=torch.float64), torch.zeros(numbers, dtype=torch.float64)
    add_pieces(wanted, cipher_pieces(key, numbers, 0.5))
    add_pieces(found, device_pieces(key, numbers, 0.5, "cpu"))
    assert torch.allclose(found, wanted, rtol=0, atol=1e-14)


# pieces and threads ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (0,), (CHUNK + 3,), (3, CHUNK)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_added_in_place_is_the_noise_as_a_whole(shape, dtype):
    stream, total = Keystream(SECRET), torch.arange(torch.Size(shape).numel(), dtype=dtype).reshape(shape)
    for std in (0.37, torch.linspace(0, 2, total.numel(), dtype=torch.float32).reshape(shape)):
        whole = stream.normal(shape, 1.0, "noise", "a", dtype=dtype).mul_(std).add_(total)
        memory = total.clone()
        assert torch.equal(add_noise(memory, std, stream, "a"), whole)
        assert memory.numel() == 0 or torch.equal(memory, whole)


def test_a_sum_of_any_strides_gets_the_noise_of_its_places():
    stream, total = Keystream(SECRET), torch.arange(24.0).reshape(2, 3, 4)
    wanted = add_noise(total.clone(), 1.0, stream, "a")
    assert torch.equal(add_noise(total.permute(2, 0, 1).contiguous().permute(1, 2, 0), 1.0, stream, "a"), wanted)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_the_bits_do_not_depend_on_the_number_of_threads(monkeypatch, workers):
    stream = Keystream(SECRET)
    shapes = {"large": (SHARE + 5,), "b": (300, 7), "c": (11,), "none": (0,)}
    wanted = {name: stream.normal(shape, 1.0, "noise", "train", 3, name) for name, shape in shapes.items()}
    monkeypatch.setattr("dpft.noise.threads", lambda: workers)
    sums = {name: torch.zeros(shape) for name, shape in shapes.items()}
    found, _ = release(stream, Processes(), "train", 3, sums, dict.fromkeys(sums, 1.0))
    assert [*found] == [*shapes] and all(torch.equal(found[name], wanted[name]) for name in shapes)


@pytest.mark.parametrize("workers", [1, 3])
def test_an_error_in_a_thread_is_an_error(workers):
    def fail(item):
        raise OSError(f"item {item}")

    with pytest.raises(OSError, match="item 0"):
        in_threads(fail, range(4), workers)
    assert in_threads(lambda x: x * x, range(5), workers) == [0, 1, 4, 9, 16]
