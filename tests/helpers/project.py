"""The project's own folder, its scripts as modules, and a browser for its pages."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")


def load_tool(name: str) -> ModuleType:
    """A script of tools/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def dom_in_chromium(page: Path, width: int, dark: bool, milliseconds: int) -> str:
    """What a browser makes of a page after that time; its profile is put beside the page."""
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
        "--disable-component-update", "--disable-sync", "--disable-quic", "--host-resolver-rules=MAP * ~NOTFOUND",
        "--no-first-run", "--hide-scrollbars",
        "--allow-file-access-from-files", f"--user-data-dir={page.parent / 'profile'}", f"--window-size={width},1200",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}", f"--virtual-time-budget={milliseconds}",
        "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
