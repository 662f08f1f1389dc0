"""YAML files: mappings as PyYAML reads them, faults on one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from mfu_jax.errors import UserError
from mfu_jax.util.yaml_files import CONFIG_FOLDER, read_mapping
from tests.support.messages import is_told
from tests.support.paths import ROOT

BUNDLED = [*CONFIG_FOLDER.rglob("*.yml"), *(ROOT / "mfu_jax").rglob("*.yml")]


def test_the_bundled_files_are_read_as_pyyaml_reads_them() -> None:
    assert len(BUNDLED) > 50
    for path in BUNDLED:
        assert read_mapping(path) == yaml.safe_load(path.read_text(encoding="utf-8")), path


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: " + "[" * 50_000, "nest"),  # in PyYAML's own words
        ("a: 1\na: 2", "line 2: 'a' is given twice"),
        ("? [1]\n: 2", "line 1: found unhashable key"),
        ("1: 2", "expected `key: value` lines"),
        ("- 1", "expected `key: value` lines, got a list"),
        ("a: 1\n---\nb: 2", "another document"),
        ("a: !!bool foo", "is not plain YAML: a tag does not fit"),
        ('a: !!int ""', "is not plain YAML: a tag does not fit"),
        ("a: !!timestamp x", "is not plain YAML: a tag does not fit"),
        ("a: " + "x" * 2**20, "cannot be read (1 MiB, more than 1)"),
        ("a: !!python/object/apply:os.system ['true']", "is not plain YAML"),
    ],
)
def test_a_fault_is_one_line_that_names_the_file(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yml"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        read_mapping(path)
    assert says in str(error.value)
    assert str(path) in str(error.value)
    assert is_told(str(error.value))


def test_an_empty_file_is_a_mapping_without_keys(tmp_path: Path) -> None:
    path = tmp_path / "config.yml"
    path.write_text("# nothing yet\n")
    assert read_mapping(path) == {}


def test_aliases_and_merges_of_a_config_are_read(tmp_path: Path) -> None:
    path = tmp_path / "config.yml"
    path.write_text("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: [*a, *a]\n")
    assert read_mapping(path) == {
        "a": {"x": 1, "y": 2},
        "b": {"x": 1, "y": 3},
        "c": [{"x": 1, "y": 2}] * 2,
    }
