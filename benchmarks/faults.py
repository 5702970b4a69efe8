"""A storm of faults: runs that are broken at random, and what each of them must still do.

    python benchmarks/faults.py --count 60 --save

Each case is drawn from the seed and its number: a method, a number of ranks, a fault, the rank that it strikes and
the moment. The run must end by itself, name the rank (or host) that was struck, leave nothing behind (processes,
temporary files, shared memory), and resume to the weights of a run that nothing happened to, bit for bit, where it
had a checkpoint. `--only 17` repeats one case. Cases run beside each other (`--at-once`), so no time is measured
closely: what is checked is that every process is gone within the deadline of a step and a margin for a busy machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from support import write_result

from syncline.launcher.emulation import EmulatedCluster
from syncline.methods import METHODS
from syncline.store import RunFolder

MARK = "SYNCLINE_STORM"
DEADLINE_S = 8
GONE_S = DEADLINE_S + 5 + 20
"""The promise is deadline + 5 s; the rest is for a machine that runs several cases and more."""
STEPS, EVERY = 24, 4
LOST = {"killed": "SIGKILL", "crashed": "SIGSEGV"}
IN_RANK = ("killed", "crashed", "exits", "raises", "disk full", "stopped", "hangs", "late")
"""Struck from inside the rank, in its forward; the last one is harmless."""
ON_LAUNCHER = {"ctrl-c": signal.SIGINT, "terminated": signal.SIGTERM, "launcher killed": signal.SIGKILL}
ON_HOSTS = ("link cut", "host dies")
ON_LINKS = ("ddp", "bucketed", "ahead", "ring", "hierarchical", "all-reduce")

MODEL = '''
"""A model that breaks when and how FAULT says."""
import json, os, resource, signal, time
from pathlib import Path
from torch import nn

FAULT = json.loads(os.environ.get("FAULT", "{}"))
RANK = int(os.environ.get("RANK") or os.environ.get("PMI_RANK") or 0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3, stride=4), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 8 * 8, 10)
        )
        self.calls = 0

    def forward(self, images):
        self.calls += 1
        if FAULT and self.calls >= FAULT["call"]:
            strike() if RANK == FAULT["rank"] and self.calls == FAULT["call"] else None
            time.sleep(0.05)  # there must be something left to do when a blow from outside falls
        return self.layers(images)


def strike():
    Path(FAULT["mark"]).touch()
    kind = FAULT["kind"]
    if kind in ("killed", "crashed", "stopped"):
        names = {"killed": signal.SIGKILL, "crashed": signal.SIGSEGV, "stopped": signal.SIGSTOP}
        os.kill(os.getpid(), names[kind])
    elif kind == "exits":
        os._exit(3)
    elif kind == "raises":
        raise ArithmeticError("my own mistake")
    elif kind == "hangs":
        time.sleep(3600)
    elif kind == "late":
        time.sleep(1.5)
    elif kind == "disk full":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN) if hasattr(signal, "SIGXFSZ") else None
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))  # no file may grow any more
'''


@dataclass(frozen=True)
class Case:
    number: int
    method: str
    workers: int
    kind: str
    rank: int
    call: int
    """Which forward of the rank, those before the first step (calibration) included."""

    @property
    def hosts(self) -> bool:
        return self.kind in ON_HOSTS

    def __str__(self) -> str:
        where = "" if self.kind in ON_LAUNCHER else f" {'host' if self.hosts else 'rank'} {self.rank}"
        return f"{self.number}: {self.kind}{where}, forward {self.call}, {self.method}, {self.workers} ranks"


@dataclass
class Found:
    case: Case
    checks: dict[str, bool] = field(default_factory=dict)
    said: str = ""
    seconds: float = 0.0
    """From the blow until every process was gone."""

    @property
    def broken(self) -> list[str]:
        return [name for name, held in self.checks.items() if not held]


def draw(seed: int, number: int, kinds: tuple[str, ...] = ()) -> Case:
    rng = random.Random(f"{seed}/{number}")
    kind = rng.choice(kinds or (*IN_RANK, *ON_LAUNCHER, *ON_HOSTS))
    has_mpi = shutil.which("mpiexec") is not None
    several = [name for name, row in METHODS.items() if not row.alone and (row.world != "mpiexec" or has_mpi)]
    needs_others = kind in ("stopped", "hangs", "late")
    method = rng.choice(ON_LINKS if kind in ON_HOSTS else several if needs_others else [*several, "single"])
    workers = 1 if method == "single" else 2 if kind in ON_HOSTS else rng.choice((2, 3))
    rank = rng.randrange(1, 2) if kind in ON_HOSTS else rng.randrange(workers)
    return Case(number, method, workers, kind, rank, rng.choice((1, 3, rng.randrange(6, 20))))


def plan_of(case: Case) -> list[str]:
    given = {"checkpoint.every": EVERY, "evaluate": "false", "deadline_s": DEADLINE_S}
    words = ["--model", "storm_model:Net", "--data", "synthetic", "--threads", "1", "--global-batch", "12"]
    words += ["--steps", str(STEPS), "--method", case.method]
    return [*words, *(word for key, value in given.items() for word in ("--set", f"{key}={value}"))]


class Storm:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "storm_model.py").write_text(MODEL)
        self._weights: dict[tuple[str, int], str] = {}
        self._locks: dict[tuple[str, int], threading.Lock] = defaultdict(threading.Lock)

    def face(self, case: Case) -> Found:
        found, own = Found(case), self.folder / f"case-{case.number}"
        scratch = own / "scratch"
        scratch.mkdir(parents=True)
        run, mark = RunFolder(own / "run"), own / "struck"
        fault = {"kind": case.kind, "rank": case.rank, "call": case.call, "mark": str(mark)}
        if case.hosts or case.kind in ON_LAUNCHER:
            fault["rank"] = 0
        environment = self.environment(scratch, FAULT=json.dumps(fault))
        (own / "scratch-of-host-1").mkdir()
        memory = set(os.listdir("/dev/shm"))
        launch = self._on_hosts if case.hosts else self._here
        with launch(case, run, environment, mark) as (code, errors, seconds):
            found.said, found.seconds = _last_line(errors), seconds
            found.checks["ended as it should"] = _ended_well(case, code)
            found.checks["named"] = _named(case, code, errors)
        found.checks["gone"] = seconds <= GONE_S and _wait(lambda: not _living(str(own)), 5)
        found.checks["nothing left"] = _wait(lambda: not _leftovers(own, scratch, memory), 3)
        for pid in _living(str(own)):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        found.checks["struck"] = mark.exists()
        if run.path.exists() and (summary := run.summary()):
            found.checks["bitwise"] = summary["weights_sha256"] == self.untroubled(case)
        elif run.path.exists() and run.checkpoint_step() is not None:
            weights = self._weights_of(["--resume", str(run.path), "--json"], self.environment(scratch))
            found.checks["bitwise"] = weights == self.untroubled(case)
            found.said += "" if found.checks["bitwise"] else f" | resumed: {weights}"
        if not found.broken:
            shutil.rmtree(own, ignore_errors=True)
        return found

    def environment(self, scratch: Path, **more: str) -> dict[str, str]:
        path = os.pathsep.join([str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        return {**os.environ, MARK: str(scratch.parent), "TMPDIR": str(scratch), "PYTHONPATH": path, **more}

    def untroubled(self, case: Case) -> str:
        """The weights of the same plan without a fault."""
        key = (case.method, case.workers)
        with self._locks[key]:
            if key not in self._weights:
                own = self.folder / f"untroubled-{case.method}-{case.workers}"
                (own / "scratch").mkdir(parents=True)
                command = [*plan_of(case), "--workers", str(case.workers), "--run-dir", str(own / "run"), "--json"]
                self._weights[key] = self._weights_of(command, self.environment(own / "scratch"))
            return self._weights[key]

    def _weights_of(self, words: list[str], environment: Mapping[str, str]) -> str:
        done = subprocess.run(
            _command(words), env=dict(environment), cwd=self.folder, capture_output=True, text=True, timeout=180
        )
        if done.returncode:
            return f"exit code {done.returncode}: {_last_line(done.stderr)}"
        return str(json.loads(done.stdout)["weights_sha256"])

    @contextmanager
    def _here(
        self, case: Case, run: RunFolder, environment: dict[str, str], mark: Path
    ) -> Iterator[tuple[int, str, float]]:
        words = [*plan_of(case), "--workers", str(case.workers), "--run-dir", str(run.path)]
        log = run.path.with_name("stderr")
        with log.open("wb") as errors:
            process = subprocess.Popen(
                _command(words), env=environment, cwd=self.folder, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True,
            )  # fmt: skip
        try:
            _wait(lambda: mark.exists() or process.poll() is not None, 120)
            struck = time.monotonic()
            if case.kind in ON_LAUNCHER:
                with suppress(OSError):
                    os.kill(process.pid, ON_LAUNCHER[case.kind])
            code = _code(process)
            _wait(lambda: not _living(str(run.path.parent)), GONE_S)
            yield code, log.read_text(errors="replace"), time.monotonic() - struck
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    @contextmanager
    def _on_hosts(
        self, case: Case, run: RunFolder, environment: dict[str, str], mark: Path
    ) -> Iterator[tuple[int, str, float]]:
        """A node on each of two hosts, as on real machines; host 1 is struck. What node 0 says counts."""
        with EmulatedCluster(2, [1e9, 1e9]) as cluster:
            nodes, logs = [], []
            for host in range(2):
                place = ["--nodes", "2", "--node-rank", str(host), "--rendezvous", f"{cluster.name(0)}:29500"]
                logs.append(run.path.with_name(f"stderr-{host}"))
                if host == 1 and case.kind == "host dies":  # a dead machine cannot tidy up
                    environment = {**environment, "TMPDIR": str(run.path.with_name("scratch-of-host-1"))}
                with logs[-1].open("wb") as errors:
                    words = _command([*plan_of(case), *place, "--run-dir", str(run.path)])
                    nodes.append(
                        cluster.popen(
                            host, words, env=environment, cwd=self.folder, stdout=subprocess.DEVNULL, stderr=errors
                        )
                    )
            _wait(lambda: mark.exists() or nodes[0].poll() is not None, 120)
            struck = time.monotonic()
            cluster.cut(1) if case.kind == "link cut" else cluster.kill(1)
            with suppress(subprocess.TimeoutExpired, TimeoutError):
                nodes[0].wait(GONE_S)
            seconds = time.monotonic() - struck
            code = nodes[0].poll()
            if case.kind == "link cut":
                with suppress(subprocess.TimeoutExpired, TimeoutError):
                    nodes[1].wait(GONE_S)
            yield -1000 if code is None else code, logs[0].read_text(errors="replace"), seconds


def _command(words: list[str]) -> list[str]:
    return [str(Path(sys.executable).with_name("syncline")), "train", *words]


def _code(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(GONE_S + 60)
    except subprocess.TimeoutExpired:
        return -1000


def _ended_well(case: Case, code: int) -> bool:
    expected = {"late": (0,), "ctrl-c": (130,), "terminated": (130, 143), "launcher killed": (-signal.SIGKILL,)}
    return code in expected.get(case.kind, (1,))


def _named(case: Case, code: int, errors: str) -> bool:
    """The last line blames who was struck, and nobody else."""
    line = _last_line(errors)
    if case.kind in ("late", "launcher killed"):
        return True  # nothing to blame, or nobody left to
    if case.kind in ON_LAUNCHER:
        return "Stopped by" in line
    if case.hosts:
        return "host1" in line and "is lost" in line
    blamed = re.match(r"syncline: \[rank (\d+)", line)
    if case.kind in ("stopped", "hangs"):
        # Whoever noticed speaks; who was missing is what counts.
        missing = re.findall(r"rank (\d+)", re.sub(r"^syncline: \[rank \d+[^\]]*\]", "", line))
        return str(case.rank) in missing or (blamed is not None and blamed[1] == str(case.rank))
    word = LOST.get(case.kind, {"exits": "3", "raises": "my own mistake"}.get(case.kind, ""))
    return blamed is not None and blamed[1] == str(case.rank) and word in line


def _last_line(errors: str) -> str:
    lines = [line for line in errors.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if line.startswith("syncline: ")), lines[-1] if lines else "")


def _living(mark: str) -> list[int]:
    """Processes that were started for a case."""
    sign, found = f"{MARK}={mark}\0".encode(), []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError):
                if sign in Path("/proc", entry, "environ").read_bytes():
                    state = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[0]
                    found += [int(entry)] if state not in "ZX" else []
    return found


def _leftovers(own: Path, scratch: Path, memory: set[str]) -> list[str]:
    left = [f"process {pid}" for pid in _living(str(own))]
    left += [str(path) for path in scratch.iterdir() if not path.name.startswith("torchinductor_")]
    new = {f"/dev/shm/{name}" for name in set(os.listdir("/dev/shm")) - memory}
    return [*left, *(new - _opened(new) if new else ())]


def _opened(paths: set[str]) -> set[str]:
    """Those that some living process uses, such as another case's or another program's."""
    used: set[str] = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError):
                used |= {os.readlink(path) for path in Path("/proc", entry, "fd").iterdir()} & paths
                maps = Path("/proc", entry, "maps").read_text()
                used |= {path for path in paths if path in maps}
    return used


def _wait(condition: Callable[[], object], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return bool(holds)


def table(found: list[Found]) -> list[str]:
    """By kind of fault, each check as held / tried."""
    checks = list(dict.fromkeys(name for one in found for name in one.checks))
    lines = [
        f"| fault | tried | {' | '.join(checks)} | slowest to be gone |",
        "|---|---|" + "---|" * (len(checks) + 1),
    ]
    for kind in (*IN_RANK, *ON_LAUNCHER, *ON_HOSTS, "all"):
        own = [one for one in found if kind in (one.case.kind, "all")]
        if own:
            counts = [[one.checks[name] for one in own if name in one.checks] for name in checks]
            cells = [f"{sum(held)} / {len(held)}" for held in counts]
            lines.append(f"| {kind} | {len(own)} | {' | '.join(cells)} | {max(one.seconds for one in own):.1f} s |")
    methods = Counter(one.case.method for one in found)
    lines += ["", "Methods: " + ", ".join(f"{name} {count}" for name, count in methods.most_common()) + "."]
    broken = [one for one in found if one.broken]
    lines += ["", "All held." if not broken else f"{len(broken)} of {len(found)} cases did not hold:", ""]
    return lines + [f"- {one.case}: not {', not '.join(one.broken)}. It said: {one.said[:300]}" for one in broken]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--only", type=int, help="repeat one case, and keep its folder")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--minutes", type=float, help="begin no case after this long")
    parser.add_argument("--found", type=Path, help="file that the cases are noted in; noted ones are not run again")
    parser.add_argument("--save", action="store_true", help="save the result next to this script")
    chosen = parser.parse_args()
    # A shell starts what it puts into the background with Ctrl-C ignored, and runs would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix="storm-"))
    storm, begin = Storm(folder), time.monotonic()
    numbers = [chosen.only] if chosen.only is not None else range(chosen.first, chosen.first + chosen.count)
    known = _noted(chosen.found)

    def face(number: int) -> Found | None:
        if number in known:
            return known[number]
        if chosen.minutes is not None and time.monotonic() - begin > 60 * chosen.minutes:
            return None
        one = storm.face(draw(chosen.seed, number))
        verdict = f"NOT {', not '.join(one.broken)}" if one.broken else "held"
        print(f"{one.case}: {verdict}; {one.seconds:.1f} s; {one.said[:200]}", flush=True)
        if chosen.found:
            with chosen.found.open("a") as file:
                file.write(json.dumps(asdict(one)) + "\n")
        return one

    with ThreadPoolExecutor(chosen.at_once) as pool:
        found = [one for one in pool.map(face, numbers) if one is not None]
    if chosen.only is None:
        head = f"{len(found)} cases from seed {chosen.seed}, {chosen.at_once} at once; deadline {DEADLINE_S} s."
        write_result("faults", [head, "", *table(found)], save=chosen.save)
    if any(one.broken for one in found):
        print(f"what is left of broken cases: {folder}", file=sys.stderr)
        sys.exit(1)
    shutil.rmtree(folder)


def _noted(path: Path | None) -> dict[int, Found]:
    lines = path.read_text().splitlines() if path is not None and path.exists() else []
    noted = [json.loads(line) for line in lines]
    return {one["case"]["number"]: Found(**{**one, "case": Case(**one["case"])}) for one in noted}


if __name__ == "__main__":
    main()
