"""The page for people who come from DDP: its script trains the same after its own diff."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import TORCHS_OWN_ABORT

PAGE = (Path(__file__).parent.parent / "docs" / "coming_from_ddp.md").read_text()
TORCHRUN = Path(sys.executable).with_name("torchrun")


def block(kind: str) -> str:
    (text,) = re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return str(text)


def patched(script: str, diff: str) -> str:
    """Each line with a minus becomes the line with a plus below it."""
    lines = diff.splitlines()
    for old, new in zip(lines[::2], lines[1::2], strict=True):
        assert (old[0], new[0]) == ("-", "+")
        assert f"{old[1:]}\n" in script
        script = script.replace(f"{old[1:]}\n", f"{new[1:]}\n")
    return script


def losses(folder: Path, script: str) -> list[str]:
    scratch = folder / "scratch"  # torchrun leaves a folder among temporary files
    scratch.mkdir(parents=True)
    (folder / "train.py").write_text(script)
    command = [str(TORCHRUN), "--nproc-per-node", "2", "train.py"]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0 or ("syncline" not in script and TORCHS_OWN_ABORT in done.stderr), done.stderr
    return re.findall(r"^epoch \d: loss (.*)$", done.stdout, re.MULTILINE)


@pytest.mark.timeout(180)
def test_the_script_of_the_page_trains_the_same_after_its_diff(tmp_path: Path) -> None:
    script = block("python")
    before = losses(tmp_path / "before", script)
    assert len(before) == 3
    swapped = patched(script, block("diff"))
    assert "DistributedDataParallel" not in swapped
    assert losses(tmp_path / "after", swapped) == before


@pytest.mark.timeout(180)
def test_the_script_of_the_page_can_be_recorded_as_it_says(tmp_path: Path) -> None:
    """Step 1: torch's own DDP inside the block."""
    script = block("python").replace("import torch\n", "import torch\nimport syncline\n", 1)
    head, loop = script.split("for epoch in", 1)
    body, end = loop.split("dist.destroy", 1)
    indented = "".join(f"    {line}\n" for line in f"for epoch in{body}".splitlines())
    recorded = f'{head}with syncline.record(model, optimizer, "my-run"):\n{indented}dist.destroy{end}'
    assert len(losses(tmp_path / "recorded", recorded)) == 3
    assert (tmp_path / "recorded" / "my-run" / "run.json").exists()


def test_the_links_of_the_page_lead_somewhere() -> None:
    docs = Path(__file__).parent.parent / "docs"
    links = re.findall(r"\]\(([^)]+)\)", PAGE)
    assert links
    for link in links:
        file, _, heading = link.partition("#")
        headings = re.findall(r"^#+ (.*)$", (docs / file).read_text(), re.MULTILINE)
        slugs = [re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings]
        assert not heading or heading in slugs, link
