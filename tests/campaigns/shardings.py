"""Planted sharding mistakes against healthy meshes, over eight devices: what the doctor says.

    python -m tests.campaigns.shardings [--topology=v5e:2x4 | --topology=h100] [REGEX]

compiles each of `PLANTS`, each of `HEALTHY`, and the trainer's 22 meshes, and prints what is
reported. A plant is found if the finding with most bytes names its tensor and its line. Without
`--topology` (which needs libtpu, or JAX's CUDA plugin), the devices are eight virtual CPU devices.
"""

from __future__ import annotations

import os

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import argparse
import inspect
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mfu_jax.flops.executed.counting import counter_of
from mfu_jax.flops.executed.mesh_axes import mesh_of
from mfu_jax.flops.executed.resharding.findings import resharded_tensors
from mfu_jax.flops.executed.resharding.resharded_tensor import Kind, ReshardedTensor
from mfu_jax.planning.compilation.absent_devices import absent_devices
from mfu_jax.planning.compilation.gpu_autotuning import autotuned
from mfu_jax.planning.targets import target_config, target_of
from mfu_jax.trainer.step import mesh as trainer_mesh
from mfu_jax.trainer.step import state
from mfu_jax.trainer.step import train_step as trainer_step
from tests.campaigns import meshes

P = PartitionSpec
MARK = "# resharded"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The devices and sizes of a step.

    Attributes:
        mesh: ``data`` × ``model``.
        scale: multiplies widths and vocabulary; sequences grow with its square root.
    """

    mesh: Mesh
    scale: int = 1

    @property
    def rows(self) -> int:
        return 16

    @property
    def length(self) -> int:
        return 32 * max(1, self.scale // 4)

    @property
    def width(self) -> int:
        return 64 * self.scale

    @property
    def hidden(self) -> int:
        return 256 * self.scale

    @property
    def vocabulary(self) -> int:
        return 512 * self.scale

    def array(self, shape: Sequence[int], *spec: Any, dtype: Any = jnp.float32) -> Any:
        """An argument with a sharding."""
        sharding = NamedSharding(self.mesh, P(*spec))
        return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=sharding)

    def pinned(self, x: jax.Array, *spec: Any) -> jax.Array:
        """A value with a sharding constraint."""
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(*spec)))

    def batch(self) -> Any:
        """Activations of which each device along ``data`` has its own."""
        return self.array((self.rows, self.length, self.width), "data")

    def weights(self) -> dict[str, Any]:
        """Two matrices, split over both axes."""
        return {
            "up": self.array((self.width, self.hidden), "data", "model"),
            "down": self.array((self.hidden, self.width), "model", "data"),
        }


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step to compile.

    Attributes:
        run: the function; of a plant, with `MARK` on the line where a tensor is resharded.
        args: its arguments.
        tensor: a pattern that the finding's tensor matches; XLA names an exchange after the
            operation that made the tensor, or after its user.
        kinds: what may be said of it.
        options: for `jax.jit`.
    """

    run: Callable[..., Any]
    args: tuple[Any, ...]
    tensor: str = ""
    kinds: tuple[Kind, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


def feed_forward(w: Any, x: jax.Array) -> jax.Array:
    return jax.nn.relu(x @ w["up"]) @ w["down"]  # the line of a replicated batch


def trained(loss: Callable[..., Any]) -> Callable[..., Any]:
    """A step of gradient descent."""

    def step(w: Any, *args: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(w, *args)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, gradient), value

    return step


def swapped_axes(s: Setting) -> Step:
    """jax-ml/jax#21562: "involuntary full rematerialization" between two pairs of axes."""

    def run(a: Any, b: Any, c: Any) -> Any:
        d = a + b  # resharded
        return c + s.pinned(d, None, ("data", "model"), None)

    shape = (16 * s.scale,) * 3
    before = s.array(shape, "model", None, "data")
    after = s.array(shape, None, ("data", "model"))
    return Step(
        run=run, args=(before, before, after), tensor="add", kinds=("full rematerialization",)
    )


def accumulated_gradients(s: Setting) -> Step:
    """openxla/xla#13306: a reshape into microbatches splits the batch across the loop's axis."""

    def loss(w: Any, x: jax.Array) -> Any:
        return jnp.mean(feed_forward(w, x) ** 2)

    def run(w: Any, x: jax.Array) -> Any:
        parts = x.reshape(4, s.rows // 4, s.length, s.width)
        zeros = jax.tree.map(jnp.zeros_like, w)
        total, _ = jax.lax.scan(  # resharded
            lambda g, x: (jax.tree.map(jnp.add, g, jax.grad(loss)(w, x)), None), zeros, parts
        )
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, total)

    return Step(
        run=run, args=(s.weights(), s.batch()), tensor="dynamic_slice|^x$", kinds=("lost batch",)
    )


def merged_batch(s: Setting) -> Step:
    """Rows that are split become the minor part of a merged dimension."""

    def loss(w: Any, x: jax.Array) -> Any:
        h = x.transpose(1, 0, 2).reshape(s.length * s.rows, s.width)  # resharded
        return jnp.mean(feed_forward(w, h) ** 2)

    tensor = r"args\[0\]|reshape"
    return Step(
        run=trained(loss), args=(s.weights(), s.batch()), tensor=tensor, kinds=("lost batch",)
    )


def top_of_split_logits(s: Setting) -> Step:
    """The best of a vocabulary that is split: whole logits on every device."""

    def run(w: Any, x: jax.Array) -> Any:
        return jax.lax.top_k(x @ w, 4)  # resharded

    return Step(
        run=run,
        args=(s.array((s.width, s.vocabulary), None, "model"), s.batch()),
        tensor="top_k|dot_general",
        kinds=("full rematerialization", "replicated work", "moved for one operation"),
    )


def fused_projection(s: Setting) -> Step:
    """Queries, keys and values in one split matrix: the parts do not end where shards do."""
    heads, head = 8, s.width // 8
    parts = [heads * head, heads * head * 3 // 2]

    def loss(w: Any, x: jax.Array) -> Any:
        q, k, v = jnp.split(x @ w["qkv"], parts, -1)  # resharded
        q = q.reshape(s.rows, s.length, heads, head)
        k, v = (jnp.repeat(y.reshape(s.rows, s.length, heads // 2, head), 2, 2) for y in (k, v))
        scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", scores, v)
        return jnp.mean((mixed.reshape(s.rows, s.length, -1) @ w["out"]) ** 2)

    w = {
        "qkv": s.array((s.width, 2 * s.width), None, "model"),
        "out": s.array((s.width, s.width), "model"),
    }
    return Step(
        run=trained(loss), args=(w, s.batch()), tensor="split", kinds=("split across shards",)
    )


def conflicting_operands(s: Setting) -> Step:
    """A sum of two tensors, one split by width, one by position."""

    def run(x: jax.Array, y: jax.Array) -> Any:
        z = jnp.sin(x) + jnp.cos(y)  # resharded
        return jnp.tanh(z)

    shape = (s.rows, s.length, s.width)
    by_width, by_position = s.array(shape, "data", None, "model"), s.array(shape, "data", "model")
    return Step(
        run=run, args=(by_width, by_position), tensor="add", kinds=("moved for one operation",)
    )


def there_and_back(s: Setting) -> Step:
    """A constraint in between that splits positions instead of rows."""

    def loss(w: Any, x: jax.Array) -> Any:
        h = s.pinned(x @ w["up"], None, "data", "model")
        h = jax.nn.relu(h)  # resharded
        return jnp.mean((s.pinned(h, "data", None, "model") @ w["down"]) ** 2)

    return Step(
        run=trained(loss),
        args=(s.weights(), s.batch()),
        tensor="max|select_n",
        kinds=("moved for one operation", "there and back"),
    )


def forgotten_batch(s: Setting) -> Step:
    """A constraint that names the width and forgets the rows."""

    def loss(w: Any, x: jax.Array) -> Any:
        h = jax.nn.relu(x @ w["up"])  # resharded
        return jnp.mean((s.pinned(h, None, None, "model") @ w["down"]) ** 2)

    return Step(
        run=trained(loss),
        args=(s.weights(), s.batch()),
        tensor="max|dot_general",
        kinds=("lost batch",),
    )


def replicated_batch(s: Setting) -> Step:
    """Data that nobody split: devices along ``data`` repeat each other."""

    def loss(w: Any, x: jax.Array) -> Any:
        h = x @ w["up"]  # resharded
        return jnp.mean((jax.nn.relu(h) @ w["down"]) ** 2)

    batch = s.array((s.rows, s.length, s.width))
    return Step(
        run=trained(loss),
        args=(s.weights(), batch),
        tensor=r"args\[0\]",
        kinds=("replicated batch",),
    )


def replicated_moments(s: Setting) -> Step:
    """Moments that are kept whole beside split weights."""

    def loss(w: Any, x: jax.Array) -> Any:
        return jnp.mean(feed_forward(w, x) ** 2)

    def run(train_state: Any, x: jax.Array) -> Any:
        gradient = jax.grad(loss)(train_state["params"], x)
        mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, train_state["mu"], gradient)
        return {
            "params": jax.tree.map(lambda p, m: p - 0.1 * m, train_state["params"], mu),
            "mu": mu,
        }

    w = s.weights()
    mu = {name: s.array(leaf.shape) for name, leaf in w.items()}
    train_state = {"params": w, "mu": mu}
    kept = jax.tree.map(lambda leaf: leaf.sharding, train_state)
    return Step(
        run=run,
        args=(train_state, s.batch()),
        tensor=r"\['mu'\]",
        kinds=("replicated state",),
        options={"out_shardings": kept},
    )


def other_device_order(s: Setting) -> Step:
    """The same devices in a second mesh, whose axes come in another order."""
    other = Mesh(s.mesh.devices.reshape(2, 4), ("model", "data"))

    def loss(w: Any, x: jax.Array) -> Any:
        h = jax.nn.relu(x @ w["up"])  # resharded
        spec = NamedSharding(other, P("data", None, "model"))
        return jnp.mean((jax.lax.with_sharding_constraint(h, spec) @ w["down"]) ** 2)

    tensor = r"dot_general|select_n|transpose|args\[0\]"
    return Step(
        run=trained(loss), args=(s.weights(), s.batch()), tensor=tensor, kinds=("device order",)
    )


def split_layers(s: Setting) -> Step:
    """Stacked weights that are split over the axis that a loop runs over."""

    def loss(w: Any, x: jax.Array) -> Any:
        h, _ = jax.lax.scan(lambda h, w: (jax.nn.relu(h @ w), None), x, w)  # resharded
        return jnp.mean(h**2)

    w = s.array((8, s.width, s.width), "model")
    return Step(run=trained(loss), args=(w, s.batch()), tensor="^w$", kinds=("gathered stack",))


def sum_along_split_axis(s: Setting) -> Step:
    """A running sum over positions that are split."""

    def run(w: Any, x: jax.Array) -> Any:
        return jnp.cumsum(x @ w, axis=1)  # resharded

    x = s.array((s.rows, s.length, s.width), "data", "model")
    return Step(
        run=run,
        args=(s.array((s.width, s.hidden)), x),
        tensor="cumsum|reduce_window_sum|dot_general",
        kinds=("full rematerialization", "replicated work", "moved for one operation"),
    )


def whole_output(s: Setting) -> Step:
    """Logits that a constraint wants whole on every device."""

    def run(w: Any, x: jax.Array) -> Any:
        return s.pinned(x @ w)  # resharded

    return Step(
        run=run,
        args=(s.array((s.width, s.vocabulary), None, "model"), s.batch()),
        tensor="^[xw]$|dot_general",
        kinds=("replicated work",),
    )


def shuffled_rows(s: Setting) -> Step:
    """Rows taken by an index: each device gets those of all."""

    def loss(w: Any, x: jax.Array, order: jax.Array) -> Any:
        h = jax.nn.relu(x @ w["up"])[order]  # resharded
        return jnp.mean((h @ w["down"]) ** 2)

    order = s.array((s.rows,), dtype=jnp.int32)
    return Step(
        run=trained(loss),
        args=(s.weights(), s.batch(), order),
        tensor="gather",
        kinds=("lost batch",),
    )


PLANTS: dict[str, Callable[[Setting], Step]] = {
    make.__name__: make
    for make in (
        swapped_axes,
        accumulated_gradients,
        merged_batch,
        top_of_split_logits,
        fused_projection,
        conflicting_operands,
        there_and_back,
        forgotten_batch,
        replicated_batch,
        replicated_moments,
        other_device_order,
        split_layers,
        sum_along_split_axis,
        whole_output,
        shuffled_rows,
    )
}


def split_weights(s: Setting) -> Step:
    """FSDP and tensor parallelism."""
    return Step(
        run=trained(lambda w, x: jnp.mean(feed_forward(w, x) ** 2)), args=(s.weights(), s.batch())
    )


def split_moments(s: Setting) -> Step:
    """ZeRO-1: whole weights, split moments."""

    def run(train_state: Any, x: jax.Array) -> Any:
        w, mu = train_state
        gradient = jax.grad(lambda w: jnp.mean(feed_forward(w, x) ** 2))(w)
        mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mu, gradient)
        return jax.tree.map(lambda p, m: p - 0.1 * m, w, mu), mu

    w = {name: s.array(leaf.shape) for name, leaf in s.weights().items()}
    mu = {name: s.array(leaf.shape, ("data", "model")) for name, leaf in w.items()}
    kept = jax.tree.map(lambda leaf: leaf.sharding, (w, mu))
    batch = s.array((s.rows, s.length, s.width), ("data", "model"))
    return Step(run=run, args=((w, mu), batch), options={"out_shardings": kept})


def gathered_weights(s: Setting) -> Step:
    """FSDP forward: what is returned has the shape of the batch."""

    def run(w: Any, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda h, w: (h + feed_forward(w, h), None), x, w)[0]

    up = s.array((4, s.width, s.hidden), None, ("data", "model"))
    down = s.array((4, s.hidden, s.width), None, None, ("data", "model"))
    batch = s.array((s.rows, s.length, s.width), ("data", "model"))
    return Step(run=run, args=({"up": up, "down": down}, batch))


def split_positions_between(s: Setting) -> Step:
    """Megatron's sequence parallelism, by constraints: positions are split between products."""

    def loss(w: Any, x: jax.Array) -> Any:
        for _ in range(2):
            x = s.pinned(x / (1 + jnp.mean(x**2, -1, keepdims=True)), "data", "model")
            h = s.pinned(jax.nn.relu(x @ w["up"]), "data", None, "model")
            x = s.pinned(x + h @ w["down"], "data", "model")
        return jnp.mean(x**2)

    w = {
        "up": s.array((s.width, s.hidden), None, "model"),
        "down": s.array((s.hidden, s.width), "model"),
    }
    return Step(run=trained(loss), args=(w, s.batch()))


def exchanged_heads(s: Setting) -> Step:
    """Ulysses, by constraints: positions are split outside attention, heads within."""
    heads, head = 8, s.width // 8

    def loss(w: Any, x: jax.Array) -> Any:
        def heads_of(name: str) -> jax.Array:
            y = (x @ w[name]).reshape(s.rows, s.length, heads, head)
            turned = jnp.concatenate([-y[..., head // 2 :], y[..., : head // 2]], -1)
            return s.pinned(y + 0.5 * turned, "data", None, "model")

        q, k, v = map(heads_of, "qkv")
        scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", scores, v)
        # Without the first pin, the backward pass of the softmax is split by position.
        mixed = s.pinned(s.pinned(mixed, "data", None, "model"), "data", "model")
        mixed = mixed.reshape(s.rows, s.length, s.width)
        return jnp.mean((x + mixed @ w["o"]) ** 2)

    w = {name: s.array((s.width, s.width), "data") for name in "qkvo"}
    x = s.array((s.rows, s.length, s.width), "data", "model")
    return Step(run=trained(loss), args=(w, x))


def exchanged_tokens(s: Setting) -> Step:
    """A mixture of experts as in GShard, by constraints: tokens go to experts and come back."""
    experts, slots = 8, 2 * s.length

    def loss(w: Any, x: jax.Array) -> Any:
        scores = jax.nn.softmax(x @ w["router"])
        sent = (
            jax.nn.one_hot(jnp.argmax(scores, -1), experts)[..., None]
            * jax.nn.one_hot(jnp.arange(s.length) % slots, slots)[None, :, None, :]
        )
        taken = s.pinned(jnp.einsum("bsec,bsd->ebcd", sent, x), "data", None)
        h = jax.nn.relu(jnp.einsum("ebcd,edh->ebch", taken, w["up"]))
        given = s.pinned(jnp.einsum("ebch,ehd->ebcd", h, w["down"]), "data", None)
        return jnp.mean(jnp.einsum("ebcd,bsec,bse->bsd", given, sent, scores) ** 2)

    w = {
        "router": s.array((s.width, experts)),
        "up": s.array((experts, s.width, s.hidden), "data", None, "model"),
        "down": s.array((experts, s.hidden, s.width), "data", "model"),
    }
    return Step(run=trained(loss), args=(w, s.batch()))


def contrasted_batches(s: Setting) -> Step:
    """A contrastive loss: each device's rows against the rows of all."""

    def loss(w: Any, x: jax.Array, y: jax.Array) -> Any:
        a, b = jnp.mean(x, 1) @ w["up"], jnp.mean(y, 1) @ w["up"]
        scores = s.pinned(a @ b.T, "data")
        return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(scores)))

    w = {"up": s.array((s.width, s.hidden), "model")}
    return Step(run=trained(loss), args=(w, s.batch(), s.batch()))


def split_vocabulary(s: Setting) -> Step:
    """Embedding and loss over a vocabulary that is split."""

    def loss(w: Any, tokens: jax.Array, targets: jax.Array) -> Any:
        x = s.pinned(w["table"][tokens], "data")
        logits = s.pinned(x @ w["table"].T, "data", None, "model")
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)
        return -jnp.mean(picked)

    tokens = s.array((s.rows, s.length), "data", dtype=jnp.int32)
    w = {"table": s.array((s.vocabulary, s.width), "model")}
    return Step(run=trained(loss), args=(w, tokens, tokens))


HEALTHY: dict[str, Callable[[Setting], Step]] = {
    make.__name__: make
    for make in (
        split_weights,
        split_moments,
        gathered_weights,
        split_positions_between,
        exchanged_heads,
        exchanged_tokens,
        contrasted_batches,
        split_vocabulary,
    )
}
MESHES = [
    (kind, axes) for kind in meshes.KINDS for axes in meshes.MESHES if meshes.fits(kind, axes)
]


def setting_of(devices: Sequence[Any]) -> Setting:
    """Eight devices as 4 × 2, and widths that suit them."""
    grid = Mesh(np.array(devices).reshape(4, 2), ("data", "model"))
    return Setting(mesh=grid, scale=1 if devices[0].platform == "cpu" else 16)


def found_in(step: Step) -> tuple[ReshardedTensor, ...]:
    """What the doctor says of a step."""
    lowered = jax.jit(step.run, **step.options).lower(*step.args)
    (device, *_) = jax.tree.leaves(step.args)[0].sharding.mesh.devices.flat
    return examined(lowered.compile(compiler_options=options_of(device, lowered)))


def options_of(device: Any, lowered: Any) -> dict[str, Any]:
    """As a plan compiles for an absent GPU; nothing for other devices."""
    request = {"platform": "cuda" if device.platform == "gpu" else device.platform}
    return autotuned(request, lowered.as_text())


def examined(compiled: Any) -> tuple[ReshardedTensor, ...]:
    """What the doctor says of a program."""
    return resharded_tensors(counter_of(compiled), mesh_of(compiled))


def planted_lines(make: Callable[[Setting], Step]) -> list[int]:
    """The marked lines of a plant; empty for mistakes in arguments."""
    lines, first = inspect.getsourcelines(make)
    return [first + number for number, line in enumerate(lines) if MARK in line]


def is_found(name: str, step: Step, found: Sequence[ReshardedTensor]) -> bool:
    """Whether the first finding is the plant."""
    lines = planted_lines(PLANTS[name])
    if not found:
        return False
    first = found[0]
    is_there = not lines or (first.file.endswith("shardings.py") and first.line in lines)
    named = re.search(step.tensor, first.tensor)
    return bool(is_there and named and first.kind in step.kinds)


def trainer_program(kind: str, axes: str, devices: Sequence[Any]) -> Any:
    """The trainer's step on a mesh, compiled."""
    keys = {**meshes.KINDS[kind], **meshes.MESHES[axes]}
    if devices[0].platform == "tpu":
        keys = {**keys, **meshes.ON_TPUS}
    c = meshes.config(per_device_batch_size=meshes.ROWS / len(devices), **keys)
    c = trainer_mesh.with_mesh_sizes(c, devices)
    grid = trainer_mesh.make_mesh(c, devices)
    c = state.resolve_attention(c, grid)
    lowered = trainer_step.lower_train_step(c, grid, state.abstract_state(c, grid))
    is_here = devices[0].platform == "cpu"
    options = meshes.FAST if is_here else options_of(devices[0], lowered)
    return lowered.compile(compiler_options=options)


def main() -> int:
    """Runs the cases whose name matches; 1 if a plant is missed or a healthy program accused."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", default="")
    parser.add_argument("pattern", nargs="?", default="")
    arguments = parser.parse_args()
    devices: Sequence[Any] = jax.devices()[:8]
    if arguments.topology:
        is_tpu = ":" in arguments.topology
        gpus = {"hardware": arguments.topology, "devices": "8"}
        target = target_of({"topology": arguments.topology} if is_tpu else gpus)
        request = {
            "platform": target.platform,
            "topology": target.topology,
            "slices": 1,
            "rings": target.rings,
            "target_config": "" if is_tpu else target_config(target.chip),
        }
        devices = absent_devices(request)
    s, wrong = setting_of(devices), 0

    def show(name: str, found: Sequence[ReshardedTensor], is_right: bool, since: float) -> None:
        nonlocal wrong
        wrong += not is_right
        verdict = "right" if is_right else "WRONG"
        print(f"{verdict}  {name:44} {time.time() - since:5.1f} s", flush=True)
        for one in found:
            print(f"       {one.kind}: {one.text}\n         {one.advice}", flush=True)

    for name, make in {**PLANTS, **HEALTHY}.items():
        if re.search(arguments.pattern, name):
            since, step = time.time(), make(s)
            found = found_in(step)
            is_right = is_found(name, step, found) if name in PLANTS else not found
            show(name, found, is_right, since)
    for kind, axes in MESHES:
        if re.search(arguments.pattern, name := f"{kind} {axes}"):
            since = time.time()
            found = examined(trainer_program(kind, axes, devices))
            show(name, found, not found, since)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
