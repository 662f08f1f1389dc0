"""Parses the words of a command line: names, ``key=value`` and ``--flags``."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from mfu_jax.errors import UserError, nearest

_MOST_LISTED = 25  # the most keys that an error message lists; a model has more fields than this


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The words of a command line, sorted by kind.

    Attributes:
        names: words that are neither pairs nor flags: models, files, chips.
        pairs: key and text of each ``key=value`` or ``--key=value``, in the order given.
        flags: such as ``--json``.
    """

    names: tuple[str, ...]
    pairs: tuple[tuple[str, str], ...]
    flags: frozenset[str]

    @property
    def values(self) -> dict[str, str]:
        """Key → text; if a key is given twice, the last one wins."""
        return dict(self.pairs)

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


def parse(
    words: Iterable[str],
    *,
    keys: Collection[str] | None = None,
    flags: Collection[str] = (),
    options: Collection[str] = (),
) -> Arguments:
    """Sorts the words of a command line.

    Args:
        words: as split by the shell, without the command.
        keys: all keys of the command; None accepts any, for commands that check them later.
        flags: all flags of the command, with their dashes; ``--help`` never gets here. A flag that
            ends in ``=`` may have a value: ``--html`` or ``--html=FILE``.
        options: flags that take a value, ``--junit=FILE`` or ``--junit FILE``, with their dashes.

    Raises:
        UserError: an unknown key or flag, a key without a value, or a flag with one.

    >>> parse(["h100", "--dtype=fp8", "--json"], keys=["dtype"], flags=["--json"]).values
    {'dtype': 'fp8'}
    """
    names, pairs, given = [], [], set()
    optional = {flag[:-1] for flag in flags if flag.endswith("=")}
    flags = [flag.rstrip("=") for flag in flags]
    rest = iter(words)
    for word in rest:
        name, equals, text = word.partition("=")
        if "/" in name:  # keys have no slash: this is a file such as runs/lr=0.1/metrics.jsonl
            names.append(word)
            continue
        key = name.lstrip("-").strip()
        if word in options:
            pairs.append((key, _value_of(word, next(rest, None))))
            continue
        if name in options or (equals and name in optional):
            pairs.append((key, text))
            continue
        if equals and name in flags:
            raise UserError(f"{name} takes no value; expected {name} alone, got {word!r}")
        if equals:
            if keys is not None:
                check_key(key, keys)
            pairs.append((key, text))
        elif word in flags:
            given.add(word)
        elif word.startswith("-") and word != "-":  # by convention, "-" is stdin
            raise _unknown_flag(word, keys, flags)
        else:
            names.append(word)
    return Arguments(names=tuple(names), pairs=tuple(pairs), flags=frozenset(given))


def _value_of(option: str, word: str | None) -> str:
    if word is None or word.startswith("--"):
        raise UserError(f"{option} has no value; expected {option} VALUE or {option}=VALUE")
    return word


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
        raise UserError(f"unknown key {key!r}; no key=value is expected here{usually}")
    listed = f"; expected {_listed(known)}" if len(known) <= _MOST_LISTED else ""
    raise UserError(f"unknown key {key!r}{nearest(key, known)}{listed}{usually}")


def _unknown_flag(word: str, keys: Collection[str] | None, flags: Collection[str]) -> UserError:
    if word.lstrip("-") in (keys or ()):
        return UserError(f"{word} has no value; expected {word}=…, with an equals sign")
    if keys is None:
        expected = _listed((f"{word}=…, with an equals sign", *flags, "--help"))
        return UserError(f"unknown flag {word!r}{nearest(word, flags)}; expected {expected}")
    return UserError(
        f"unknown flag {word!r}{nearest(word, flags)}; expected {_listed((*flags, '--help'))}"
    )


def _listed(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last
