"""Run the scripts of examples/horovod one after the other in this process, as mpirun starts it, and print a mark
before each on rank 0, which alone prints: ranks do not end a script at one time. Or one of them, for horovod.run."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from syncline.launcher.adopt import placement_from_environment

EXAMPLES = Path(__file__).parents[1] / "examples" / "horovod"


def run_example(name: str, *arguments: str) -> None:
    import horovod.torch as hvd

    sys.argv = [str(EXAMPLES / name), *arguments]
    sys.path.insert(0, str(EXAMPLES))
    runpy.run_path(sys.argv[0], run_name="__main__")
    hvd.shutdown()


if __name__ == "__main__":
    place = placement_from_environment()
    assert place is not None
    for command in sys.argv[1:]:
        if place.rank == 0:
            print(f"== {command.split()[0]}", flush=True)
        run_example(*command.split())
