"""What the ranks of the launcher's tests run, and what its tests start as separate launchers.

As a script: `python launcher_programs.py FUNCTION WORKERS LOG_DIR` launches that function and prints one line on how
it ended, as the command line would.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from syncline.errors import ContractError, DataError, PeerLostError, SynclineError


def rank_and_environment() -> tuple[int, dict[str, str]]:
    return int(os.environ["RANK"]), dict(os.environ)


def join_group() -> int:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return dist.get_rank()


def all_reduce_once() -> float:
    import torch
    import torch.distributed as dist

    join_group()
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return float(total.item())


def all_reduce_for_ever() -> None:
    import torch
    import torch.distributed as dist

    rank = join_group()
    value = torch.ones(1000)
    dist.all_reduce(value)
    say_ready(rank)
    while True:
        dist.all_reduce(value)


def block_in_a_collective() -> None:
    """Rank 0 never comes; the others wait for it inside a collective."""
    import torch
    import torch.distributed as dist

    rank = join_group()
    dist.all_reduce(torch.ones(1))
    say_ready(rank)
    if rank == 0:
        time.sleep(600)
    dist.all_reduce(torch.ones(1))


def raise_on(culprit: int) -> None:
    import torch
    import torch.distributed as dist

    rank = join_group()
    dist.all_reduce(torch.ones(1))
    if rank == culprit:
        raise KeyError(f"the fault of rank {rank}")
    dist.all_reduce(torch.ones(1))


def say_and_raise_on(culprit: int) -> None:
    if int(os.environ["RANK"]) == culprit:
        print("a word before", file=sys.stderr)
        raise KeyError(culprit)
    time.sleep(600)


def raise_slowly_after_leaving_the_group(culprit: int) -> None:
    """The others notice the broken connection long before the exception arrives."""
    import torch
    import torch.distributed as dist

    rank = join_group()
    dist.all_reduce(torch.ones(1))
    if rank == culprit:
        dist.destroy_process_group()
        time.sleep(0.7)
        raise KeyError(f"the fault of rank {rank}")
    dist.all_reduce(torch.ones(1))


def exit_on(culprit: int, code: int) -> None:
    if join_group() == culprit:
        sys.exit(code)
    time.sleep(600)


def vanish_on(culprit: int, code: int) -> None:
    if join_group() == culprit:
        os._exit(code)
    time.sleep(600)


def refuse_data(culprit: int) -> None:
    if join_group() == culprit:
        raise DataError("No such data set.", action="Name another.")
    time.sleep(600)


def raise_everywhere() -> None:
    import torch.distributed as dist

    rank = join_group()
    dist.barrier()
    time.sleep(0.5 * rank)
    raise ValueError(f"from rank {rank}")


def raise_contract_error_on(culprit: int) -> None:
    if join_group() == culprit:
        time.sleep(0.3)
        raise ContractError("Shapes differ.")
    raise PeerLostError("A rank is gone.")


def kill_self_on(culprit: int, number: int) -> None:
    if join_group() == culprit:
        os.kill(os.getpid(), number)
    time.sleep(600)


def linger() -> str:
    """A thread that never ends, after the function has returned."""
    import threading

    threading.Thread(target=time.sleep, args=(600,)).start()
    say_ready(int(os.environ["RANK"]))
    return "returned"


def signals_in_a_forked_child() -> int:
    """How a child that user code forked ends when it gets a SIGTERM."""
    import multiprocessing

    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    child.terminate()
    child.join(60)
    assert child.exitcode is not None
    return child.exitcode


def stop_at_start(culprit: int, deadline_s: float) -> None:
    """One rank is stopped before it connects."""
    from datetime import timedelta

    from syncline.comm.torch_backend import connect
    from syncline.launcher.adopt import placement_from_environment

    place = placement_from_environment()
    assert place is not None
    if place.rank == culprit:
        os.kill(os.getpid(), signal.SIGSTOP)
    connect(place, backend="gloo", deadline=timedelta(seconds=deadline_s))


def listening_addresses() -> list[str]:
    """Local addresses of all listening TCP sockets of this rank and its launcher, while a group is open."""
    import torch
    import torch.distributed as dist

    join_group()
    dist.all_reduce(torch.ones(1))
    found = _listening(os.getpid()) + _listening(int(os.environ["TEST_LAUNCHER"]))
    dist.barrier()
    dist.destroy_process_group()
    return found


def _listening(pid: int) -> list[str]:
    own = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    rows = [line.split() for name in ("tcp", "tcp6") for line in _rows(name)]
    return [row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]


def _rows(name: str) -> list[str]:
    return Path(f"/proc/net/{name}").read_text().splitlines()[1:]


def say_ready(rank: int) -> None:
    folder = os.environ.get("TEST_READY")
    if folder:
        (Path(folder) / f"{rank}.part").write_text(str(os.getpid()))
        (Path(folder) / f"{rank}.part").rename(Path(folder) / f"{rank}.pid")


def main() -> int:
    from syncline.launcher.here import run_ranks

    # A runner in the background may have been started with Ctrl-C ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    name, workers, log_dir = sys.argv[1:4]
    before = signal.getsignal(signal.SIGTERM)
    try:
        run_ranks(globals()[name], workers=int(workers), log_dir=Path(log_dir) if log_dir else None)
    except SynclineError as error:
        assert signal.getsignal(signal.SIGTERM) is before
        print(f"{type(error).__name__}: {error}", flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
