"""Parses the words of a command line: names, keys with values, and flags.

All commands take a key's value in three spellings, ``key=value``, ``--key=value`` and
``--key value``, and mean the same by ``model``, ``model_flops`` and ``peak_tflops_per_device``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from mfu_jax.errors import UserError, nearest

MODEL = "model"  # the name or file of a model
MODEL_FLOPS = "model_flops"  # model FLOPs of one step on one device
PEAK = "peak_tflops_per_device"  # dense peak of one JAX device in TFLOP/s
# MaxText's word in configs, and ours: either is taken where the command has the other.
_SYNONYMS = {MODEL: "model_name", "model_name": MODEL}
_PAGE = "html"  # the key of --html, whose value may be left out
_PAGE_SUFFIXES = (".html", ".htm")
_MOST_LISTED = 25  # the most keys that an error message lists; a model has more fields than this


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The words of a command line, sorted by kind.

    Attributes:
        names: words that are neither pairs nor flags: models, files, chips.
        pairs: key and text of each value, in the order given.
        flags: such as ``--json``.
    """

    names: tuple[str, ...]
    pairs: tuple[tuple[str, str], ...]
    flags: frozenset[str]

    @property
    def values(self) -> dict[str, str]:
        """Key → text; if a key is given twice, the last one wins."""
        return dict(self.pairs)

    @property
    def page(self) -> str | None:
        """The file of the page that is printed in place of text, empty if not named; else None.

        Raises:
            UserError: JSON is to be printed, too.
        """
        page = self.values.get(_PAGE)
        if page is not None and "--json" in self.flags:
            raise UserError(
                "--json and --html: expected one of them",
                hint="run the command twice",
            )
        return page

    def one_name(self, what: str) -> str:
        """The only name.

        Args:
            what: what was expected, for the error message.

        Raises:
            UserError: there is no name, or more than one.
        """
        if len(self.names) != 1:
            raise UserError(f"expected one {what}, got {' '.join(self.names) or 'none'}")
        return self.names[0]

    def checked(self, keys: Collection[str], *, usually: str = "") -> Arguments:
        """The same, with the command's own key in place of a synonym.

        Args:
            keys: all keys accepted here.
            usually: the usual cause of an unknown key and the fix, for the error message.

        Raises:
            UserError: a key is unknown.
        """
        pairs = [(own_key(key, keys), text) for key, text in self.pairs]
        for key, _ in pairs:
            check_key(key, keys, usually=usually)
        return dataclasses.replace(self, pairs=tuple(pairs))


def parse(
    words: Iterable[str], *, keys: Collection[str] | None = None, flags: Collection[str] = ()
) -> Arguments:
    """Sorts the words of a command line.

    Args:
        words: as split by the shell, without the command.
        keys: all keys of the command; None accepts any, for commands that check them later.
        flags: all flags of the command, with their dashes; ``--help`` never gets here. ``--html``
            becomes a key: its value is the page's file, empty if no name ends in ``.html``.

    Raises:
        UserError: an unknown key or flag, a key without a value, or a flag with one.

    >>> parse(["h100", "--dtype", "fp8", "--json"], keys=["dtype"], flags=["--json"]).values
    {'dtype': 'fp8'}
    """
    names, pairs, given = [], [], set()
    if f"--{_PAGE}" in flags and keys is not None:
        keys = (*keys, _PAGE)
    rest = iter(words)
    for word in rest:
        name, equals, text = word.partition("=")
        key = name.lstrip("-").strip()
        if "/" in name or word == "-":
            # Keys have no slash: this is a file such as runs/lr=0.1/metrics.jsonl. "-" is stdin.
            names.append(word)
        elif equals and name in flags and key != _PAGE:
            raise UserError(f"{name} takes no value; expected {name} alone, got {word!r}")
        elif equals:
            pairs.append((key, text))
        elif word in flags:
            given.add(word)
        elif word.startswith("--") and (keys is None or own_key(key, keys) in keys):
            value = next(rest, None)
            if value is None or value.startswith("--"):
                raise _without_value(word, flags if keys is None else ())
            pairs.append((key, value))
        elif word.startswith("-"):
            raise _unknown_flag(word, flags)
        else:
            names.append(word)
    found = Arguments(names=tuple(names), pairs=tuple(pairs), flags=frozenset(given))
    found = _with_page(found) if f"--{_PAGE}" in flags else found
    return found if keys is None else found.checked(keys)


def _with_page(arguments: Arguments) -> Arguments:
    """``--html`` and the page's name, which may stand anywhere, as one pair."""
    flag = f"--{_PAGE}"
    pages = [name for name in arguments.names if name.endswith(_PAGE_SUFFIXES)]
    given = [_PAGE] * (flag in arguments.flags) + [k for k, _ in arguments.pairs if k == _PAGE]
    if pages and (len(pages) > 1 or not given or arguments.values.get(_PAGE)):
        missing = "" if given else f" without {flag}"
        raise UserError(f"{pages[0]!r}{missing}: expected a page once, after {flag}")
    if not given:
        return arguments
    page = (_PAGE, "".join(pages) or arguments.values.get(_PAGE, ""))
    return Arguments(
        names=tuple(name for name in arguments.names if name not in pages),
        pairs=(*(pair for pair in arguments.pairs if pair[0] != _PAGE), page),
        flags=arguments.flags - {flag},
    )


def own_key(key: str, keys: Collection[str]) -> str:
    """The command's word for a key: itself, or that of which it is a synonym.

    >>> own_key("model", ("model", "dtype")), own_key("model", ("model_name", "steps"))
    ('model', 'model_name')
    """
    other = _SYNONYMS.get(key, key)
    return other if key not in keys and other in keys else key


def check_key(key: str, known: Collection[str], *, usually: str = "") -> None:
    """Rejects an unknown key.

    Args:
        key: as given.
        known: all keys accepted here.
        usually: the usual cause and the fix.

    Raises:
        UserError: the key is unknown; the message suggests the nearest one.
    """
    if key in known:
        return
    if not known:
        raise UserError(f"unknown key {key!r}; no key=value is expected here", hint=usually)
    listed = f"; expected {_listed(known)}" if len(known) <= _MOST_LISTED else ""
    raise UserError(
        f"unknown key {key!r}{listed}",
        hint=nearest(key, known) + usually,
    )


def _without_value(word: str, flags: Collection[str]) -> UserError:
    """The error for ``--key`` alone; it may be a misspelt one of `flags`."""
    if nearest(word, flags):
        return _unknown_flag(word, flags)
    return UserError(f"{word} has no value; expected {word} VALUE or {word}=VALUE")


def _unknown_flag(word: str, flags: Collection[str]) -> UserError:
    return UserError(
        f"unknown flag {word!r}; expected {_listed((*flags, '--help'))}",
        hint=nearest(word, flags),
    )


def _listed(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last
