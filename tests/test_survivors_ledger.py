"""Of the ledger, the accountants and the noise: what a small change once left unnoticed by all other fast tests (`make mutants`)."""

import dataclasses
import hashlib
import math
import types

import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from torch import tensor

from dpft import privacy
from dpft.noise import Keystream, _encode
from dpft.privacy import BudgetError, SampledGaussian, epsilon, noise_multiplier

NOISE = dict(epsilon=None, noise_multiplier=1.0)  # nothing to solve


def test_a_mechanism_cannot_be_changed_after_it_was_priced():
    spent = SampledGaussian(1.0, 0.1, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        spent.steps = 0
    assert spent.name == "train"


def test_a_price_that_cannot_be_computed_is_no_proof_that_a_budget_is_met(monkeypatch):
    def accountant(history, delta):
        if min(sigma for sigma, _, _ in history) < 1:
            raise ArithmeticError("no price below 1")
        return 2 / min(sigma for sigma, _, _ in history)

    monkeypatch.setitem(privacy._ACCOUNTANTS, "half blind", accountant)
    assert 1 <= noise_multiplier(4.0, 1e-5, 0.1, 1, accountant="half blind") < 1.002
    with pytest.raises(BudgetError):
        epsilon(SampledGaussian(0.5, 0.1, 1), 1e-5, "half blind")


def test_a_target_at_the_floor_is_met():
    privacy._check_budget(1.0, 1.0, 0.0, "")
    with pytest.raises(BudgetError):
        privacy._check_budget(1.0, math.nextafter(1.0, 2), 0.0, "")


def test_the_grid_that_is_too_fine_is_the_one_that_would_be_built(monkeypatch):
    from opacus.accountants import PRVAccountant

    built = []
    domain = PRVAccountant._get_domain

    def spy(self, *arguments, **settings):
        built.append(domain(self, *arguments, **settings))
        return built[-1]

    monkeypatch.setattr(PRVAccountant, "_get_domain", spy)
    history = ((2.0, 0.1, 30),)
    privacy._prv_epsilon(history, 1e-4)
    for size, refused in ((built[0].size / 1.1, True), (built[0].size * 1.1, False)):
        monkeypatch.setattr(privacy, "PRV_POINTS", size)
        if refused:
            with pytest.raises(ValueError, match="the grid would need"):
                privacy._prv_epsilon(history, 1e-4)
        else:
            privacy._prv_epsilon(history, 1e-4)


@pytest.mark.parametrize("old, new", [({"b": 1}, 2), (2, {"b": 1}), ([1], 1), (1, [1])])
def test_a_field_of_another_kind_is_named_as_different(old, new):
    assert privacy._difference({"a": old}, {"a": new}) == f"a is {old!r} in the ledger and {new!r} now"


def test_a_part_of_a_context_is_encoded_by_its_type_its_length_and_itself():
    for part, kind, raw in ((b"ab", b"b", b"ab"), ("ab", b"s", b"ab"), (-12, b"i", b"-12")):
        assert _encode(part) == kind + len(raw).to_bytes(8, "little") + raw
    secret = bytes(range(32))
    assert Keystream(secret).key("a") == hashlib.blake2b(_encode("a"), key=secret, digest_size=32).digest()


def test_a_key_gives_the_same_noise_in_every_version():
    "A run that is resumed under a later version repeats its last step uncharged, so its noise must be the same: chunks of 2^16 numbers."
    key = Keystream(0).key("a")
    parts = [Cipher(ChaCha20(key, bytes(8) + chunk.to_bytes(8, "little")), mode=None).encryptor().update(bytes(8 * size))
             for chunk, size in enumerate((2**16, 70_000 - 2**16))]
    assert b"".join(bits.tobytes() for bits in Keystream(0)._bits(70_000, "a")) == b"".join(parts)


def test_a_digest_is_the_same_in_every_version():
    "Rows of an earlier version are found again by it."
    stream, value = Keystream(0), tensor([1.0, 2.0, 3.0])
    key = stream.key("digest", "torch.float32", 3, "of", "sum")
    assert stream.digest(value, "sum") == hashlib.blake2b(value.numpy().tobytes(), key=key, digest_size=32).hexdigest()


def test_noise_of_another_device_is_keyed_and_standard_too(monkeypatch):
    class Elsewhere:
        "torch, but for its devices, of which there is none beside the processor."
        device = staticmethod(lambda name: types.SimpleNamespace(type="elsewhere"))
        Generator = staticmethod(lambda name: torch.Generator())

        def __getattr__(self, name):
            return getattr(torch, name)

    monkeypatch.setattr("dpft.noise.torch", Elsewhere())
    stream = Keystream(0)
    a, b, again = (stream.normal((100, 100), 3.0, *context) for context in (("a", 1), ("a", 2), ("a", 1)))
    assert torch.equal(a, torch.empty(100, 100).normal_(0, 3.0, generator=torch.Generator().manual_seed(stream.seed("normal", "a", 1))))
    assert torch.equal(a, again) and abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 0.05
    assert a.shape == (100, 100) and abs(a.mean()) < 0.15 and abs(a.std() - 3) < 0.1
