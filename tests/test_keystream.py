"""The randomness: the same for the same context, independent for another, and distributed as the proofs assume."""

import copy
import os
import pickle
import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpft.noise import Keystream, cipher_bits, generator_state

SECRET = bytes(range(32))
parts = st.one_of(st.text(max_size=6), st.integers(-(2**70), 2**70), st.binary(max_size=6))
contexts = st.lists(parts, max_size=4).map(tuple)


def tagged(context: tuple) -> tuple:
    return tuple((type(part), part) for part in context)


# --- keys ------------------------------------------------------------------------------------------------------------


@given(contexts, contexts)
@settings(max_examples=100)
def test_equal_keys_only_for_equal_contexts(a, b):
    stream = Keystream(SECRET)
    assert (stream.key(*a) == stream.key(*b)) == (tagged(a) == tagged(b))
    assert stream.key(*a) == Keystream(SECRET).key(*a) and len(stream.key(*a)) == 32


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_stream_is_not_copied(copied):
    with pytest.raises(TypeError, match="two copies would add one noise to two sums"):
        copied(Keystream())


@pytest.mark.parametrize("secret, same", [(None, False), (SECRET, False), (0, True)])
def test_a_forked_process_has_keys_of_its_own_but_for_a_seed(secret, same):
    stream, (reading, writing) = Keystream(secret), os.pipe()
    mine = stream.key("noise", 0)
    if (child := os.fork()) == 0:
        os.write(writing, stream.key("noise", 0))
        os._exit(0)
    os.waitpid(child, 0)
    assert (os.read(reading, 32) == mine) == same and stream.key("noise", 0) == mine


def test_the_secret_decides():
    streams = [Keystream(SECRET), Keystream(SECRET[::-1]), Keystream(0), Keystream(1), Keystream(-1), Keystream(), Keystream()]
    assert len({stream.key("a") for stream in streams}) == len(streams)
    assert [stream.reproducible for stream in streams] == [False, False, True, True, True, False, False]
    assert Keystream(Keystream(5).secret).key("a") == Keystream(5).key("a")
    assert repr(Keystream(SECRET).secret) not in repr(Keystream(SECRET))


@pytest.mark.parametrize("part", [1.0, None, True, (1,), torch.ones(1)])
def test_only_plain_contexts(part):
    with pytest.raises(ValueError, match="context part"):
        Keystream(0).key(part)


# --- normal numbers --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def million() -> np.ndarray:
    return Keystream(SECRET).normal((1_000_000,), 1.0, "test", dtype=torch.float64).numpy()


def test_a_million_normals_are_normal(million):
    """Fixed seed; bounds at about five standard errors of each moment."""
    for power, expected, error in ((1, 0, 1.0), (2, 1, 2**0.5), (3, 0, 15**0.5), (4, 3, 96**0.5)):
        assert abs((million**power).mean() - expected) < 5 * error / 1000
    assert stats.kstest(million, "norm").pvalue > 1e-3
    for tail in (3.0, 4.0, 4.5):
        expected = 1e6 * 2 * stats.norm.sf(tail)
        assert abs((abs(million) > tail).sum() - expected) < 5 * expected**0.5 + 1


def test_normals_are_uncorrelated(million):
    """Neighbours, the two halves of each Box–Muller pair, and the same place in different chunks; their squares too."""
    for lag in (1, 2, 2**14, 2**15, 2**16, 2**17):
        for values in (million, million**2 - 1):
            correlation = (values[:-lag] * values[lag:]).mean() / values.var()
            assert abs(correlation) < 5 / (len(values) - lag) ** 0.5, lag


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3), (0,), (2**16,), (2**16 + 1,), (5, 2**15 - 1)])
def test_shapes(shape):
    noise = Keystream(SECRET).normal(shape, 2.0, "shape")
    assert noise.shape == torch.Size(shape) and noise.dtype == torch.float32 and noise.isfinite().all()
    assert torch.equal(noise, Keystream(SECRET).normal(shape, 2.0, "shape"))
    assert torch.equal(noise * 2, Keystream(SECRET).normal(shape, 4.0, "shape"))


def test_bits_at_the_edge_never_give_infinity(monkeypatch):
    """All 64 bits zero or one: the smallest and the largest uniform number still lie inside (0, 1)."""
    stream = Keystream(SECRET)
    for bits in (0, 2**64 - 1):
        monkeypatch.setattr("dpft.noise.cipher_bits", lambda key, numbers, bits=bits: iter([np.full(numbers, bits, dtype=np.uint64)]))
        noise = stream.normal((64,), 1.0)
        assert noise.isfinite().all() and noise.abs().max() < 8.7
    monkeypatch.undo()
    assert stream.normal((10**6,), 1e37, "large").isfinite().all()


# --- Poisson draws ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.0, 1e-3, 1024 / 67349, 0.5, 0.999, 1.0])
def test_draws_are_sorted_unique_and_of_the_right_size(rate):
    drawn = Keystream(SECRET).bernoulli(200_001, rate, "draw", 0)
    assert drawn.dtype == torch.int64 and torch.equal(drawn, drawn.unique())
    assert len(drawn) == 0 or (drawn[0] >= 0 and drawn[-1] < 200_001)
    assert abs(len(drawn) - 200_001 * rate) <= 5 * (200_001 * rate * (1 - rate)) ** 0.5
    assert torch.equal(drawn, Keystream(SECRET).bernoulli(200_001, rate, "draw", 0))


def test_each_index_is_drawn_by_itself():
    """4,000 draws of 64 indices: marginal counts, and all pairs, at a level of 1e-6 (chi-square)."""
    stream, rate, draws, size = Keystream(SECRET), 0.3, 4000, 64
    table = np.zeros((draws, size))
    for t in range(draws):
        table[t, stream.bernoulli(size, rate, "draw", t).numpy()] = 1
    marginal = ((table.sum(0) - draws * rate) ** 2 / (draws * rate * (1 - rate))).sum()
    assert 1e-6 < stats.chi2.sf(marginal, size) < 1 - 1e-6
    sizes = ((table.sum(1) - size * rate) ** 2 / (size * rate * (1 - rate))).sum()  # a fixed batch size would give 0
    assert abs(sizes - draws) < 5 * (2 * draws) ** 0.5
    standardised = (table - rate) / (rate * (1 - rate)) ** 0.5
    pairs = (standardised.T @ standardised / draws**0.5)[np.triu_indices(size, 1)]
    assert 1e-6 < stats.chi2.sf((pairs**2).sum(), len(pairs)) < 1 - 1e-6
    across = (standardised[1:] * standardised[:-1]).sum(0) / draws**0.5
    assert 1e-6 < stats.chi2.sf((across**2).sum(), size) < 1 - 1e-6


@pytest.mark.parametrize("rate", [2.0**-40, 0.1, 1 / 3, 0.5, 1 - 2**-53])
def test_the_rate_is_exact(monkeypatch, rate):
    """An index is drawn iff its 64 bits, read as a fraction, lie below the rate: never more often than stated."""
    stream, below = Keystream(SECRET), int(rate * 2**64)
    assert Fraction(rate) - Fraction(1, 2**64) < Fraction(below, 2**64) <= Fraction(rate)
    bits = np.array([0, below - 1, below, 2**64 - 1], dtype=np.uint64)
    monkeypatch.setattr("dpft.noise.cipher_bits", lambda *_: iter([bits]))
    assert stream.bernoulli(4, rate).tolist() == [0, 1]


def test_a_key_gives_the_same_noise_in_every_version():
    "A run that is resumed under a later version repeats its last step uncharged, so its noise must be the same: chunks of 2^16 numbers."
    key = Keystream(0).key("a")
    parts = [Cipher(ChaCha20(key, bytes(8) + chunk.to_bytes(8, "little")), mode=None).encryptor().update(bytes(8 * size))
             for chunk, size in enumerate((2**16, 70_000 - 2**16))]
    assert b"".join(bits.tobytes() for bits in cipher_bits(key, 70_000)) == b"".join(parts)


# --- the state of torch's own generators -----------------------------------------------------------------------------------


def test_torchs_generator_takes_more_of_a_key_than_the_32_bits_of_a_seed(monkeypatch):
    "Two keys whose seeds agree in the bits that torch's generator reads."
    draws = []
    for secret in (SECRET, SECRET[::-1]):
        stream = Keystream(secret)
        monkeypatch.setattr(stream, "seed", lambda *context: 7)
        with torch.random.fork_rng([]):
            stream.set_generators("dropout", 1)
            draws.append(torch.rand(4))
            stream.set_generators("dropout", 1)
            assert torch.equal(draws[-1], torch.rand(4))
    assert not torch.equal(*draws)


def test_the_state_is_the_one_that_a_mersenne_twister_continues():
    state = generator_state(SECRET)
    words = state.numpy()[24:24 + 624 * 8].view(np.uint64)
    twister = random.Random()
    twister.setstate((3, (*map(int, words), 624), None))
    found = torch.rand(1000, generator=torch.Generator().set_state(state), dtype=torch.float32)
    assert (found * 2**24).long().tolist() == [twister.getrandbits(32) & (2**24 - 1) for _ in range(1000)]
    assert np.array_equal(words, next(cipher_bits(SECRET, 624)) & np.uint64(2**32 - 1))


def test_a_torch_that_keeps_its_state_otherwise_is_refused(monkeypatch):
    monkeypatch.setattr("dpft.noise._FIRST_STATE", torch.zeros(16, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="keeps the state of its CPU generator in a form that dpft does not know"):
        generator_state(SECRET)
