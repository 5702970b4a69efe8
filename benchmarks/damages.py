"""Damage, malice and strangers, counted: how much was tried, and how much of it held.

    python benchmarks/damages.py --save

Plans, studies, event logs, run files and checkpoints are changed at random, by seed: bytes lost, changed or put in,
and values of other kinds. A verb or a reader must take what is left or refuse it with one of our errors. Another
exception, or a checkpoint that loads although a byte of it changed, did not hold. What was written to do harm must
neither run, nor act on the terminal or a page, nor keep a reader waiting. And node 0 must stay up whatever strangers
say, and let none in. What they say, and the small runs, are those of the tests.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from support import write_result

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers import on_threads
from test_checkpoint import NEWEST, PLAN, as_earlier_version, loaded
from test_damaged_state import COMPARED, SUMMARY, WEIRD, make, places
from test_step import make_worker, shard_of
from test_strangers import SAID, cluster, finish, frame, hello, knock, visit

from syncline import blocks
from syncline.cli import main as command_line
from syncline.errors import PlanError, RunFolderError, SynclineError
from syncline.plan import Plan, parse_plan
from syncline.spans import EventLog
from syncline.study.file import Study, load_study
from syncline.training import checkpoint
from syncline.training.checkpoint import Progress
from syncline.training.step import train_step

ESCAPE = "\x1b[31m"
EVIL = f"<script>alert(1)</script><!-- ![x](http://127.0.0.1/x.png) | {ESCAPE}\u202e"
RUN_FILES = ("run.json", "summary.json", "machine.json", "plan.toml")
WAIT_S = 60
Counts = dict[str, list[bool]]


def say(*words: object) -> tuple[int | str, str]:
    """Exit code of a verb, or the exception that it ended in, and what it printed."""
    sys.argv = ["syncline", *map(str, words)]
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        try:
            command_line()
            code: int | str = 0
        except SystemExit as leaving:
            code = leaving.code or 0
        except Exception as error:
            code = repr(error)
    return code, shown.getvalue()


def held(*words: object) -> bool:
    """It ended with one of our exit codes, without a traceback, and nothing in its output acts on a terminal."""
    code, shown = say(*words)
    fine = code in (0, 1, 2) and "Traceback" not in shown and ESCAPE not in shown
    if not fine:
        print(f"NOT held: {' '.join(map(str, words))}: {code}\n{shown[-600:]}", file=sys.stderr)
    return fine


def damaged(rng: random.Random, content: bytes) -> bytes:
    start = rng.randrange(len(content))
    stop = rng.choice([start, start + 1, start + 1, rng.randrange(start, len(content) + 1), len(content)])
    return content[:start] + rng.randbytes(rng.choice([0, 1, 1, 6])) + content[stop:]


def damaged_json(rng: random.Random, content: bytes) -> bytes:
    if rng.random() < 0.3:
        return damaged(rng, content)
    document = json.loads(content)
    *way, last = rng.choice(list(places(document)))
    holder = document
    for key in way:
        holder = holder[key]
    if rng.random() < 0.7:
        holder[last] = rng.choice(WEIRD)
    else:
        del holder[last]
    return json.dumps(document).encode()


def plans(rng: random.Random, count: int) -> Iterator[tuple[str, bool]]:
    values = [*WEIRD, -(10**400), "auto", "0", "bucketed", [1, 2], {"x": {"y": 1}}, 0.5, 3, False]
    for _ in range(count):
        given = {key: rng.choice(values) for key in rng.sample(sorted(Plan.model_fields), rng.randint(1, 4))}
        yield "plans", refuses_or_takes(lambda: parse_plan(given), PlanError)  # noqa: B023


def studies(rng: random.Random, count: int, folder: Path) -> Iterator[tuple[str, bool]]:
    lab = Path(sys.modules[Study.__module__].__file__ or "").parents[1] / "labs/cs744/lab.toml"
    path = folder / "lab.toml"
    for _ in range(count):
        lines = lab.read_text().splitlines()
        for number in rng.sample(range(len(lines)), 2):
            key, equals, _rest = lines[number].partition(" = ")
            odd = rng.choice(["inf", "-1", '"x"', "[]", "{}", "9" * 30, "true", '""', "nan", "1e400"])
            other = damaged(rng, f"{lines[number]} ".encode()).decode("latin1")
            lines[number] = f"{key} = {odd}" if equals else other
        path.write_text("\n".join(lines))
        yield "studies", refuses_or_takes(lambda: load_study(str(path)), SynclineError)


def refuses_or_takes(call: Callable[[], object], refusal: type[Exception]) -> bool:
    try:
        call()
    except refusal:
        return True
    except Exception as error:
        print(f"NOT held: {error!r}", file=sys.stderr)
        return False
    return True


def logs(rng: random.Random, count: int, run: Path) -> Iterator[tuple[str, bool]]:
    for number in range(count):
        path = rng.choice(sorted((run / "events").iterdir()))
        before = path.read_bytes()
        path.write_bytes(damaged(rng, before))
        yield "event logs", held("trace" if number % 4 == 0 else "explain", run)
        path.write_bytes(before)


def run_files(rng: random.Random, count: int, runs: Path) -> Iterator[tuple[str, bool]]:
    for number in range(count):
        run = rng.choice([runs / "trained", runs / "compared"])
        path = run / RUN_FILES[number % len(RUN_FILES)]
        before = path.read_bytes()
        path.write_bytes((damaged if path.suffix == ".toml" else damaged_json)(rng, before))
        verbs = [["runs"], ["explain", run], ["trace", run], ["report", run, "-o", runs / "page"]]
        yield "run files", held(*rng.choice(verbs))
        path.write_bytes(before)


def write_checkpoints(folder: Path) -> None:
    def live(comm: Any, log: EventLog) -> None:
        worker = make_worker("batch norm", "bucketed", comm, log)
        for step in range(3):
            train_step(worker, shard_of(comm, 8, step))
            checkpoint.save(folder, PLAN, worker, Progress(step=step + 1, step_in_epoch=step + 1), comm)

    on_threads(2, live)


def checkpoints(rng: random.Random, count: int, folder: Path) -> Iterator[tuple[str, bool]]:
    good = folder / "good"
    write_checkpoints(good)
    for _ in range(count):
        own = shutil.copytree(good, folder / "own")
        path = rng.choice(sorted((own / NEWEST).iterdir()))
        before = path.read_bytes()
        path.write_bytes(damaged(rng, before))
        found = loaded(own)
        refused = [isinstance(one, RunFolderError) for one in found]
        fine = all(refused) or (says_the_same(path.read_bytes(), before) and not any(refused))
        if not fine:
            print(f"NOT held: {path.name}, {refused}: {path.read_bytes()[:3000]!r}", file=sys.stderr)
        yield "checkpoints", fine
        shutil.rmtree(own)


def says_the_same(content: bytes, before: bytes) -> bool:
    """A space more in the manifest is no damage."""
    if content == before:
        return True
    try:
        return bool(json.loads(content) == json.loads(before))
    except ValueError:
        return False


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self.canary), "w"))


def malice(folder: Path, runs: Path) -> Iterator[tuple[str, bool]]:
    canary, kind = folder / "canary", "malicious inputs"
    for earlier in (False, True):
        own = folder / f"evil-{earlier}"
        write_checkpoints(own)
        if earlier:
            as_earlier_version(own)
        for how in (pickle.dump, torch.save):
            with (own / NEWEST / "rank-0.pt").open("wb") as file:
                how({"parameters": Payload(canary)}, file)
            yield kind, all(isinstance(one, RunFolderError) for one in loaded(own)) and not canary.exists()
    row = {**COMPARED["rows"][0], "label": EVIL}
    make(runs / "evil", "compare", {**COMPARED, "rows": [row], "marks": [f"link: {EVIL}"]}, EVIL)
    for verb in (["runs"], ["explain", runs / "evil"], ["trace", runs / "evil"]):
        yield kind, held(*verb)
    fine = held("report", runs / "evil", "-o", folder / "page")
    for name in ("index.html", "report.md"):
        shown = (folder / "page" / name).read_text()
        # An image in Markdown's way is plain text on a page.
        acts = ["<script>alert", ESCAPE, *(["![x]("] if name.endswith(".md") else [])]
        yield kind, fine and not any(text in shown for text in acts)
    for name in (*RUN_FILES, ".lock", "events/rank-0.jsonl"):
        for trap in ("pipe", "device", "folder", "deep"):
            run = shutil.copytree(runs / "trained", runs / "trap")
            (run / name).unlink(missing_ok=True)
            set_trap(run / name, trap)
            yield kind, held("explain", run) and held("runs")
            shutil.rmtree(run)
    for body in (b"", bytes(8), b"\xff" * 64, blocks.MARK * 50):
        run = shutil.copytree(runs / "trained", runs / "trap")
        size = blocks.HEAD.pack(blocks.MARK, 2**32 - 1, 0)
        (run / "events" / "rank-0.blocks").write_bytes(size + body)
        yield kind, held("explain", run)
        shutil.rmtree(run)


def set_trap(path: Path, trap: str) -> None:
    if trap == "pipe":
        os.mkfifo(path)
    elif trap == "device":
        path.symlink_to("/dev/zero")
    elif trap == "folder":
        path.mkdir()
    else:
        path.write_text("[" * 200_000)


def messages(rng: random.Random, count: int) -> Iterator[tuple[str, bool]]:
    """Each before all nodes have come, and again while they run."""
    odd = [None, True, -1, 10**30, "x" * 300, [], {}, "\ud800", 1.5]
    made: list[bytes] = []
    for _ in range(count):
        key = rng.choice(["nodes", "node_rank", "versions", "plan"])
        made += [frame(hello(**{key: rng.choice(odd)})), frame(knock(rng.choice(odd), rng.choice(odd)))]
        made += [damaged(rng, frame(knock())), rng.randbytes(rng.randrange(5000))]
    with cluster(2, join_timeout_s=300.0) as nodes:
        first = nodes.join(0)
        for said in [*SAID.values(), *made]:
            yield "messages of strangers", b"proven" not in visit(nodes, said) and not first.done()
        nodes.join(1).result(WAIT_S)
        first.result(WAIT_S)
        nodes.on_all(lambda member: member.next_attempt())
        for said in [*SAID.values(), *made]:
            heard = b"proven" in visit(nodes, said)
            yield "messages of strangers", not heard and all(member.verdict is None for member in nodes.members)
        finish(nodes)
        yield "runs that went on to a good end", True


def table(counts: Counts) -> list[str]:
    lines = ["| what | tried | held |", "|---|---|---|"]
    return lines + [f"| {what} | {len(all_held)} | {sum(all_held)} |" for what, all_held in counts.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--share", type=float, default=1.0, help="of the usual counts")
    parser.add_argument("--save", action="store_true", help="save the result next to this script")
    chosen = parser.parse_args()
    rng, counts = random.Random(chosen.seed), Counts()
    signal.signal(signal.SIGALRM, too_long)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        folder, runs = Path(name), Path(name, "runs")
        make(runs / "trained", summary=SUMMARY)
        make(runs / "compared", "compare", COMPARED)
        count = {what: max(1, round(n * chosen.share)) for what, n in USUAL.items()}
        for found in (
            plans(rng, count["plans"]), studies(rng, count["studies"], folder),
            logs(rng, count["logs"], logged(runs)), run_files(rng, count["run files"], runs),
            checkpoints(rng, count["checkpoints"], folder), malice(folder, runs), messages(rng, count["messages"]),
        ):  # fmt: skip
            signal.alarm(WAIT_S)
            for what, fine in found:
                counts.setdefault(what, []).append(fine)
                signal.alarm(WAIT_S)
        signal.alarm(0)
    write_result("damages", [f"From seed {chosen.seed}.", "", *table(counts)], save=chosen.save)
    sys.exit(not all(map(all, counts.values())))


USUAL = {"plans": 900, "studies": 200, "logs": 404, "run files": 540, "checkpoints": 100, "messages": 25}


def logged(runs: Path) -> Path:
    """A run with logs of today's format."""
    run = make(runs / "logged").path
    for path in sorted((run / "events").iterdir()):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        path.unlink()
        half = len(records) // 2
        path.with_suffix(".blocks").write_bytes(blocks.encode(records[:half]) + blocks.encode(records[half:]))
    return run


def too_long(*_: object) -> None:
    raise TimeoutError(f"one case took longer than {WAIT_S} s")


if __name__ == "__main__":
    main()
