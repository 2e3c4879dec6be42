"""An accelerator that is simulated: tensors of a device of their own, whose numbers lie in the processor's memory.

An operation that mixes devices raises, as it would on a GPU, and one for which the host waits is written down.
"""

import sys
from contextlib import contextmanager, nullcontext

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "simulated"
aten = torch.ops.aten
# the number of results, or the result itself, is known to the device alone
READS = {aten._local_scalar_dense, aten.equal, aten.nonzero, aten.masked_select, aten.unique_dim, aten._unique2,
         aten.unique_consecutive, aten.bincount, aten.is_nonzero}
INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}


class Module(_DummyBackendModule):
    "The module that torch asks about the device: above all for the state of its generator."

    def __init__(self):
        self.state, self.asked = torch.zeros(8, dtype=torch.uint8), []

    def get_rng_state(self, device=0):
        self.asked.append(device)
        return self.state.clone()

    def set_rng_state(self, state, device=0):
        self.asked.append(device)
        self.state = state.clone()

    def manual_seed(self, seed):
        self.state = torch.tensor(list((seed % 2**63).to_bytes(8, "little")), dtype=torch.uint8)

    def device(self, device):
        return nullcontext()

    def get_amp_supported_dtype(self):
        return [torch.bfloat16]


def set_up():
    "Make the device known to torch, for the whole process; its module."
    module = Module()
    _setup_privateuseone_for_python_backend(NAME, backend_module=module)
    torch._C._set_only_lift_cpu_tensors(True)        # torch.tensor(…, device=…) is a copy from the host
    return module


class OnDevice(torch.Tensor):
    "A tensor of the device; `raw` holds its numbers."

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw):
        return torch.Tensor._make_wrapper_subclass(
            cls, raw.shape, strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype,
            device=torch.device(NAME, 0), requires_grad=False)

    def __init__(self, raw):
        self.raw = raw

    def __repr__(self):
        return f"OnDevice({self.raw})"

    def tolist(self):
        return self.cpu().tolist()

    def data_ptr(self):
        return self.raw.data_ptr()

    def untyped_storage(self):
        return self.raw.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


class Waits:
    "What the host waited for: (operation, place in dpft) of each, while a list is open."

    def __init__(self):
        self.found = None

    def note(self, what):
        if self.found is None:
            return
        frame = sys._getframe(1)
        while frame.f_code.co_filename == __file__ or "/torch/" in frame.f_code.co_filename:
            frame = frame.f_back
        where = frame.f_code.co_filename.split("/site-packages/")[-1].rsplit("/dpft/", 1)[-1]
        self.found.append((what, f"{where}:{frame.f_lineno}"))

    @contextmanager
    def listed(self):
        "The list of what is waited for inside."
        before, self.found = self.found, []
        try:
            yield self.found
        finally:
            if before is not None:
                before.extend(self.found)
            self.found = before


WAITS = Waits()


def there(device):
    return device is not None and torch.device(device).type == NAME


def unwrapped(value, found):
    "The raw numbers of all tensors in the arguments, which are also put into a list."
    if isinstance(value, torch.Tensor):
        found.append(value)
        return value.raw if isinstance(value, OnDevice) else value
    return type(value)(unwrapped(part, found) for part in value) if isinstance(value, (list, tuple)) else value


def run(func, args, kwargs):
    "An operation on the raw numbers; RuntimeError where devices meet, a note where the host waits."
    flat = []
    raw = [unwrapped(value, flat) for value in args]
    cpu = {name: torch.device("cpu") if name == "device" and value is not None else unwrapped(value, flat)
           for name, value in kwargs.items()}
    inside, outside = [x for x in flat if isinstance(x, OnDevice)], [x for x in flat if not isinstance(x, OnDevice)]
    packet, target = func.overloadpacket, kwargs.get("device")
    to_device = there(target) or (bool(inside) and target is None)
    if packet is aten._to_copy:
        if inside and not to_device:
            WAITS.note("read: a copy to the host")
        if not inside and to_device and not kwargs.get("non_blocking"):
            WAITS.note("upload")
    elif packet in (aten.copy_, aten.copy):
        to_device = isinstance(args[0], OnDevice)
        if inside and outside:
            blocks = not to_device or not ((len(args) > 2 and args[2]) or kwargs.get("non_blocking"))
            if blocks and (not to_device or args[1].ndim):
                WAITS.note("upload" if to_device else "read: a copy to the host")
    elif packet in INDEXED:
        to_device = isinstance(args[0], OnDevice)
        for index in args[1]:
            if index is not None and index.dtype in (torch.bool, torch.uint8) and to_device:
                WAITS.note("read: a mask as an index")
            elif index is not None and isinstance(index, OnDevice) != to_device:
                WAITS.note("upload")
    elif inside:
        if any(x.ndim for x in outside):
            raise RuntimeError(f"{func}: tensors on two devices, {[(x.device, tuple(x.shape)) for x in flat]}")
        if packet in READS or (packet is aten.repeat_interleave and kwargs.get("output_size") is None):
            WAITS.note(f"read: {packet.__name__}")
    made = func(*raw, **cpu)
    return same_or_wrapped(made, flat) if to_device else made


def same_or_wrapped(made, given):
    "The results on the device; those that an operation wrote into are the tensors that it was given."
    by_id = {id(x.raw): x for x in given if isinstance(x, OnDevice)}

    def one(value):
        if isinstance(value, torch.Tensor):
            return by_id[id(value)] if id(value) in by_id else OnDevice(value)
        return type(value)(map(one, value)) if isinstance(value, (list, tuple)) else value

    return one(made)


class Device(TorchDispatchMode):
    "While it is on, tensors can be made on the device."

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})
