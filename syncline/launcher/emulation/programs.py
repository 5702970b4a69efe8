"""Command lines for our own programs in other processes."""

from __future__ import annotations

import sys
from pathlib import Path

_PACKAGES = str(Path(__file__).parents[3])


def program(module: str, *arguments: str) -> list[str]:
    """`main(arguments)` of one of our modules, by this Python; no module of the current folder gets in between."""
    code = f"import sys; sys.path.append({_PACKAGES!r}); from {module} import main; sys.exit(main(sys.argv[1:]))"
    return [sys.executable, "-P", "-c", code, *arguments]
