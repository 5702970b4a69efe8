"""What many emulated hosts cost on one machine: memory of all their processes, and time to the first step.

    python benchmarks/many_hosts.py --hosts 2,8,64 --save

Records VGG-11's compute with two workers, then replays it on so many hosts, one rank on each, with links of 1 Gbit/s.
Memory is the sum of PSS over every process of the run, the launcher's included: a page that processes share counts
once. Started means that every rank has ended its first step.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from support import write_result

from syncline.spans import log_files, read_log
from syncline.units import format_bytes, format_seconds

MARK = "SYNCLINE_MANY_HOSTS"
SHARE = 16
"""Images of each worker's batch."""
LOOK_EVERY_S = 2.0


def syncline(*words: object) -> list[str]:
    return [str(Path(sys.executable).with_name("syncline")), *map(str, words)]


def used(mark: str) -> tuple[int, int]:
    """Bytes of all processes of a run, and how many processes there are."""
    sign, total, count = f"{MARK}={mark}".encode(), 0, 0
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError, ValueError, IndexError):
                folder = Path("/proc", entry)
                if sign not in folder.joinpath("environ").read_bytes():
                    continue
                line = next(
                    one for one in (folder / "smaps_rollup").read_text().splitlines() if one.startswith("Pss:")
                )
                total += int(line.split()[1]) * 1024
                count += 1
    return total, count


def measure(folder: Path, hosts: int, steps: int, method: str) -> dict[str, float]:
    run = folder / f"hosts-{hosts}"
    words = ("--hosts", hosts, "--link", "1gbit", "--compute", f"replay:{folder / 'recorded'}", "--method", method)
    environment = {**os.environ, MARK: str(run)}
    begin_wall, most, processes = time.time(), 0, 0
    more = ("--global-batch", SHARE * hosts, "--steps", steps, "--set", "deadline_s=300", "--run-dir", run, "--json")
    with subprocess.Popen(syncline("train", *words, *more), env=environment, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            now, count = used(str(run))
            most, processes = max(most, now), max(processes, count)
            time.sleep(LOOK_EVERY_S)
    if process.returncode:
        raise SystemExit(f"{hosts} hosts: exit code {process.returncode}")
    first = [_first_step_end(path) for path in log_files(run / "events")]
    return {"bytes": most, "processes": processes, "started_s": max(first) - begin_wall}


def _first_step_end(path: Path) -> float:
    """On the clock of the day."""
    header, *records = read_log(path)
    end = next(record["end"] for record in records if record["kind"] == "step")
    return float(header["wall_ns"] - header["monotonic_ns"] + end) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", default="2,8,64", help="numbers of hosts, separated by commas")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--method", default="bucketed")
    parser.add_argument("--save", action="store_true", help="save the result next to this script")
    chosen = parser.parse_args()
    lines = [f"VGG-11, {chosen.method}, links of 1 Gbit/s, compute replayed, {chosen.steps} steps.", ""]
    lines += ["| hosts | processes | memory of all | of each host | started after |", "|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recorded = (
            "--model",
            "vgg11",
            "--data",
            "synthetic",
            "--workers",
            2,
            "--global-batch",
            2 * SHARE,
            "--steps",
            3,
        )
        aside = ("--set", "evaluate=false", "--run-dir", folder / "recorded")
        subprocess.run(syncline("train", *recorded, *aside), check=True, stdout=subprocess.DEVNULL)
        for hosts in map(int, chosen.hosts.split(",")):
            found = measure(folder, hosts, chosen.steps, chosen.method)
            cells = [hosts, found["processes"], format_bytes(found["bytes"]), format_bytes(found["bytes"] / hosts)]
            lines.append(f"| {' | '.join(map(str, cells))} | {format_seconds(found['started_s'])} |")
            print(lines[-1], flush=True)
    write_result("many_hosts", lines, save=chosen.save)


if __name__ == "__main__":
    main()
