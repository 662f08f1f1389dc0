"""Where tests find what they read."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
DOCS = ROOT / "docs"
RECORDED = ROOT / "tests" / "programs"
SCRIPTS = ROOT / "scripts"
