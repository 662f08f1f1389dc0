"""Hook of mkdocs.yml: the site has the repository's layout, so the pages' links hold in both."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
# Beside docs/: what its pages link to.
_OTHERS = ("*.md", "LICENSE", "examples/*.*", "scripts/results/*.*")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The repository's pages and what they link to, at their own paths, beside the theme's."""
    of_theme = [file for file in files if not file.src_uri.endswith((".md", ".svg", ".png"))]
    paths = [path for pattern in ("docs/*.*", *_OTHERS) for path in sorted(ROOT.glob(pattern))]
    ours = [
        File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path))
        for path in paths
    ]
    return Files([*of_theme, *ours])
