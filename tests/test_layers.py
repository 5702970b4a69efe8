"""The folder order is the data flow: a stage imports the ground and earlier stages, never a later one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import syncline
from syncline.methods import METHODS, OLD_NAMES

PACKAGE = Path(syncline.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))

GROUND = (
    "errors", "files", "folders", "units", "machine", "forms", "words", "methods", "optimizers", "plan",
    "spans", "blocks", "block_file", "events", "stored", "marks", "voice", "readiness",
)  # fmt: skip
STAGES = (
    "launcher",
    "comm",
    "workload",
    "collectives",
    "predict",
    "sync",
    "training",
    "remote",
    "store",
    "results",
    "accounting",
    "measure",
    "tune",
    "study",
    "report",
    "labs",
)
ROOTS = (
    "worker",
    "rank",
    "jobs",
    "running",
    "reaching",
    "studies",
    "teaching",
    "resolve",
    "world",
    "shares",
    "weighing",
    "data_parallel",
    "drop_in",
    "joining",
    "torch_keywords",
    "sharded_loader",
    "metrics",
    "saving",
    "recording",
    "horovod",
    "cli",
    "__init__",
    "__main__",
)
RANK_VARIABLES = {
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK",
    "PMI_SIZE",
}


def part_of(module: str) -> str:
    """'comm/checked.py' and 'syncline.comm.checked' -> 'comm'."""
    return module.removesuffix(".py").replace("/", ".").removeprefix("syncline.").partition(".")[0]


def level(part: str) -> int:
    """0 is the ground; composition roots stand above all stages."""
    if part in GROUND:
        return 0
    return STAGES.index(part) + 1 if part in STAGES else len(STAGES) + 1


def imported_parts(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (part_of(name.name) for name in node.names if name.name.startswith("syncline."))
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where things come from"
            if node.module == "syncline":
                yield from (name.name for name in node.names if name.name in (*GROUND, *STAGES, *ROOTS))
            elif node.module and node.module.startswith("syncline."):
                yield part_of(node.module)


def violations(module: str, source: str) -> list[str]:
    own = part_of(module)
    found = [f"{module} belongs to no stage"] if own not in (*GROUND, *STAGES, *ROOTS) else []
    if own in ROOTS:
        return found
    later = [part for part in imported_parts(source) if part != own and level(part) > level(own)]
    return found + [f"{module} imports {part}" for part in later]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_module_imports_only_the_ground_and_earlier_stages(path: Path) -> None:
    assert violations(str(path.relative_to(PACKAGE)), path.read_text()) == []


@pytest.mark.parametrize(
    ("module", "source", "found"),
    [
        ("comm/a.py", "from syncline.sync import base", ["comm/a.py imports sync"]),
        ("comm/a.py", "def f():\n    import syncline.training.step", ["comm/a.py imports training"]),
        ("collectives/a.py", "from syncline.sync.base import GradientSync", ["collectives/a.py imports sync"]),
        ("training/a.py", "from syncline import store", ["training/a.py imports store"]),
        ("plan.py", "from syncline.launcher.here import launch", ["plan.py imports launcher"]),
        ("store.py", "from syncline.worker import train", ["store.py imports worker"]),
        ("extras/a.py", "import math", ["extras/a.py belongs to no stage"]),
        ("sync/a.py", "from syncline.collectives import x\nfrom syncline.sync.base import y", []),
        ("report/a.py", "import syncline.measure.comparison\nfrom syncline import units", []),
        ("worker.py", "from syncline.cli import app", []),
        ("errors.py", "from syncline import __version__", []),
    ],
)
def test_violations_are_caught(module: str, source: str, found: list[str]) -> None:
    assert violations(module, source) == found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_module_says_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


def rank_variables_in(source: str) -> set[str]:
    """Names of rank variables that stand in the code as strings of their own, whoever reads them and how."""
    constants = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    return {node.value for node in constants if isinstance(node.value, str)} & RANK_VARIABLES


def test_one_file_reads_the_rank_from_the_environment() -> None:
    readers = [str(path.relative_to(PACKAGE)) for path in MODULES if rank_variables_in(path.read_text())]
    assert readers == ["launcher/adopt.py"]
    assert rank_variables_in("import os\nrank = int(os.environ['RANK'])") == {"RANK"}
    assert rank_variables_in("from os import getenv\nx = getenv('WORLD_SIZE', 'RANK is 1')") == {"WORLD_SIZE"}


NAMES = {*METHODS, *OLD_NAMES}
OTHER_MEANINGS = {"mpi", "auto", "shared-memory", "ring", "tree", "halving-doubling"}
"""Names of methods that are also a launcher, a way to choose data, a backend to probe or a collective."""
SPEAK_OF_METHODS = ("methods.py", "labs/")
"""The table itself, and a lab's own answers, which say what its assignment asks about certain methods."""


def asked_names(source: str) -> set[str]:
    """Names of methods that the code compares with, collects or looks up. A call with a name asks nothing.

    A name that has other meanings too counts where it is compared with something called a method.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        asked = [ast.dump(node) for node in ast.walk(node)] if isinstance(node, ast.Compare) else []
        about_method = any("id='method" in text or "attr='method" in text for text in asked)
        parts: list[ast.expr | None] = []
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
        elif isinstance(node, ast.Tuple | ast.List | ast.Set):
            parts = [*node.elts]
        elif isinstance(node, ast.Dict):
            parts = [*node.keys]
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.MatchValue):
            parts = [node.value]
        elif isinstance(node, ast.Subscript):
            parts = [node.slice]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            parts = [*node.args] if node.func.attr in ("get", "startswith", "endswith", "count", "index") else []
        inner = [item for part in parts if part is not None for item in ast.walk(part)] if about_method else parts
        names = {item.value for item in inner if isinstance(item, ast.Constant) and item.value in NAMES}
        found |= names if about_method else names - OTHER_MEANINGS
    return found


def test_no_code_outside_the_table_asks_for_a_method_by_name() -> None:
    asking = {str(path.relative_to(PACKAGE)): asked_names(path.read_text()) for path in MODULES}
    assert [name for name, found in asking.items() if found and not name.startswith(SPEAK_OF_METHODS)] == []


@pytest.mark.parametrize(
    ("source", "asked"),
    [
        ("if plan.method == 'mpi': pass", {"mpi"}),
        ("if method not in ('auto', 'ddp'): pass", {"auto", "ddp"}),
        ("if 'shared-memory' in methods: pass", {"shared-memory"}),
        ("if name == 'single': pass", {"single"}),
        ("QUICK = ['ddp', 'bucketed']", {"ddp", "bucketed"}),
        ("BASE: str = 'single'", {"single"}),
        ("HELP = {'data-parallel': 'threads'}", {"data-parallel"}),
        ("match plan.method:\n    case 'ddp': pass", {"ddp"}),
        ("times['ddp']; times.get('bucketed'); label.startswith('single')", {"ddp", "bucketed", "single"}),
        ("if data == 'auto' or launcher == 'mpi': pass", set()),
        ("make_sync('all-reduce', communicator); f(method='ddp')", set()),
        ("if METHODS[plan.method].one_host: pass", set()),
    ],
)
def test_questions_for_a_name_are_caught(source: str, asked: set[str]) -> None:
    assert asked_names(source) == asked
