"""Writes what a config.json may omit: the entries of huggingface/defaults.yml.

    python -m scripts.hugging_face_defaults vaultgemma cwm      # prints the entries
    python -m scripts.hugging_face_defaults 'nemotron:{"num_key_value_heads": 8}'

Needs transformers. An entry has the fields that the type's translation reads, with the defaults of
its configuration class; register the translation first. Fields after the colon are for types that
cannot build a model from their defaults alone.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mfu_jax.errors import UserError
from mfu_jax.flops.analytic.huggingface import TRANSLATIONS, fields

# Fields that determine every size: the translation may stop before it reads them.
_FIRST = ("vocab_size", "hidden_size", "num_hidden_layers", "tie_word_embeddings")


def main() -> None:
    """Prints the YAML entries of the types on the command line, and of their nested types."""
    for argument in sys.argv[1:]:
        name, _, given = argument.partition(":")
        for kind, read in fields_read(name, json.loads(given or "{}")).items():
            print(f"{kind}:")
            for line in entry(kind, read):
                print(f"  {line}")


def fields_read(name: str, given: dict[str, Any]) -> dict[str, list[str]]:
    """Model type → the fields that the translation of `name` reads from it, in order."""
    read: dict[str, list[str]] = {}
    everything = {kind: defaults(kind) for kind in CONFIG_MAPPING}
    fields._all_defaults = lambda: everything  # type: ignore[assignment]

    class Recording(fields.Fields):
        def get(self, field: str, default: Any = None) -> Any:
            read.setdefault(self.model_type, []).append(field)
            return super().get(field, default)

        def knows(self, field: str) -> bool:
            read.setdefault(self.model_type, []).append(field)
            return super().knows(field)

        def with_values(self, **values: Any) -> fields.Fields:
            return Recording({**self._values, **values}, self.model_type, self._path)

        def nested(self, field: str, model_type: str | None = None) -> fields.Fields:
            inner = super().nested(field, model_type)
            return Recording(inner._values, inner.model_type, inner._path)

    try:
        TRANSLATIONS[name](Recording(given, name))
    except UserError as error:  # defaults that build no model
        print(f"# {name}: {error}", file=sys.stderr)
    return {kind: [*_FIRST, *names] for kind, names in read.items()}


def entry(kind: str, read: Iterable[str]) -> list[str]:
    """The lines of one entry."""
    known = defaults(kind)
    aliases = known.pop("other_names", {})
    names = dict.fromkeys(name if name in known else aliases.get(name, name) for name in read)
    lines = [f"{name}: {json.dumps(known[name])}" for name in names if name in known]
    used = {alias: name for alias, name in aliases.items() if name in names or alias in names}
    if used:
        text = ", ".join(f"{alias}: {name}" for alias, name in sorted(used.items()))
        lines.append(f"other_names: {{{text}}}")
    return lines


def defaults(kind: str) -> dict[str, Any]:
    """Every field of a configuration class with its default, and its aliases."""
    config = CONFIG_MAPPING[kind]
    values = {
        field.name: field.default
        if field.default is not dataclasses.MISSING
        else field.default_factory()
        if field.default_factory is not dataclasses.MISSING
        else None
        for field in dataclasses.fields(config)
    }
    return {**values, **({"other_names": config.attribute_map} if config.attribute_map else {})}


if __name__ == "__main__":
    main()
