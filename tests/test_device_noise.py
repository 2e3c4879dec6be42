"""The cipher and the digest by integer operations: the library's bits, and integers that Python's own arithmetic confirms."""

import random

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from hypothesis import given, settings
from hypothesis import strategies as st

from dpft.device_noise import BLOCK, BLOCKS, CHUNK, PRIME, ROWS, device_bits, device_pieces, hashed, scrambled, words_of
from dpft.noise import SHARE, Keystream, add_pieces, cipher_bits, cipher_pieces, digests, factors_of, secure_pieces, side_by_side
from dpft.step import each_perturbed, perturbed

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


def test_secure_noise_is_made_where_it_is_wanted(monkeypatch):
    stream = Keystream(SECRET)
    stream.secure_normal((3,), "a", device="meta")                       # torch loads what it needs for this device
    monkeypatch.setattr(torch, "Generator", None)
    assert {piece.device.type for piece in secure_pieces(stream, 70_000, "a", device="meta")} == {"meta"}
    assert stream.secure_normal((3, 5), "a", device="meta").shape == (3, 5)


# pieces and threads ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (0,), (CHUNK + 3,), (3, CHUNK)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_added_in_place_is_the_noise_as_a_whole(shape, dtype):
    stream, total = Keystream(SECRET), torch.arange(torch.Size(shape).numel(), dtype=dtype).reshape(shape)
    for std in (0.37, torch.linspace(0, 2, total.numel(), dtype=torch.float32).reshape(shape)):
        whole = stream.normal(shape, 1.0, "noise", "a", dtype=dtype).mul_(std).add_(total)
        memory = total.clone()
        assert torch.equal(perturbed(memory, std, stream, "a"), whole)
        assert memory.numel() == 0 or torch.equal(memory, whole)


def test_a_sum_of_any_strides_gets_the_noise_of_its_places():
    stream, total = Keystream(SECRET), torch.arange(24.0).reshape(2, 3, 4)
    wanted = perturbed(total.clone(), 1.0, stream, "a")
    assert torch.equal(perturbed(total.permute(2, 0, 1).contiguous().permute(1, 2, 0), 1.0, stream, "a"), wanted)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_the_bits_do_not_depend_on_the_number_of_threads(monkeypatch, workers):
    stream = Keystream(SECRET)
    shapes = {"large": (SHARE + 5,), "b": (300, 7), "c": (11,), "none": (0,)}
    wanted = {name: stream.normal(shape, 1.0, "noise", name) for name, shape in shapes.items()}
    monkeypatch.setattr("dpft.noise.threads", lambda: workers)
    sums = {name: torch.zeros(shape) for name, shape in shapes.items()}
    named = digests(stream, [*sums.values()], [(name,) for name in sums])
    assert named == [stream.digest(value, name) for name, value in sums.items()]
    found = each_perturbed(sums, lambda name: perturbed(sums[name], 1.0, stream, name))
    assert [*found] == [*shapes] and all(torch.equal(found[name], wanted[name]) for name in shapes)


@pytest.mark.parametrize("workers", [1, 3])
def test_an_error_in_a_thread_is_an_error(workers):
    def fail(item):
        raise OSError(f"item {item}")

    with pytest.raises(OSError, match="item 0"):
        side_by_side(fail, range(4), workers)
    assert side_by_side(lambda x: x * x, range(5), workers) == [0, 1, 4, 9, 16]


# digests -----------------------------------------------------------------------------------------------------------------------------


def by_hand(values, factors):
    "The lemma's sums in Python's integers."
    integers = values.contiguous().flatten().view(torch.int8 if values.element_size() == 1 else torch.int16).tolist()
    blocks = [integers[start:start + BLOCK] for start in range(0, len(integers) + 1, BLOCK)]
    return [[sum(a * x for a, x in zip(row, block, strict=False)) % PRIME for row in factors.tolist()] for block in blocks]


@pytest.mark.parametrize("values", [torch.tensor(1.5), torch.zeros(0), torch.randn(5, 7, generator=torch.Generator().manual_seed(0)),
                                    torch.arange(9, dtype=torch.uint8), torch.tensor([True, False, True]),
                                    torch.tensor([torch.nan, -0.0, torch.inf], dtype=torch.float64), torch.ones(3, dtype=torch.bfloat16),
                                    torch.full((BLOCK + 1,), -2**15, dtype=torch.int16), torch.arange(20.0).reshape(4, 5).T],
                         ids=lambda values: f"{values.dtype} {tuple(values.shape)}")
def test_the_sums_are_those_of_exact_arithmetic(values):
    factors = factors_of(Keystream(SECRET), torch.device("cpu"))
    assert factors.shape == (ROWS, BLOCK) and factors.min() >= 0 and factors.max() < PRIME
    assert hashed(values, factors).tolist() == by_hand(values, factors)
    worst = torch.full_like(factors, PRIME - 1)
    assert hashed(values, worst).tolist() == by_hand(values, worst)


@given(st.integers(0, 40_000), st.integers(0, 31), st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_any_bit_changes_all_sums_of_its_block_and_no_other(entry, bit, source):
    "Certain but for a factor of zero, of which these streams have none at these places or once in 5e8."
    factors = factors_of(Keystream(SECRET), torch.device("cpu"))
    values = torch.linspace(-1, 1, 40_001)
    changed = values.clone()
    changed.view(torch.int32)[entry] ^= 1 << bit if bit < 31 else -2**31
    different = hashed(values, factors) != hashed(changed, factors)
    block = 2 * entry // BLOCK
    assert different[block].all() and not different[1 - block].any()


def test_the_factors_come_from_the_secret():
    "With a known key a collision can be made: the factors come from the secret, and are spread over the field."
    first, second = (factors_of(Keystream(secret), torch.device("cpu")) for secret in (SECRET, SECRET[::-1]))
    assert not torch.equal(first, second)
    uniform = first.double().mean() / PRIME
    assert abs(uniform - 0.5) < 6 * (1 / 12 / first.numel()) ** 0.5
