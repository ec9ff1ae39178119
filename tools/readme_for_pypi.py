"""A hook of hatchling: README.md in the metadata of the package, with links that work outside of the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

RELATIVE = re.compile(r'(\]\(|src(?:set)?=")(?![a-z]+:|#)([^)"]+)')


def with_absolute_links(text: str, repository: str) -> str:
    """Files are linked in the repository; pictures are taken from it."""

    def absolute(found: re.Match[str]) -> str:
        kind = "blob" if found[1] == "](" else "raw"
        return f"{found[1]}{repository}/{kind}/main/{found[2]}"

    return RELATIVE.sub(absolute, text)


class Hook(MetadataHookInterface):
    """Sets ``readme``."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = with_absolute_links(Path(self.root, "README.md").read_text(), metadata["urls"]["Homepage"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
