"""Break runs on purpose: a crash at every write, kills at random moments, damaged files; the resumed run must not notice. `make faults`."""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # noqa: F401 – what an optimizer would import in every child
import torch.distributed as dist
import torch.nn.functional as F
from faulty_disk import CRASHED, Disk, laid, watch_files, watch_sqlite
from torch import Tensor, nn

import dpft.plan
import dpft.privacy
from dpft.datasets import TensorData
from dpft.ledger import Ledger, LedgerError
from dpft.loop import Run
from dpft.method import Context, Method
from dpft.noise import Keystream
from dpft.privacy import Request, SampledGaussian
from dpft.processes import Processes
from dpft.step import Account, Step

SCRATCH = "/dev/shm" if os.path.isdir("/dev/shm") else None
RESULTS = Path(__file__).resolve().parent.parent / "nbs" / "results" / "faults.jsonl"
SEED, STEPS = 5, 3
PLAN = [SampledGaussian(1.5, 1 / 3, STEPS, "train"), SampledGaussian(3.0, 0.5, 1, "look")]


# the run that is broken -----------------------------------------------------------------------------------------------------------


class Looking(Method):
    "Pays for one noisy sum before the first step, and then lets everything train."

    def requests(self, context: Context) -> list[Request]:
        return [Request(0.5, 1, 0.2, "look")]

    def start(self, context: Context) -> None:
        total = sum((batch[0].clamp(0, 1).mean((1, 2, 3)).sum() for batch in context.draw(0.5)), torch.zeros(()))
        context.release(total, 1.0)
        context.train_only(context.model.parameters())


def rows(seed: int = 0) -> TensorData:
    generator = torch.Generator().manual_seed(seed)
    return TensorData(torch.randn(30, 1, 4, 4, generator=generator), torch.randint(0, 3, (30,), generator=generator))


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def subject(folder: Path, seed: int | None = SEED, data: int = 0, **settings: Any) -> Run:
    "A run of a few steps with all that a checkpoint has to keep: dropout, moments, a schedule, an average, a paid look."
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.Tanh(), nn.Dropout(0.3), nn.Linear(4, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dpft.fine_tune(model, rows(data), settings.pop("method", Looking()), epsilon=settings.pop("epsilon", 4.0),
                              steps=STEPS, batch_size=10, clip=0.5, learning_rate=0.05, schedule="linear", average=0.9,
                              loss_fn=loss, accountant="rdp", physical_batch_size=4, checkpoint=folder, seed=seed,
                              progress=False, **{"checkpoint_every": 2, **settings})


def digest(*tensors: Tensor) -> str:
    return hashlib.sha256(b"".join(tensor.detach().contiguous().numpy().tobytes() for tensor in tensors)).hexdigest()


def spent(ledger: Ledger) -> dict[str, int]:
    "Sums charged, over all runs of a ledger, those of a draw that was repeated among them."
    return dict(sum((Counter(ledger.sums(run)) for run in ledger.runs()), Counter()))


log: dict[str, Any] = {"sum": ""}        # of this process: the file that is written, and the sum that is about to be hidden


def note(**event: Any) -> None:
    os.write(log["file"], (json.dumps(event) + "\n").encode())


def watch() -> None:
    "Write down every charge, every noise with the sum that it hides, and everything released, before anyone else can see it."

    def around(owner: Any, name: str, watched: Callable[..., Any]) -> None:
        setattr(owner, name, partial_method(watched, getattr(owner, name)))

    def opened(own: Callable[..., Any], account: Account, *arguments: Any) -> None:
        own(account, *arguments)
        if account.held is not None:
            note(spent=spent(account.held), event="opened")

    def spend(own: Callable[..., Any], ledger: Ledger, *arguments: Any) -> bool:
        new = own(ledger, *arguments)
        note(spent=spent(ledger), event=f"charged {arguments[1]} {arguments[2]}")
        return new

    def perturbed(own: Callable[..., Any], total: Tensor, std: Any, stream: Keystream, *context: Any) -> Tensor:
        alone = own(torch.zeros_like(total), std, stream, *context)
        note(key=stream.key("normal", "noise", *context).hex(), sum=log["sum"], noise=digest(alone))
        return own(total, std, stream, *context)

    def privatize(own: Callable[..., Any], step: Step) -> None:
        log["sum"] = digest(*step.sums.values())
        own(step)
        note(released=f"train {step.t}", value=digest(*(p.grad for p in step.engine.trains.values())), sum=log["sum"],
             rank=step.engine.processes.rank)

    def release(own: Callable[..., Any], context: Context, total: Tensor, sensitivity: float) -> Tensor:
        log["sum"] = digest(total)
        noisy = own(context, total, sensitivity)
        note(released="look", value=digest(noisy), sum=log["sum"], rank=Processes().rank)
        return noisy

    for owner, name, watched in ((Account, "open", opened), (Ledger, "spend", spend), (Step, "privatize", privatize),
                                 (Context, "release", release)):
        around(owner, name, watched)
    dpft.step.perturbed = partial(perturbed, dpft.step.perturbed)


def attempt(place: "Place", rank: int = 0, **settings: Any) -> int:
    "One attempt at the run in this process, with a note of how it ended; the exit status."
    log["file"] = os.open(place.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        run = subject(place.folder, **settings)
    except SystemExit as end:
        return end.code
    except Exception as error:
        note(refused=f"{type(error).__name__}: {error}", trace=traceback.format_exc(), rank=rank)
        return 1
    note(ended=digest(*run.model.parameters()), mechanisms=[repr(m) for m in run.mechanisms], rank=rank)
    return 0


def partial_method(watched: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments, **named: watched(own, *arguments, **named)


# processes ------------------------------------------------------------------------------------------------------------------------


class Place:
    "Where one run is broken and goes on: its folder, and the log of what it did, which no crash touches."

    def __init__(self, root: Path):
        self.root, self.folder, self.log, self.disk_log, self.said = (root, *(root / name for name in ("run", "log", "disk", "said")))

    def child(self, work: Callable[[], int], rank: int = 0, size: int = 1, disk: Disk | None = None) -> int:
        "Fork a process that does its share of the work, whose result is its exit status; its number."
        number = os.fork()
        if number:
            return number
        status = 1
        try:
            os.dup2(os.open(self.said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
            if size > 1:
                dist.init_process_group("gloo", init_method=f"file://{self.root}/meeting", rank=rank, world_size=size)
            watch()
            if disk is not None and rank == 0:
                watch_files(disk)
                watch_sqlite(disk)
            status = work()
            if disk is not None and rank == 0:
                self.disk_log.write_text(json.dumps(disk.done))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def go(
        self,
        size: int = 1,                                          # processes
        disk: Disk | None = None,                               # that the first of them writes to
        kill: Callable[[list[int]], None] | None = None,        # gets their numbers
        of_rank: Callable[[int], dict[str, Any]] | None = None, # settings of one process alone
        **settings: Any,
    ) -> list[int]:                                             # the exit status of each
        "One attempt at the run."
        (self.root / "meeting").unlink(missing_ok=True)
        sys.stdout.flush()
        numbers = [self.child(partial(attempt, self, rank, **settings, **(of_rank(rank) if of_rank else {})), rank, size, disk)
                   for rank in range(size)]
        if kill is not None:
            kill(numbers)
        return self.ended(numbers)

    def ended(self, numbers: list[int], seconds: float = 120) -> list[int]:
        "The exit statuses of processes, of which those that wait for one that never came are killed."
        statuses, begun = {}, time.monotonic()
        while len(statuses) < len(numbers):
            for number in set(numbers) - set(statuses):
                found, status = os.waitpid(number, os.WNOHANG)
                if found:
                    statuses[number] = os.waitstatus_to_exitcode(status)
            if time.monotonic() - begun > seconds or (any(statuses.values()) and not self.log.exists() and time.monotonic() - begun > 1):
                for number in set(numbers) - set(statuses):
                    os.kill(number, signal.SIGKILL)          # it waits for one that never came
            time.sleep(0.002)
        return [statuses[number] for number in numbers]

    @property
    def events(self) -> list[dict[str, Any]]:
        "What was done so far, in order; a line that is still being written comes next time."
        return [json.loads(line) for line in self.log.read_text().rpartition("\n")[0].splitlines()] if self.log.exists() else []

    def spent(self) -> dict[str, int]:
        "What the ledger says."
        return self.asked(spent, {})

    def over(self) -> bool:
        "Whether the run has ended and left no state, so that the same command would begin another."
        ended = self.asked(lambda ledger: bool(ledger.runs()) and all(map(ledger.finished, ledger.runs())), False)
        return ended and not (self.folder / "state.pt").exists()

    def asked(self, question: Callable[[Ledger], Any], otherwise: Any) -> Any:
        "An answer of a copy of the ledger, so that reading mends nothing; without a ledger, the other."
        path = self.folder / "ledger.sqlite"
        if not path.exists():
            return otherwise
        with tempfile.TemporaryDirectory(dir=SCRATCH) as copy:
            for file in self.folder.glob("ledger.sqlite*"):
                shutil.copy(file, copy)
            with Ledger(Path(copy) / path.name) as ledger:
                return question(ledger)


# judging --------------------------------------------------------------------------------------------------------------------------


def falls(events: list[dict[str, Any]]) -> list[str]:
    "Moments at which the spent budget was lower than before."
    most: Counter[str] = Counter()
    found = []
    for event in events:
        now = event.get("spent", most)
        found += [f"{name} fell from {count} to {now.get(name, 0)}" for name, count in most.items() if now.get(name, 0) < count]
        most |= Counter(now)
    return found


def served_twice(events: list[dict[str, Any]]) -> list[str]:
    "Noise that hid two different sums: of one process, or added up over all."
    sums: dict[str, set[str]] = {}
    outs: dict[str, set[str]] = {}
    keys: list[str] = []
    for event in events:
        if "key" in event:
            sums.setdefault("key " + event["key"], set()).add(event["sum"])
            sums.setdefault("noise " + event["noise"], set()).add(event["sum"])
            keys.append(event["key"])
        elif event.get("rank") == 0 and "value" in event:
            for key in keys:
                outs.setdefault(key, set()).add(event["value"])
            keys = []
        elif "event" in event and event["event"] == "opened":
            keys = []                                        # of another attempt, which released nothing with them
    return [key for found in (sums, outs) for key, values in found.items() if len(values) > 1]


def judged(place: Place, wanted: dict[str, Any], before: dict[str, int], broken: int, over: bool = False, **record: Any) -> dict[str, Any]:
    """One line: what happened at a point, and everything that is wrong with it.

    Of a run that was over, a process may have been killed before it could say so."""
    events, after = place.events, place.spent()
    released = {(event["released"], event["value"]) for event in events[:broken] if "released" in event and event["rank"] == 0}
    ended = [event for event in events[broken:] if "ended" in event] or [event for event in events if "ended" in event]
    identical = ([(event["ended"], event["mechanisms"]) for event in ended]
                 == [wanted["ended"]] * (len(ended) if over else record["processes"]))
    refused = [event["refused"] for event in events[broken:] if "refused" in event]
    wrong = falls(events) + served_twice(events)
    wrong += [f"{len(released)} released, {before} in the ledger"] * (len(released) > sum(before.values()))
    wrong += [f"spent fell over the crash: {before} to {after}"] * any(after.get(name, 0) < count for name, count in before.items())
    if wanted.get("bits", True):
        wrong += ["not identical"] * (not identical and not refused) + [f"spent {after}"] * (after != wanted["spent"])
    return {**record, "identical": identical, "refused": refused[0] if refused else "", "wrong": wrong,
            "released": len(released), "spent_before": sum(before.values()), "spent_after": sum(after.values())}


def unbroken(root: Path, size: int = 1, **settings: Any) -> dict[str, Any]:
    "How the run ends when nobody disturbs it: weights, mechanisms, what was spent, how much it did, to the disk too."
    place = Place(root)
    root.mkdir()
    assert place.go(size, Disk(place.folder), **settings) == [0] * size, place.events
    ended = [(event["ended"], event["mechanisms"]) for event in place.events if "ended" in event]
    assert len(set(map(repr, ended))) == 1
    return {"ended": ended[0], "spent": place.spent(), "events": len(place.events), "disk": json.loads(place.disk_log.read_text())}


# the faults -----------------------------------------------------------------------------------------------------------------------


def crash_at(root: Path, at: int, mode: str, size: int, wanted: dict[str, Any]) -> dict[str, Any]:
    "The process that keeps the files crashes at one operation on them, or finds the disk full from there on; the run is started again."
    place, began = Place(root), time.perf_counter()
    root.mkdir()
    statuses = place.go(size, Disk(place.folder, at, mode))
    before, broken = place.spent(), len(place.events)
    assert statuses[0] == CRASHED or mode == "full", (statuses, place.events)
    said = [event["refused"] for event in place.events if "refused" in event]
    place.go(size)
    kind, name = wanted["disk"][at]
    record = judged(place, wanted, before, broken, kind="crash" if mode != "full" else "full disk", where=f"{mode} {at}: {kind} {name}",
                    operation=kind, file=name, mode=mode, processes=size, seconds=round(time.perf_counter() - began, 3))
    silent = mode == "full" and not any("No space" in text or "full" in text for text in said)
    return record | {"wrong": record["wrong"] + [f"ended with {said}"] * silent}


def points_of(root: Path, size: int, **settings: Any) -> list[dict[str, Any]]:
    "What a crash would leave at every operation of one run: the files, and how much had happened; the same twice is one."
    place, found = Place(root), root / "points"
    found.mkdir(parents=True)
    known: dict[Any, int] = {}

    def keep(number: int, mode: str, files: dict[str, bytes]) -> None:
        point = (tuple(sorted(files.items())), place.log.stat().st_size if place.log.exists() else 0)
        if point not in known:
            known[point] = len(known)
            laid(found / str(known[point]), files)
            (found / f"{known[point]}.json").write_text(json.dumps({"at": number, "mode": mode, "bytes": point[1]}))

    assert place.go(size, Disk(place.folder, keep=keep), **settings) == [0] * size, place.events
    return [json.loads(path.read_text()) | {"files": path.with_suffix("")}
            for path in sorted(found.glob("*.json"), key=lambda path: int(path.stem))]


def go_on_from(root: Path, points: list[dict[str, Any]], log: bytes, size: int, wanted: dict[str, Any]) -> Iterator[dict[str, Any]]:
    "The run is started on what a crash would have left, at each of these points; the same processes do one after the other."
    places = [Place(root / str(number)) for number in range(len(points))]
    for place, point in zip(places, points, strict=True):
        shutil.copytree(point["files"], place.folder)
        place.log.write_bytes(log[:point["bytes"]])
    found, began = [(place.spent(), len(place.events)) for place in places], time.perf_counter()
    together = Place(root)
    numbers = [together.child(lambda rank=rank: max(attempt(place, rank) for place in places), rank, size) for rank in range(size)]
    together.ended(numbers, seconds=600)
    seconds = round((time.perf_counter() - began) / len(points), 3)
    for place, point, (before, broken) in zip(places, points, found, strict=True):
        kind, name = wanted["disk"][point["at"]]
        yield judged(place, wanted, before, broken, kind="crash point", where=f"{point['mode']} {point['at']}: {kind} {name}",
                     at=point["at"], operation=kind, file=name, mode=point["mode"], processes=size, seconds=seconds)


def kill_at(root: Path, chance: random.Random, size: int, wanted: dict[str, Any], seed: int | None = SEED,
            moment: int | None = None) -> dict[str, Any]:
    "One process, or of two one or both, gets SIGKILL at a random moment, or when so much has happened."
    place, began = Place(root), time.perf_counter()
    root.mkdir()
    moment = chance.randrange(wanted["events"]) if moment is None else moment
    victims = chance.choice([[0], [1], [0, 1]]) if size > 1 else [0]
    pause = chance.random() * 0.02

    def kill(numbers: list[int]) -> None:
        while len(place.events) < max(moment, size - 1):     # two have to meet first
            time.sleep(0.001)
        time.sleep(pause)
        for victim in victims:
            os.kill(numbers[victim], signal.SIGKILL)

    statuses = place.go(size, kill=kill, seed=seed)
    before, broken = place.spent(), len(place.events)
    seen = ["its end" if "ended" in event else event.get("event") or event.get("released") or "noise"
            for event in place.events if "refused" not in event]
    over = place.over()
    if any(statuses) and not over:
        place.go(size, seed=seed)
    return judged(place, wanted if seed is not None else {**wanted, "bits": False}, before, broken, over, kind="kill",
                  where=f"after {seen[-1] if seen else 'its start'}, process {' and '.join(map(str, victims))}",
                  killed=-9 in statuses, processes=size, seeded=seed is not None, seconds=round(time.perf_counter() - began, 3))


def told_to_stop(root: Path, moment: int, size: int, wanted: dict[str, Any]) -> dict[str, Any]:
    "SIGTERM reaches one process, of two the second, when so much has happened."
    place, began = Place(root), time.perf_counter()
    root.mkdir()

    def tell(numbers: list[int]) -> None:
        while len(place.events) < moment:
            time.sleep(0.001)
        os.kill(numbers[-1], signal.SIGTERM)

    statuses = place.go(size, kill=tell)
    said, state = place.said.read_text(), place.folder / "state.pt"
    before, broken = place.spent(), len(place.events)
    late, once = statuses == [0] * size, said.count("dpft: told to stop; the state after step") == 1
    fits = late or (statuses == [128 + signal.SIGTERM] * size and once and state.exists())
    if not late:
        place.go(size)
    record = judged(place, wanted, before, broken, kind="SIGTERM", where=f"after {moment} events", processes=size, in_time=not late,
                    said=said.replace(str(place.folder), "…").strip(), seconds=round(time.perf_counter() - began, 3))
    return record | {"wrong": record["wrong"] + [f"left with {statuses}, saying {said}"] * (not fits)}


COMMAND = {"data": "digits", "model": "mlp", "method": "full", "noise-multiplier": "1.1", "steps": "100", "batch-size": "60", "seed": "0",
           "accountant": "rdp", "device": "cpu", "score": "none"}


def program(words: list[str], size: int, said: Path) -> subprocess.Popen:
    "`dpft` in a process of its own, or under torchrun in several; what it says goes into the file."
    several = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(size), "-m"] if size > 1 else []
    with said.open("w") as file:
        return subprocess.Popen([sys.executable, "-m", *several, "dpft", *words], stdout=subprocess.DEVNULL, stderr=file)


def commanded(root: Path, size: int, start: Callable[..., Any] = program) -> dict[str, Any]:
    "SIGTERM reaches the program itself: `dpft train`, or torchrun with two of it; and the same command again."
    began, ledger = time.perf_counter(), root / "checkpoint" / "ledger.sqlite"
    root.mkdir(exist_ok=True)
    words = ["train", "--no-progress", f"--output={root}/model", f"--checkpoint={root}/checkpoint",
             *(f"--{name}={value}" for name, value in COMMAND.items())]
    before: dict[str, int] = {}
    first = start(words, size, root / "first.err")
    while first.poll() is None and before.get("train", 0) < 2:
        time.sleep(0.05)
        with suppress(ValueError), Ledger(ledger, read_only=True) as book:
            before = spent(book)
    first.terminate()
    first.wait(timeout=120)
    said = [line for line in (root / "first.err").read_text().splitlines() if line.startswith("dpft:")]
    again = start(words, size, root / "again.err")
    again.wait(timeout=240)
    with Ledger(ledger, read_only=True) as book:
        after, ended = spent(book), all(map(book.finished, book.runs()))
    fits = first.returncode != 0 and len(said) == 1 and "told to stop; the state after step" in said[0] and again.returncode == 0
    wrong = ["not as it should"] * (not fits) + ["another price"] * (after != {"train": int(COMMAND["steps"])} or not ended)
    return {"kind": "SIGTERM", "where": "torchrun" if size > 1 else "dpft train", "processes": size, "identical": False, "in_time": True,
            "refused": "", "said": " / ".join(said).replace(str(root), "…"), "wrong": wrong, "released": 0,
            "spent_before": sum(before.values()), "spent_after": sum(after.values()), "seconds": round(time.perf_counter() - began, 3)}


# damage ---------------------------------------------------------------------------------------------------------------------------


def broken_twice(root: Path) -> tuple[Path, Path]:
    "One run as two crashes would leave it: with a checkpoint of step 1 and of step 2, each charged for one step more."
    found = points_of(root, 1, checkpoint_every=1)
    done, whole = json.loads((root / "disk").read_text()), (root / "log").read_bytes()
    saved = [at for at, operation in enumerate(done) if operation == ["rename", "state.part"]]
    for name, at in zip(("early", "late"), saved, strict=False):
        charged = next(number for number, (kind, _) in enumerate(done) if number > at and kind == "unlink")
        point = next(point for point in found if (point["at"], point["mode"]) == (charged, "after"))
        shutil.copytree(point["files"], root / name / "run")
        (root / name / "log").write_bytes(whole[:point["bytes"]])
    return root / "early", root / "late"


def changed(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes())) and None


def flipped(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 16]) + content[place + 1:]


def by_hand(statement: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        with closing(sqlite3.connect(folder / "ledger.sqlite")) as connection, connection:
            connection.execute(statement)
    return change


def damages(early: Path) -> dict[str, Callable[[Path], None]]:
    "What may happen to a folder between a crash and the next start; `early` is the same run one step before."
    def older(name: str) -> Callable[[Path], None]:
        return lambda folder: shutil.copy(early / name, folder / name) and None
    chance = random.Random(1)
    half = {name: changed(name, lambda content: content[:len(content) // 2]) for name in ("ledger.sqlite", "state.pt", "run.json")}

    def flip(name: str, share: float) -> Callable[[Path], None]:
        return changed(name, lambda content: flipped(content, int(share * len(content))))
    flips = {f"{name}, a bit flipped at {share:.1%}": flip(name, share)
             for name in ("state.pt", "run.json", "ledger.sqlite") for share in sorted(chance.random() for _ in range(6))}
    return {"checkpoint of a step earlier": older("state.pt"), "checkpoint deleted": lambda folder: (folder / "state.pt").unlink(),
            "ledger of a step earlier": older("ledger.sqlite"), "ledger deleted": lambda folder: (folder / "ledger.sqlite").unlink(),
            "ledger and checkpoint deleted": lambda folder: [(folder / name).unlink() for name in ("ledger.sqlite", "state.pt")] and None,
            "secret deleted": lambda folder: (folder / "run.json").unlink(),
            "ledger emptied": changed("ledger.sqlite", lambda content: b""),
            **{f"{name} cut in half": damage for name, damage in half.items()}, **flips,
            "ledger, a charge changed": by_hand("UPDATE ledger SET step = 7 WHERE number = 3"),
            "ledger, the last charge removed": by_hand("DELETE FROM ledger WHERE number = (SELECT max(number) FROM ledger)"),
            "other data": lambda folder: None}


def damaged(root: Path, base: Path, name: str, damage: Callable[[Path], None], wanted: dict[str, Any]) -> dict[str, Any]:
    "The run is started on a damaged folder: it ends as it should, or is refused with a sentence, and nothing is unspent."
    shutil.copytree(base, root)
    place, began = Place(root), time.perf_counter()
    before, broken = place.spent(), len(place.events)
    damage(place.folder)
    place.go(checkpoint_every=1, data=1 if name == "other data" else 0)
    events = place.events
    refused = [event["refused"] for event in events[broken:] if "refused" in event]
    if refused:
        sentence = refused[0].startswith(("CheckpointError: ", "LedgerError: ")) and "\n" not in refused[0]
        return {"kind": "damage", "where": name, "processes": 1, "identical": False, "refused": refused[0].replace(str(place.folder), "…"),
                "wrong": ["no sentence"] * (not sentence), "spent_before": sum(before.values()), "spent_after": sum(before.values()),
                "seconds": round(time.perf_counter() - began, 3)}
    paid_anew = {**wanted, "bits": name != "secret deleted"}    # a run of its own, charged by itself
    earlier = "ledger" in name                                  # what the ledger says now is what somebody made of it
    record = judged(place, paid_anew, before, broken, kind="damage", where=name, processes=1, seconds=round(time.perf_counter() - began, 3))
    return record | {"wrong": [text for text in record["wrong"] if not (earlier and " fell " in text)]}


def flipped_ledgers(folder: Path, every: int) -> Iterator[dict[str, Any]]:
    "One bit of each byte of a ledger is flipped: it says what was spent, or is refused."
    path, counts, began = folder / "flipped.sqlite", Counter(), time.perf_counter()
    with Ledger(path) as ledger:
        ledger.begin("run", {"mechanisms": [vars(mechanism) for mechanism in PLAN]})
        for step in range(STEPS):
            ledger.spend("run", "train", step, f"{step:064x}")
    whole, wrong = path.read_bytes(), []
    for place in range(0, len(whole), every):
        path.write_bytes(flipped(whole, place))
        try:
            with Ledger(path) as ledger:
                counts["harmless"] += 1
                if spent(ledger) != {"train": STEPS} or ledger.spend("run", "train", 1, f"{1:064x}"):
                    wrong.append(f"byte {place}")
        except LedgerError:
            counts["refused"] += 1
    looked = f"{sum(counts.values())} of {len(whole)} bytes"
    yield {"kind": "flipped ledger", "where": looked, "processes": 1, "identical": False,
           "refused": f"{counts['refused']} refused, {counts['harmless']} harmless", "wrong": wrong, "spent_before": STEPS,
           "spent_after": STEPS, "seconds": round(time.perf_counter() - began, 3)}


def disagreeing(root: Path, what: str, settings: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
    "Two processes that differ are refused, both with one sentence, and nothing is charged."
    place, began = Place(root), time.perf_counter()
    root.mkdir()
    place.go(2, of_rank=settings)
    refused = {event["refused"] for event in place.events if "refused" in event}
    fits = len(refused) == 1 and next(iter(refused)).startswith("ProcessError: process 1 has another") and not place.spent()
    return {"kind": "two processes differ", "where": what, "processes": 2, "identical": False, "refused": " / ".join(sorted(refused)),
            "wrong": ["not refused alike"] * (not fits), "spent_before": 0, "spent_after": sum(place.spent().values()),
            "seconds": round(time.perf_counter() - began, 3)}


# all of them ----------------------------------------------------------------------------------------------------------------------


def points(folder: Path, full: bool, wanted: dict[int, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    "All fault points, or a part of them that takes seconds."
    chance, number = random.Random(0), count()

    def place() -> Path:
        return folder / str(next(number))

    for size, every, crashes, disks, kills in ((1, 1, 12, 12, 44), (2, 8, 3, 2, 20)) if full else ((1, 16, 3, 2, 4), (2, 100, 1, 0, 2)):
        base = place()
        last = len(wanted[size]["disk"]) - 1                     # after it the run has ended, and nothing is left to go on with
        chosen = [point for point in points_of(base, size) if (point["at"], point["mode"]) != (last, "after")][::every]
        yield from go_on_from(place(), chosen, (base / "log").read_bytes(), size, wanted[size])
        for _ in range(crashes):
            yield crash_at(place(), chance.randrange(last), chance.choice(["before", "after"]), size, wanted[size])
        for i in range(disks):
            yield crash_at(place(), i * last // disks, "full", size, wanted[size])
        for i in range(kills):
            yield kill_at(place(), chance, size, wanted[size], None if i % 4 == 3 else SEED)
        for moment in range(7, wanted[size]["events"] - 10, 1 if full else 20):
            yield told_to_stop(place(), moment, size, wanted[size])
    for size in (1, 2) if full else ():
        yield commanded(place(), size)
    early, late = broken_twice(folder / "damage")
    for name, damage in [*damages(early / "run").items()][::1 if full else 3]:
        yield damaged(place(), late, name, damage, wanted[1])
    differing = {"data": lambda rank: {"data": rank}, "seeds": lambda rank: {"seed": rank}, "budgets": lambda rank: {"epsilon": 4.0 + rank}}
    yield from flipped_ledgers(folder, 3 if full else 151)
    for what, settings in [*differing.items()][:None if full else 1]:
        yield disagreeing(place(), what, settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="every operation and all kills")
    parser.add_argument("--output", type=Path, default=None, help="records, one line each")
    parser.add_argument("--verbose", action="store_true", help="print every record, not only what is wrong")
    parser.add_argument("--one", type=int, default=None, help="crash at this operation alone, and tell")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    dpft.plan.plan_budget = lambda *asked: PLAN                                                # nothing is solved, and priced once
    dpft.privacy.epsilon(PLAN, 0.5 / 30, "rdp")
    with tempfile.TemporaryDirectory(dir=SCRATCH) as folder:
        wanted = {size: unbroken(Path(folder) / f"unbroken {size}", size) for size in ((1, 2) if asked.one is None else (1,))}
        if asked.one is not None:
            record = crash_at(Path(folder) / "one", asked.one, "half", 1, wanted[1])
            print(f"{len(wanted[1]['disk'])} operations in a run; crashed in number {asked.one}, {record['operation']} {record['file']}\n"
                  f"released {record['released']}, in the ledger {record['spent_before']} before the second start, {record['spent_after']} "
                  f"at the end\nbit for bit the unbroken run: {record['identical']}; wrong: {record['wrong'] or 'nothing'}")
            return
        records = []
        for record in points(Path(folder), asked.full, wanted):
            records.append(record)
            if record["wrong"] or asked.verbose:
                print(json.dumps(record), flush=True)
    if asked.output:
        asked.output.write_text("".join(json.dumps(record) + "\n" for record in records))
    print(f"{len(records)} faults, {sum(bool(record['wrong']) for record in records)} of them with something wrong")


if __name__ == "__main__":
    main()
