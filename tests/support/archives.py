"""Archives of recorded traces."""

import tarfile
from pathlib import Path

from tests.support.paths import DATA


def unpack(archive: str, folder: Path) -> None:
    """Unpacks an archive of ``tests/data`` into a folder."""
    with tarfile.open(DATA / archive) as tar:
        # Debian 12's Python, 3.11.2, has no filters, and Python 3.12 warns where none is chosen
        tar.extraction_filter = getattr(tarfile, "data_filter", None)
        tar.extractall(folder)
