"""`tabulate`: parameters and FLOPs of every module of a Flax model.

While the model is traced, each module call runs in its own named scope, so that models without
named scopes are attributed too.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from mfu_jax.errors import UserError
from mfu_jax.flops.lengths import NO_LENGTHS, Lengths
from mfu_jax.flops.traced import tracing
from mfu_jax.flops.traced.counting import TracedCount, count_with_scopes, take_lengths
from mfu_jax.util.formatting import columns

if TYPE_CHECKING:
    from flax import linen, nnx

ModulePath = tuple[str, ...]

_MARKER = re.compile(r"mfu_jax_module\.(\d+)")
_NUMBER = "_mfu_jax_module"


@dataclass(frozen=True, kw_only=True)
class ModuleRow:
    """One module, including the modules inside it.

    Attributes:
        path: attribute names from the model down, joined by ``/``; empty for the model itself.
        kind: its class; empty for a named scope.
        parameters: number of parameter elements; None if unknown (named scopes).
        forward: FLOPs of its forward pass, all attention pairs counted.
        backward: FLOPs of its gradient.
        share: its share of the whole model's forward and backward FLOPs.
    """

    path: str
    kind: str
    parameters: int | None
    forward: int
    backward: int
    share: float


@dataclass(frozen=True, kw_only=True)
class ModuleTable:
    """The rows, in module order, and the count of the whole model."""

    rows: tuple[ModuleRow, ...]
    count: TracedCount

    def to_json(self) -> dict[str, Any]:
        """Rows and count as plain JSON values."""
        return {"rows": [asdict(row) for row in self.rows], "count": self.count.to_json()}

    def __str__(self) -> str:
        text = columns([_HEADER, *map(_cells, self.rows)], "<<>")
        text.insert(1, "-" * max(map(len, text)))
        return "\n".join([*text, *self._notes()])

    def _repr_html_(self) -> str:
        from mfu_jax.pages.fragment import fragment

        rows, notes = map(_cells, self.rows), list(self._notes())
        return fragment("FLOPs by module", _HEADER, rows, words=(1,), notes=notes)

    def _notes(self) -> Iterator[str]:
        for item in self.count.unaccounted:
            yield f"not counted exactly: {item.name} × {item.times}: {item.reason}"


_HEADER = ("path", "module", "parameters", "forward FLOPs", "backward FLOPs", "share")


def _cells(row: ModuleRow) -> tuple[str, ...]:
    parameters = "" if row.parameters is None else f"{row.parameters:,}"
    flops = (f"{row.forward:,}", f"{row.backward:,}", f"{row.share:.1%}")
    return (row.path or "(model)", row.kind, parameters, *flops)


def tabulate(model: Any, *args: Any, **kwargs: Any) -> ModuleTable:
    """Parameters and training FLOPs of every module of a model; nothing is run.

    Args:
        model: a Flax NNX or Linen module, or any function (a loss, a step), whose named scopes
            become the rows, with the function's own phases.
        *args: the model's arguments; `jax.ShapeDtypeStruct`s are enough.
        **kwargs: its keyword arguments; ``group_sizes`` and ``sequence_lengths`` work as in
            `count_model_flops`.

    Returns:
        A `ModuleTable`; ``print`` it. Its FLOPs are those of one forward pass and the gradients of
        all parameters, as counted by `count_model_flops`.

    Raises:
        UserError: the model cannot be traced with these arguments.

    >>> import jax
    >>> from flax import nnx
    >>> model = nnx.Sequential(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), jax.nn.relu)
    >>> table = tabulate(model, jax.ShapeDtypeStruct((2, 8), "float32"))
    >>> [(row.path, row.parameters, row.forward, row.backward) for row in table.rows]
    [('', 36, 128, 128), ('layers/0', 36, 128, 128)]
    """
    lengths = take_lengths(model, args, kwargs) if callable(model) else NO_LENGTHS
    if _is_module_of("flax.nnx", model):
        return _tabulate_nnx(model, args, kwargs, lengths)
    if _is_module_of("flax.linen", model):
        return _tabulate_linen(model, args, kwargs, lengths)
    if not callable(model):
        raise UserError(
            f"tabulate got {type(model).__name__!r}; expected a Flax module or a function",
            hint="pass the model first and then its arguments: tabulate(model, batch)",
        )
    count, flops = count_with_scopes(model, args, kwargs, lengths)
    by_path = {
        (phase, tuple(part for part in scope.split("/") if part)): amount
        for (phase, scope), amount in flops.items()
    }
    paths = {path[:end] for _, path in by_path for end in range(len(path) + 1)} or {()}
    return _table({path: _Module("", None) for path in sorted(paths)}, by_path, count)


def _is_module_of(library: str, model: Any) -> bool:
    """Whether `model` is a module of a library; one never imported cannot have made it."""
    imported = sys.modules.get(library)
    return imported is not None and isinstance(model, imported.Module)


@dataclass(frozen=True)
class _Module:
    kind: str
    parameters: int | None


def _tabulate_nnx(
    model: nnx.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], lengths: Lengths
) -> ModuleTable:
    from flax import nnx

    parts: Any = nnx.split(model, nnx.Param, ...)
    graph, parameters, rest = parts
    modules = {
        tuple(map(str, path)): _Module(type(module).__name__, _size(nnx.state(module, nnx.Param)))
        for path, module in _modules_of(model)
        if not isinstance(module, _containers())
    }
    numbers = {path: number for number, path in enumerate(modules)}

    def loss(parameters: Any, rest: Any, args: tuple[Any, ...], kwargs: Any) -> jax.Array:
        clone = nnx.merge(graph, parameters, rest, copy=True)
        for path, module in _modules_of(clone):
            number = numbers.get(tuple(map(str, path)))
            if number is not None:
                # A static attribute survives nnx's own transformations.
                setattr(module, _NUMBER, number)
        return _sum_of_floats(clone(*args, **kwargs))

    classes = {type(module) for _, module in _modules_of(model)}
    with _methods_in_scopes(classes):
        count, by_path = _count_modules(
            loss, (parameters, rest, args, kwargs), list(modules), lengths
        )
    return _table(modules, by_path, count)


def _modules_of(model: nnx.Module) -> Iterator[tuple[tuple[Any, ...], nnx.Module]]:
    """Paths and modules, the model itself included; `iter_modules` was a method until Flax 0.12."""
    from flax import nnx

    if hasattr(nnx, "iter_modules"):
        return nnx.iter_modules(model)
    return type(model).iter_modules(model)


def _containers() -> tuple[type, ...]:
    """NNX's modules that only hold others; `List` is new in Flax 0.12."""
    from flax import nnx

    return tuple(getattr(nnx, name) for name in ("List", "Dict") if hasattr(nnx, name))


def _tabulate_linen(
    model: linen.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], lengths: Lengths
) -> ModuleTable:
    from flax import linen

    rngs = {name: jax.random.key(0) for name in ("params", "dropout", "default")}
    kinds: dict[ModulePath, str] = {}

    def enter(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        path = context.module.path
        kinds.setdefault(path, type(context.module).__name__)
        with jax.named_scope(f"mfu_jax_module.{list(kinds).index(path)}"):
            return call(*args, **kwargs)

    arrays, merge = tracing.split_arrays((args, dict(kwargs)))

    def init(arrays: list[Any]) -> Any:
        args, kwargs = merge(arrays)
        return model.init(rngs, *args, **kwargs)

    def loss(parameters: Any, rest: Any, arrays: list[Any]) -> jax.Array:
        args, kwargs = merge(arrays)
        variables = {"params": parameters, **rest}
        out, _ = model.apply(variables, *args, mutable=list(rest), rngs=rngs, **kwargs)
        return _sum_of_floats(out)

    try:
        rest = dict(jax.eval_shape(init, arrays))
    except Exception as error:
        raise UserError(
            f"{type(model).__name__} could not be initialised with the given arguments "
            f"({type(error).__name__}: {str(error).splitlines()[0]}); expected the arguments "
            "of a training step",
            hint="usually a wrong example argument",
        ) from error
    parameters = rest.pop("params", {})
    with linen.intercept_methods(enter):
        count, by_path = _count_modules(loss, (parameters, rest, arrays), kinds, lengths)
    modules = {path: _Module(kind, _size(_at(parameters, path))) for path, kind in kinds.items()}
    return _table(modules, by_path, count)


def _count_modules(
    loss: Callable[..., Any],
    arguments: tuple[Any, ...],
    paths: Iterable[ModulePath],
    lengths: Lengths,
) -> tuple[TracedCount, dict[tuple[str, ModulePath], int]]:
    """Counts a loss and its gradient by (phase, path); `paths` may grow during the trace."""
    loss.__name__ = "model"  # error messages should name what the user passed
    count, flops = count_with_scopes(jax.value_and_grad(loss), arguments, {}, lengths)
    numbered = list(paths)
    by_path: Counter[tuple[str, ModulePath]] = Counter()
    for (phase, scope), amount in flops.items():
        markers = _MARKER.findall(scope)
        by_path[phase, numbered[int(markers[-1])] if markers else ()] += amount
    return count, dict(by_path)


def _table(
    modules: Mapping[ModulePath, _Module],
    by_path: Mapping[tuple[str, ModulePath], int],
    count: TracedCount,
) -> ModuleTable:
    """One row per module, including the modules inside it."""

    def inside(path: ModulePath, phase: str) -> int:
        return sum(n for (p, at), n in by_path.items() if p == phase and at[: len(path)] == path)

    rows = []
    for path in sorted(modules, key=_natural_order):
        forward, backward = inside(path, "forward"), inside(path, "backward")
        rows.append(
            ModuleRow(
                path="/".join(path),
                kind=modules[path].kind,
                parameters=modules[path].parameters,
                forward=forward,
                backward=backward,
                share=(forward + backward) / count.total if count.total else 0.0,
            )
        )
    return ModuleTable(rows=tuple(rows), count=count)


def _natural_order(path: ModulePath) -> list[tuple[bool, int, str]]:
    """Layer 2 before layer 10."""
    return [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in path]


# All threads share the classes: the methods that one tabulation restores must be the originals.
_patching = threading.RLock()


@contextlib.contextmanager
def _methods_in_scopes(classes: set[type]) -> Iterator[None]:
    """In here, methods of numbered modules run in named scopes; only traced clones have numbers."""
    owners = {base for c in classes for base in c.__mro__ if _is_below_module(base)}
    with _patching, contextlib.ExitStack() as restore:
        for owner in owners:
            for name, method in list(vars(owner).items()):
                if _is_traced_method(name, method):
                    restore.callback(setattr, owner, name, method)
                    setattr(owner, name, _in_scope(method))
        yield


def _is_traced_method(name: str, method: Any) -> bool:
    return isinstance(method, types.FunctionType) and (name == "__call__" or name[0] != "_")


def _is_below_module(cls: type) -> bool:
    from flax import nnx

    return issubclass(cls, nnx.Module) and cls is not nnx.Module


def _in_scope(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        number = getattr(self, _NUMBER, None)
        if number is None:
            return method(self, *args, **kwargs)
        with jax.named_scope(f"mfu_jax_module.{number}"):
            return method(self, *args, **kwargs)

    return call


def _sum_of_floats(tree: Any) -> jax.Array:
    """The sum of all float results, as a scalar to differentiate."""
    arrays = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(x), jnp.floating)]
    return sum((jnp.sum(x.astype(jnp.float32)) for x in arrays), jnp.float32(0))


def _size(tree: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def _at(tree: Any, path: ModulePath) -> Any:
    for name in path:
        tree = tree.get(name, {})
    return tree
