"""A disk that fails on command: each operation on a checkpoint or a ledger can be the last, or the first to find no room."""

import ctypes
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from dpft import store

CRASHED = 99                             # exit status of a process that crashed at the point it was told
FULL = OSError(28, "No space left on device")


class Disk:
    "Counts what a run does to the files of a folder, and crashes at one of these operations: before, half way, after, or as a power cut."

    def __init__(
        self,
        folder: Path,
        at: int = -1,         # number of the operation, from 0; -1: never
        mode: str = "after",  # "before" | "half" (of a write) | "after" | "cut" (after it, and what was not synced is lost) | "full"
        keep: Callable[[int, str, dict[str, bytes]], None] | None = None,  # gets number and mode of each point, and the files left there
    ):
        self.folder, self.at, self.mode, self.keep = folder, at, mode, keep
        self.done: list[tuple[str, str]] = []        # kind, name
        self.named: dict[str, dict[str, bytes]] = {} # name -> what of the file is on disk for certain
        self.certain: dict[str, dict[str, bytes]] = {}

    def operation(self, kind: str, name: str, whole: Callable[[], Any], half: Callable[[], Any] | None = None, target: str = "") -> Any:
        "Do it, or crash; what it returns, or `FULL`."
        number = len(self.done)
        self.done.append((kind, name))
        if self.mode == "full":
            return FULL if number >= self.at >= 0 and kind in ("write", "open") else whole()
        for mode, work in (("before", None), ("half", half), ("after", whole)):
            result = work() if work and (mode != "half" or self.keep or (self.mode == "half" and number == self.at)) else None
            if mode == "after":
                self._note(kind, name, target)
            self._point(number, mode)
        if kind != "write":                          # a power cut undoes a write that no sync has followed
            self._point(number, "cut")
        return result

    def _point(self, number: int, mode: str) -> None:
        if self.keep is not None:
            self.keep(number, mode, self.left(mode))
        if (number, mode) == (self.at, self.mode):
            laid(self.folder, self.left(mode))
            os._exit(CRASHED)

    def left(self, mode: str) -> dict[str, bytes]:
        "The files that a crash would leave now."
        if mode == "cut":
            return {name: file["synced"] for name, file in self.certain.items()}
        return {path.name: path.read_bytes() for path in self.folder.iterdir()}

    def _note(self, kind: str, name: str, target: str) -> None:
        "What a file system promises: contents after a sync of the file, names after a sync of the folder."
        if kind == "open":
            self.named.setdefault(name, {"synced": b""})
        elif kind == "sync" and name in self.named:
            self.named[name]["synced"] = (self.folder / name).read_bytes()
        elif kind == "rename":
            self.named[target] = self.named.pop(name)
        elif kind == "unlink":
            self.named.pop(name, None)
        if (kind == "sync" and (name == "." or name.endswith("-journal"))) or (kind == "unlink" and name.endswith("-journal")):
            self.certain = dict(self.named)

    def name(self, path: Any) -> str | None:
        "A file's name in the folder, '.' for the folder itself, None for anything elsewhere."
        found = Path(os.fsdecode(path)) if isinstance(path, (str, bytes, os.PathLike)) else None
        return None if found is None else "." if found == self.folder else found.name if found.parent == self.folder else None


def laid(folder: Path, files: dict[str, bytes]) -> None:
    "Let the folder hold these files and no others."
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        if path.name not in files:
            os.remove(path)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def raised(result: Any) -> Any:
    "The result of an operation, or its error."
    if result is FULL:
        raise FULL
    return result


class Writing:
    "A file whose writes are operations of the disk."

    def __init__(self, disk: Disk, name: str, file: Any):
        self.disk, self.name, self.file = disk, name, file

    def write(self, content: bytes) -> int:
        written = 0
        def part(size: int) -> int:
            nonlocal written
            self.file.write(content[written:size])
            self.file.flush()
            written = size
            return size
        return raised(self.disk.operation("write", self.name, lambda: part(len(content)), lambda: part(len(content) // 2)))

    def __enter__(self) -> "Writing":
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def watch_files(disk: Disk) -> None:
    "From here on the checkpoint's files are written through the disk; for a process that ends soon."
    opened: dict[int, str] = {}
    own = {name: getattr(os, name) for name in ("open", "fsync", "replace", "unlink")}

    def open_(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        name = disk.name(path)
        if name is None or (not flags & os.O_CREAT and name != "."):
            return own["open"](path, flags, *rest, **named)
        number = own["open"](path, flags, *rest, **named) if name == "." else \
            raised(disk.operation("open", name, lambda: own["open"](path, flags, *rest, **named)))
        opened[number] = name
        return number

    def fsync(number: int) -> None:
        name = opened.get(number)
        return own["fsync"](number) if name is None else disk.operation("sync", name, lambda: own["fsync"](number))

    def replace(source: Any, target: Any, **rest: Any) -> None:
        name = disk.name(source)
        return own["replace"](source, target, **rest) if rest or name is None else \
            disk.operation("rename", name, lambda: own["replace"](source, target), target=disk.name(target) or "")

    def unlink(path: Any, **rest: Any) -> None:
        name = disk.name(path)
        return own["unlink"](path, **rest) if rest or name is None or not os.path.exists(path) \
            else disk.operation("unlink", name, lambda: own["unlink"](path))

    def opening(number: int, *rest: Any) -> Any:
        file = open(number, *rest)  # noqa: SIM115  the caller closes it
        return Writing(disk, opened[number], file) if number in opened else file

    os.open, os.fsync, os.replace, os.unlink = open_, fsync, replace, unlink  # type: ignore[assignment]
    store.open = opening              # type: ignore[attr-defined]


ADDRESS, INTEGER, LONG, TEXT = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong, ctypes.c_char_p
WRITE = ctypes.CFUNCTYPE(INTEGER, ADDRESS, ADDRESS, INTEGER, LONG)
TRUNCATE = ctypes.CFUNCTYPE(INTEGER, ADDRESS, LONG)
SYNC = ctypes.CFUNCTYPE(INTEGER, ADDRESS, INTEGER)
OPEN = ctypes.CFUNCTYPE(INTEGER, ADDRESS, ADDRESS, ADDRESS, INTEGER, ADDRESS)
DELETE = ctypes.CFUNCTYPE(INTEGER, ADDRESS, ADDRESS, INTEGER)
SQLITE_FULL = 13


class FileMethods(ctypes.Structure):
    "sqlite3_io_methods, as far as it is needed by name."
    _fields_ = [("version", INTEGER), ("close", ADDRESS), ("read", ADDRESS), ("write", WRITE), ("truncate", TRUNCATE), ("sync", SYNC),
                ("rest", ADDRESS * 13)]


class System(ctypes.Structure):
    "sqlite3_vfs: what SQLite asks of an operating system."
    _fields_ = [("version", INTEGER), ("size", INTEGER), ("longest", INTEGER), ("next", ADDRESS), ("name", TEXT), ("data", ADDRESS),
                ("open", OPEN), ("delete", DELETE), ("rest", ADDRESS * 14)]


_kept: list[Any] = []                    # what C holds pointers to


def watch_sqlite(disk: Disk) -> None:
    "From here on data bases of this process are written through the disk."
    import _sqlite3
    library = ctypes.CDLL(_sqlite3.__file__)
    library.sqlite3_vfs_find.restype = ctypes.POINTER(System)
    original = library.sqlite3_vfs_find(None).contents
    system = System.from_buffer_copy(original)
    names: dict[int, str] = {}                   # of open files
    own: dict[int, FileMethods] = {}             # of each open file, as they were
    changed: dict[int, FileMethods] = {}         # by the address of what they stand for

    def write(file: int, content: int, size: int, offset: int) -> int:
        if file not in names:
            return own[file].write(file, content, size, offset)
        result = disk.operation("write", names[file], lambda: own[file].write(file, content, size, offset),
                                lambda: own[file].write(file, content, size // 2, offset))
        return SQLITE_FULL if result is FULL else result

    def truncate(file: int, size: int) -> int:
        work = partial(own[file].truncate, file, size)
        return disk.operation("truncate", names[file], work) if file in names else work()

    def sync(file: int, flags: int) -> int:
        work = partial(own[file].sync, file, flags)
        return disk.operation("sync", names[file], work) if file in names else work()

    def open_(this: int, path: int | None, file: int, flags: int, given: int) -> int:
        result = original.open(this, path, file, flags, given)
        name = disk.name(ctypes.string_at(path)) if path else None
        names.pop(file, None)
        place = ctypes.cast(file, ctypes.POINTER(ADDRESS))
        if result == 0 and place[0]:
            own[file] = FileMethods.from_address(place[0])
            if place[0] not in changed:
                changed[place[0]] = FileMethods.from_buffer_copy(own[file])
                changed[place[0]].write, changed[place[0]].truncate, changed[place[0]].sync = WRITE(write), TRUNCATE(truncate), SYNC(sync)
            place[0] = ctypes.addressof(changed[place[0]])
            if name is not None:
                names[file] = name
                if name not in disk.named:
                    disk.operation("open", name, lambda: None)
        return result

    def delete(this: int, path: int, durable: int) -> int:
        name, work = disk.name(ctypes.string_at(path)), partial(original.delete, this, path, durable)
        return work() if name is None else disk.operation("unlink", name, work)

    system.name, system.open, system.delete = b"faulty", OPEN(open_), DELETE(delete)
    _kept.extend([system, changed])
    assert library.sqlite3_vfs_register(ctypes.byref(system), 1) == 0
