"""The README stays true: its tour names what exists and leaves nothing out, its commands exist."""

from __future__ import annotations

import re
from pathlib import Path

from syncline.cli.app import app
from syncline.methods import METHODS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
TOUR = README[README.index("## A tour of the files") : README.index("## What has not been run")]


def named_in_tour() -> set[str]:
    """Paths in the left column; a name without a folder is in the package, beside the one before it."""
    found = set()
    for row in re.findall(r"^\| (.*?) \|", TOUR, re.MULTILINE):
        for name in re.findall(r"`([^`]+)`", row):
            found.add(name if (ROOT / name).exists() else f"syncline/{name}")
    return found


def test_what_the_tour_names_exists() -> None:
    assert named_in_tour()
    assert [name for name in named_in_tour() if not (ROOT / name).exists()] == []


def test_the_tour_leaves_nothing_of_the_package_out() -> None:
    package = {
        path for path in (ROOT / "syncline").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    toured = {(ROOT / name).resolve() for name in named_in_tour()}
    assert {path.name for path in package - toured} == {"__init__.py"}


def test_commands_and_methods_in_the_readme_exist() -> None:
    verbs = {command.callback.__name__ for command in app.registered_commands if command.callback is not None}
    verbs |= {str(group.name) for group in app.registered_groups}
    used = set(re.findall(r"syncline ([a-z]+)\b", README.replace("syncline launch script.py", "syncline launch")))
    assert used & verbs
    assert used - verbs <= {"command"}
    assert all(f"`{method}`" in README for method in METHODS)


def test_scripts_of_the_readme_exist() -> None:
    assert all((ROOT / script).exists() for script in re.findall(r"scripts/\w+", README))
