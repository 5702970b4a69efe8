"""The Python API: every use case is a function that returns a value, prints nothing and is typed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest
from traitlets.config import Config

import syncline
from syncline.errors import PlanError, UsageError

ROOT = Path(__file__).parents[1]
SMALL = {"model": "mlp", "data": "synthetic", "global_batch": 16, "threads": 1}

USER_SCRIPT = '''
"""What a user may write, checked by mypy --strict."""

import polars
import torch

import syncline


def losses(workers: int) -> polars.DataFrame:
    run: syncline.Run = syncline.train(model="mlp", method="bucketed", workers=workers, steps=3, show="progress")
    assert syncline.explain(run).advice[0].saves_s is not None
    plan: syncline.Plan = run.plan
    again: syncline.Run = syncline.load_run("runs/x")
    return run.losses() if plan.workers > 1 else again.table()


def check() -> bool:
    table: polars.DataFrame = syncline.compare(methods=["ddp"], workers=2).table()
    report: object = syncline.run_lab("cs744", quick=True).report
    return syncline.verify(workers=4).holds and table.height > 0 and report is not None


def double(number: int) -> int:
    return 2 * number


doubled: list[int] = syncline.launch(double, 21, workers=2)
model = syncline.DataParallel(torch.nn.Linear(2, 2), bucket_cap_mb=1.0)
loader: syncline.Loader = syncline.loader(torch.utils.data.TensorDataset(torch.zeros(4)), global_batch=2, last="drop")
loss: torch.Tensor = syncline.mean(torch.zeros(()))
share: float = syncline.mean(0.5, weight=3)
count: int = syncline.sum(len(loader))
everyone: list[torch.Tensor] = syncline.gather(loss)
syncline.save("last.pt", model, loader=loader, epoch=1)
rest: dict[str, object] = syncline.load("last.pt", model, loader=loader)
'''


def test_a_users_script_is_checked_strictly(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    wrong = tmp_path / "wrong.py"
    script.write_text(USER_SCRIPT)
    wrong.write_text("import syncline\n\nsyncline.train(modle='vgg11')\nsyncline.verify(workers=4).hold\n")
    # With the settings of the project, which are strict too: so what scripts/check has cached is not checked again.
    command = [sys.executable, "-m", "mypy"]
    done = subprocess.run([*command, script, wrong], capture_output=True, text=True, cwd=ROOT)
    errors = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert len(errors) == 2, done.stdout
    assert "modle" in errors[0]
    assert '"hold"' in errors[1]


def test_dir_names_everything_that_is_there() -> None:
    assert set(syncline.__all__) <= set(dir(syncline))
    assert all(getattr(syncline, name) is not None for name in syncline.__all__)
    assert callable(syncline.train)
    with pytest.raises(AttributeError, match="no attribute 'tarin'"):
        syncline.tarin  # noqa: B018


def test_use_cases_return_values_and_print_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = syncline.train(**SMALL, method="bucketed", workers=2, steps=4, run_dir="mine")
    assert (run.status, run.plan.method, run.losses().height) == ("finished", "bucketed", 4)
    assert set(run.table()["rank"]) == {0, 1}
    explanation = syncline.explain(run)
    parts = explanation.table().drop("method", "step_s", "hidden_s", "overlap").sum_horizontal()
    assert parts.to_list() == pytest.approx(explanation.table()["step_s"].to_list())
    comparison = syncline.compare(run.plan, methods=["ddp", "bucketed"], steps=3, warmup=1)
    assert comparison.table()["label"].to_list() == ["ddp", "bucketed"]
    assert "<table" in comparison._repr_html_()
    assert syncline.verify(workers=2, methods=["all-reduce"], models=["mlp"]).holds
    probed = syncline.probe(workers=2, backends=["gloo"], sizes=["1kB", 4000], repeats=1)
    assert set(probed.table()["bytes"]) == {1000, 4000}
    assert syncline.load_run(kind="compare").path == comparison.run.path
    assert capfd.readouterr() == ("", "")


def test_refused_input_raises_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PlanError, match="unknown value 'vgg'"):
        syncline.train(model="vgg")
    with pytest.raises(UsageError, match="contradict"):
        syncline.train(**SMALL, steps=2, epochs=2)
    with pytest.raises(UsageError, match="no run"):
        syncline.load_run()
    assert list(tmp_path.iterdir()) == []


def test_keywords_come_on_top_of_a_plan() -> None:
    plan = syncline.Plan(model="mlp", recipe="fast", epochs=2)
    changed = syncline.load_plan(plan, {"recipe": "course", "steps": 3, "optimizer.momentum": 0.5})
    assert (changed.model, changed.steps, changed.epochs) == ("mlp", 3, None)
    assert (changed.optimizer.schedule, changed.optimizer.momentum) == ("constant", 0.5)
    assert syncline.load_plan(plan, {}) is plan


def test_the_tour_runs_in_a_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # or the kernel would leave what other processes write to pytest
    notebook = nbformat.read(ROOT / "examples" / "tour.ipynb", as_version=4)
    # On a loaded machine a kernel needs longer than nbclient's five seconds to end and to tidy up after itself.
    patient = Config({"KernelManager": {"shutdown_wait_time": 60.0}})
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=240, resources=where, config=patient).execute()
    results = [
        output for cell in notebook.cells if cell.cell_type == "code"
        for output in cell.outputs if output.output_type == "execute_result"
    ]  # fmt: skip
    assert any("text/html" in output.data for output in results)
    assert any(output.data.get("text/plain") == "[21, 21]" for output in results)
    (said,) = [cell for cell in notebook.cells if "all_ranks=True" in cell.source and cell.cell_type == "code"]
    text = "".join(output.text for output in said.outputs if output.output_type == "stream")
    assert sorted(text.splitlines()) == [
        "my first batch is [0, 2, 4, 6]",
        "rank 1: my first batch is [1, 3, 5, 7]",
    ]
