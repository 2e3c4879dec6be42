"""Other streams for the same seeds: `DPFT_SALT=n` mixes n into every seed of random, NumPy and torch, so that no test rests on one draw.

Python runs this file at start-up when its folder stands first on PYTHONPATH, which `make salted` does and tests/conftest.py passes on.
Nothing is imported that the program does not import by itself: a library is changed when it is first imported."""

import os
import sys

SALT = os.environ.get("DPFT_SALT", "")


def mixed(seed: object, bits: int) -> int:
    "Another seed of so many bits, from this one and the salt."
    from hashlib import blake2b

    named = seed.tolist() if hasattr(seed, "tolist") else seed                     # an array by its numbers, a NumPy integer by its value
    return int.from_bytes(blake2b(f"{SALT}:{named!r}".encode(), digest_size=8).digest(), "little") >> (64 - bits)


def salt_random(module) -> None:
    "`random.seed` and `random.Random(seed)`."
    plain = module.Random.seed

    def seed(self, a=None, version=2):
        plain(self, a if a is None else mixed(a, 63), version)

    module.Random.seed = seed
    module.seed = module._inst.seed


def salt_numpy(module) -> None:
    "`numpy.random.default_rng`, `seed` and `RandomState`; a generator or a bit generator that is passed on stays as it is."
    plain_rng, plain_seed, plain_state = module.default_rng, module.seed, module.RandomState

    def is_seed(seed) -> bool:
        return seed is not None and not isinstance(seed, module.Generator | module.BitGenerator | module.SeedSequence | plain_state)

    def default_rng(seed=None):
        return plain_rng(mixed(seed, 63) if is_seed(seed) else seed)

    def seed(seed=None):
        plain_seed(mixed(seed, 32) if is_seed(seed) else seed)

    class Meta(type):
        def __instancecheck__(cls, thing):
            return isinstance(thing, plain_state)

    class RandomState(plain_state, metaclass=Meta):
        def __init__(self, seed=None):
            super().__init__(mixed(seed, 32) if is_seed(seed) else seed)

        def seed(self, seed=None):
            super().seed(mixed(seed, 32) if is_seed(seed) else seed)

    module.default_rng, module.seed, module.RandomState = default_rng, seed, RandomState


def salt_torch(module) -> None:
    "`Generator.manual_seed`, through which `torch.manual_seed` goes too; its type is written in C, so it is changed from below."
    import ctypes
    import gc

    generator = sys.modules["torch._C"].Generator
    plain = generator.manual_seed

    def manual_seed(self, seed):
        return plain(self, mixed(int(seed), 63))

    gc.get_referents(generator.__dict__)[0]["manual_seed"] = manual_seed
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(generator))


SALTED = {"random": salt_random, "numpy.random": salt_numpy, "torch": salt_torch}


class Finder:
    "Finds a module as the others would, and changes it when it has been loaded."

    salts = True

    def find_spec(self, name, path=None, target=None):
        if name not in SALTED:
            return None
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next((spec for spec in found if spec), None)
        if spec is not None:
            load = spec.loader.exec_module

            def exec_module(module):
                load(module)
                SALTED[name](module)

            spec.loader.exec_module = exec_module
        return spec


def start() -> None:
    "Change what is imported already, and whatever comes later when it comes; once."
    if any(getattr(finder, "salts", False) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, Finder())
    for name, salt in SALTED.items():
        if name in sys.modules:
            salt(sys.modules[name])


def refusal() -> str:
    "Why nothing is salted; empty where it is."
    if not SALT.isdecimal():
        return f"DPFT_SALT={SALT}: it must be a whole number"
    if os.environ.get("DPFT_TESTING") != "1" and "pytest" not in sys.modules:
        return "DPFT_SALT is for tests: a salted seed is not the seed that was asked for; use `make salted`, or unset it"
    return ""


if SALT:
    if why := refusal():
        print(why, file=sys.stderr)
        os._exit(2)                                                                # an exception here would look like an error of Python
    start()
