"""The programs of one step: which one a call ran, and how two calls differ."""

from __future__ import annotations

import dataclasses
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
from jax.sharding import NamedSharding

from mfu_jax.instrumentation.outputs import Selection
from mfu_jax.instrumentation.program_analysis import ProgramAnalysis
from mfu_jax.logger.timing.compile_events import CompileEvent, CompileLog

_MOST_DIFFERENCES = 8  # if every weight of a model changed, nobody reads them all
_NUMBERS = (bool, int, float, complex)

LeafKey = tuple[Any, ...]
_Entry = TypeVar("_Entry")


@dataclasses.dataclass(frozen=True)
class Signature:
    """The arguments of one call, without array values.

    Attributes:
        structure: the tree structure of the arguments, static fields included.
        paths: the path of each leaf, such as ``batch['tokens']``.
        keys: for each leaf, what a compiled program depends on.
    """

    structure: Any
    paths: tuple[str, ...]
    keys: tuple[LeafKey, ...]

    @classmethod
    def of(
        cls, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Signature:
        """The signature of ``fn(*args, **kwargs)``; arrays may have been donated already."""
        named = _by_name(fn, args, kwargs)
        found = [
            (name + jax.tree_util.keystr(path), leaf_key(leaf))
            for name, value in named
            for path, leaf in jax.tree_util.tree_flatten_with_path(value)[0]
        ]
        paths, keys = zip(*found, strict=True) if found else ((), ())
        return cls(jax.tree.structure((tuple(args), dict(kwargs))), paths, keys)

    def differences(self, later: Signature, *, numbers_are_traced: bool = False) -> list[str]:
        """What changed from this call to a `later` one, one line per change.

        Args:
            later: the other call.
            numbers_are_traced: no argument is static, so another value of a Python number does not
                mean another program.

        >>> before = Signature.of(lambda x: x, (jax.ShapeDtypeStruct((8, 4), "float32"),), {})
        >>> after = Signature.of(lambda x: x, (jax.ShapeDtypeStruct((6, 4), "float32"),), {})
        >>> before.differences(after)
        ['x: float32[8,4] → float32[6,4]']
        """
        old, new = dict(zip(self.paths, self.keys)), dict(zip(later.paths, later.keys))  # noqa: B905

        def same(path: str) -> bool:
            return numbers_are_traced and _traced(old[path]) == _traced(new[path])

        lines = [
            f"{path}: {_shown(old[path], new[path])}"
            for path in new
            if path in old and old[path] != new[path] and not same(path)
        ]
        lines += [f"{path}: new, {describe(new[path])}" for path in new if path not in old]
        lines += [f"{path}: gone, was {describe(old[path])}" for path in old if path not in new]
        if not lines and self.structure != later.structure:
            lines = _given_differently(self.structure, later.structure)
        if len(lines) > _MOST_DIFFERENCES:
            more = len(lines) - _MOST_DIFFERENCES
            lines = [*lines[:_MOST_DIFFERENCES], f"and {more} more"]
        return lines


def _given_differently(before: Any, after: Any) -> list[str]:
    """Why two calls with the same leaves run different programs."""
    old, new = (_arguments(structure).keys() for structure in (before, after))
    if old == new:
        return ["a static field of an argument, or the kind of a container"]
    old_names, new_names = ({key for key in keys if isinstance(key, str)} for keys in (old, new))
    by_name = ", ".join(sorted(old_names ^ new_names)) or "an argument"
    how = "by name" if len(new_names) > len(old_names) else "by position"
    return [f"{by_name}: now given {how}, which is another program of JAX's"]


def _arguments(structure: Any) -> dict[int | str, Any]:
    """The tree structure of each argument, by position or name.

    The arguments themselves are not rebuilt: the classes in them are the user's, and their
    constructors may convert or refuse anything that is not an array.

    Args:
        structure: of (args, kwargs).
    """
    args, kwargs = structure.children()
    _, names = kwargs.node_data()
    return {
        **dict(enumerate(args.children())),
        **dict(zip(names, kwargs.children(), strict=True)),
    }


def leaf_key(leaf: Any) -> LeafKey:
    """What determines the program: an array's shape, dtype, …; any other leaf's value."""
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        committed = getattr(leaf, "committed", None) is not False
        sharding = getattr(leaf, "sharding", None) if committed else None
        weak = getattr(leaf, "weak_type", False)
        return ("array", tuple(leaf.shape), str(leaf.dtype), weak, sharding)
    try:
        hash(leaf)
    except TypeError:
        return ("object", type(leaf), id(leaf))
    return ("value", type(leaf), leaf)


def loosened(key: Any) -> Any:
    """The key of a traced Python number without its value; other keys unchanged."""
    if isinstance(key, tuple) and key[0] == "value" and key[1] in _NUMBERS:
        return key[:2]
    return key


def _traced(key: LeafKey) -> LeafKey:
    """The key of a traced argument: a Python number is a scalar array of weak type."""
    if key[0] == "value" and key[1] in _NUMBERS:
        aval = jax.typeof(key[2])
        return ("array", (), str(aval.dtype), aval.weak_type, None)
    return key


def describe(key: LeafKey) -> str:
    """``float32[8,128]`` for an array, the value for a static argument."""
    if key[0] != "array":
        return f"{key[2]!r}" if key[0] == "value" else f"a {key[1].__name__}"
    return f"{key[2]}[{','.join(map(str, key[1]))}]"


def _shown(old: LeafKey, new: LeafKey) -> str:
    before, after = describe(old), describe(new)
    if before == after and old[0] == new[0] == "array":
        if old[3] != new[3]:
            before, after = (f"{before} {'weak' if k[3] else 'strong'} type" for k in (old, new))
        else:
            before, after = _placed(old[4]), _placed(new[4])
    return f"{before} → {after}"


def _placed(sharding: Any) -> str:
    if sharding is None:
        return "not committed to a device"
    if isinstance(sharding, NamedSharding):
        return f"{sharding.spec} over {dict(sharding.mesh.shape)}"
    return str(sharding)


def _by_name(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[tuple[str, Any]]:
    """Name and value of each argument, in the order in which JAX flattens (args, kwargs)."""
    try:
        by_position = dict(inspect.signature(fn).bind_partial(*args).arguments)
    except (TypeError, ValueError):  # some C functions have no signature
        by_position = {f"argument {i}": arg for i, arg in enumerate(args)}
    return [*by_position.items(), *sorted(kwargs.items())]


class SignatureTable(Generic[_Entry]):
    """Entries by signature, with fast look-up: compares only leaves in which known ones differ.

    This is sound if every unknown signature is announced by a compilation.

    Args:
        whole: compare all leaves instead, because unannounced programs may exist.

    Attributes:
        is_ambiguous: whether finding a call's program requires looking at its arguments.
    """

    def __init__(self, *, whole: bool = False) -> None:
        self.is_ambiguous = whole
        self._whole = whole
        self._known: dict[Signature, _Entry] = {}
        self._places: list[_LeafLocation] | None = None
        self._found: dict[Any, _Entry] = {}

    def add(self, signature: Signature, entry: _Entry) -> None:
        """Adds an entry, or replaces the one with the same signature."""
        self._known.pop(signature, None)
        self._known[signature] = entry
        self.is_ambiguous = self._whole or len(self._known) > 1
        one_structure = len({known.structure for known in self._known}) == 1
        self._places = None
        if one_structure and not self._whole:
            differing = [
                i
                for i in range(len(signature.keys))
                if len({known.keys[i] for known in self._known}) > 1
            ]
            self._places = _places(signature.structure, differing)
            probes = {s: tuple(s.keys[i] for i in differing) for s in self._known}
        else:
            probes = {s: (s.structure, *s.keys) for s in self._known}
        self._found = {}
        for known, probe in probes.items():  # the latest wins if only a traced number differs
            self._found[tuple(map(loosened, probe))] = self._known[known]
        for known, probe in probes.items():
            self._found[probe] = self._known[known]

    def get(self, signature: Signature) -> _Entry | None:
        """The entry of a signature; None if unknown."""
        return self._known.get(signature)

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Entry | None:
        """The entry of a call; None if its signature is unknown."""
        probe: tuple[Any, ...]
        if self._places is None:
            leaves, structure = jax.tree.flatten((args, kwargs))
            probe = (structure, *map(leaf_key, leaves))
        else:
            try:
                probe = tuple([leaf_key(place.leaf(args, kwargs)) for place in self._places])
            except LookupError:  # for example given by position instead of by name
                return None
        return self._found.get(probe) or self._found.get(tuple(map(loosened, probe)))


class _LeafLocation(NamedTuple):
    """Where to find a leaf without flattening the other arguments.

    Attributes:
        argument: the argument's position or name.
        leaf_number: index among the leaves of that argument; None if it is a leaf itself.
    """

    argument: int | str
    leaf_number: int | None

    def leaf(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """This place's leaf in a call."""
        value = kwargs[self.argument] if isinstance(self.argument, str) else args[self.argument]
        return value if self.leaf_number is None else jax.tree.leaves(value)[self.leaf_number]


def _places(structure: Any, indices: Sequence[int]) -> list[_LeafLocation]:
    """The places of leaves, given as indices among all leaves of (args, kwargs)."""
    places = [
        _LeafLocation(argument, None if jax.tree_util.treedef_is_leaf(inner) else index)
        for argument, inner in _arguments(structure).items()
        for index in range(inner.num_leaves)
    ]
    return [places[i] for i in indices]


class StepProgram(NamedTuple):
    """The analysis of one program of a step, and how metrics are read from its output.

    Attributes:
        analysis: its cost; None if the analysis failed.
        selection: which outputs are metrics.
    """

    analysis: ProgramAnalysis | None
    selection: Selection


class BeforeCall(NamedTuple):
    """What was known before a call.

    Attributes:
        compile_count: number of compilations on its thread.
        added: number of known programs.
    """

    compile_count: int
    added: int


class StepPrograms:
    """Determines which program a call ran, if possible without looking at its arguments.

    A call that compiled something ran a new program. Any other call repeated the last program if
    only one is known; only if several are known do the arguments decide.

    Args:
        compile_log: reports compilations.
        has_earlier_programs: the step was compiled before it was instrumented, so a call can run
            a program whose compilation was not observed.

    Attributes:
        table: the known ones, by signature.
        functions: JAX's names of what was compiled in calls of the step.
        added: number of known programs.
        lock: held during the analysis of a new program, so that only one of several calls does it.
    """

    def __init__(self, compile_log: CompileLog, *, has_earlier_programs: bool) -> None:
        self.functions: set[str] = set()
        self.added = 0
        self.lock = threading.RLock()
        self.table: SignatureTable[StepProgram] = SignatureTable(whole=has_earlier_programs)
        self._signature: Signature | None = None
        self._compile_counts: dict[int, int] = {}  # by ids of threads that have called the step
        self._analyses: list[ProgramAnalysis] = []
        self._compile_log = compile_log
        compile_log.subscribe(self._on_compile)

    def begin_call(self) -> BeforeCall:
        """Called on the same thread just before the step."""
        return BeforeCall(self._compile_counts.setdefault(threading.get_ident(), 0), self.added)

    def has_compiled(self, before: BeforeCall) -> bool:
        """Whether the call on this thread has compiled something."""
        return self._compile_counts.get(threading.get_ident(), 0) != before.compile_count

    def add(self, signature: Signature, program: StepProgram) -> list[str] | None:
        """Adds the program that has just run for the first time.

        Returns:
            What changed since the program before it was added; None for the first program.
        """
        self.added += 1
        before, self._signature = self._signature, signature
        self.table.add(signature, program)
        if (analysis := program.analysis) is not None:
            self._analyses.append(analysis)
        if before is None:
            return None
        numbers_are_traced = analysis is not None and analysis.takes_all_leaves
        return before.differences(signature, numbers_are_traced=numbers_are_traced)

    def close(self, timeout: float) -> None:
        """Waits at most `timeout` seconds for each count; stops observing compilations."""
        for analysis in self._analyses:
            analysis.wait(timeout)
        self._compile_log.unsubscribe(self._on_compile)

    def _on_compile(self, event: CompileEvent) -> None:
        if event.stage == "compile" and event.thread_id in self._compile_counts:
            self._compile_counts[event.thread_id] += 1
            self.functions.add(event.function)
