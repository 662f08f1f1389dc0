"""`mfu_jax.plan` of a step: what goes to the compiler, and what comes back.

Here the CPU's compiler stands in for the chips'. The step is one scanned matmul a layer under
`jax.checkpoint`: forward, again, and two gradients are 4 × 2·m·k·n a layer, 3 of them the model's.
"""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mfu_jax
from mfu_jax.dumps.recording import record
from mfu_jax.errors import UserError
from mfu_jax.planning import any_step
from mfu_jax.planning.compilation.compiling import Compiled
from mfu_jax.util.jax_internals import compile_lowered

LAYERS, BATCH, WIDTH, DEVICES = 3, 16, 32, 8
MATMUL = 2 * BATCH * WIDTH * WIDTH * LAYERS


def step(params, x):
    def loss(params):
        def layer(h, w):
            with jax.named_scope("mlp"):
                return jnp.tanh(h @ w), None

        return (jax.lax.scan(jax.checkpoint(layer), x, params["w"])[0] ** 2).sum()

    return jax.tree.map(lambda a, b: a - 0.1 * b, params, jax.grad(loss)(params))


def _arguments(mesh=None):
    split = [P(), P()] if mesh is None else [P(None, None, "b"), P(("a", "b"), None)]
    shapes = [(LAYERS, WIDTH, WIDTH), (BATCH, WIDTH)]
    w, x = (
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=mesh and NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, split, strict=True)
    )
    return {"w": w}, x


def _abstract_mesh(shape=(2, 4)):
    return AbstractMesh(shape, ("a", "b"), axis_types=(AxisType.Auto,) * 2)


@pytest.fixture
def requests(monkeypatch):
    """Requests that would go to a child; the CPU's compiler answers them."""
    seen = []

    def compile_here(request, **_):
        seen.append(request)
        axes = request.config["mesh"]
        size = request.target.devices
        mesh = jax.make_mesh(
            tuple(axes.values()),
            tuple(axes),
            axis_types=(AxisType.Auto,) * len(axes),
            devices=jax.devices()[:size],
        )
        return Compiled(record(compile_lowered(request.config["text"], mesh)), ("a note",))

    monkeypatch.setattr(any_step.cache, "compile_cached", compile_here)
    return seen


def repeated(w, x, times):
    return jax.lax.fori_loop(0, times, lambda _, h: jnp.tanh(h @ w), x)


def test_iterations_that_depend_on_data_may_be_given(requests):
    """The name is the one that the note of a plan without them has."""
    of = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((WIDTH, WIDTH), (BATCH, WIDTH))]
    of.append(jax.ShapeDtypeStruct((), jnp.int32))
    once = mfu_jax.plan(repeated, *of, topology="v6e-1")
    assert any("give trip_counts={'jit(repeated)/while': …}" in note for note in once.notes)
    given = {"jit(repeated)/while": 10}
    ten_times = mfu_jax.plan(repeated, *of, topology="v6e-1", trip_counts=given)
    assert (once.executed_flops, ten_times.executed_flops) == (MATMUL // 3, 10 * MATMUL // 3)
    assert not any("trip_counts" in note for note in ten_times.notes)


@pytest.mark.parametrize("wrong", [3, {"jit(repeated)/while": 2.5}, {"jit(repeated)/while": -1}])
def test_wrong_iterations(requests, wrong):
    with pytest.raises(UserError, match="expected a loop's name and its iterations"):
        mfu_jax.plan(step, *_arguments(_abstract_mesh()), topology="v6e-8", trip_counts=wrong)
    assert not requests


def test_a_plan_of_a_step(requests):
    arguments = _arguments(_abstract_mesh())
    jitted = jax.jit(step, donate_argnums=0)
    plan = mfu_jax.plan(jitted, *arguments, topology="v6e-8", tokens_per_step=BATCH)
    assert plan.model_flops == 3 * MATMUL // DEVICES
    assert plan.fits
    assert plan.tokens_per_sec_per_chip == pytest.approx(BATCH / DEVICES / plan.step_time_seconds)
    assert plan.notes == ("a note",)
    assert plan.memory["parameters"] == 4 * LAYERS * WIDTH * WIDTH // 4
    assert "fits" in str(plan)
    assert requests[0].config["mesh"] == {"a": 2, "b": 4}


@pytest.mark.full
def test_the_program_is_that_of_the_attached_devices(requests):
    """The same step, lowered and compiled by `jit` on a real mesh, is the same program."""
    mfu_jax.plan(jax.jit(step, donate_argnums=0), *_arguments(_abstract_mesh()), topology="v6e-8")
    request = requests[0]
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    ours = record(compile_lowered(request.config["text"], mesh))
    theirs = record(jax.jit(step, donate_argnums=0).lower(*_arguments(mesh)).compile())
    assert ours.memory["argument_size_in_bytes"] == theirs.memory["argument_size_in_bytes"]
    assert ours.memory["alias_size_in_bytes"] == theirs.memory["alias_size_in_bytes"] > 0
    assert (
        mfu_jax.executed_flops(ours).total
        == mfu_jax.executed_flops(theirs).total
        == 4 * MATMUL // DEVICES
    )


def test_without_shardings_arrays_are_split_over_all_devices(requests):
    plan = mfu_jax.plan(step, *_arguments(), topology="v6e-8")
    assert requests[0].config["mesh"] == {"fsdp": 8}
    assert plan.notes[-2] == "no argument has a sharding: each is split over 8 devices"
    assert any("donate_argnums=0" in note for note in plan.notes)
    assert plan.tokens_per_sec_per_chip is None


@pytest.mark.parametrize("flags", ["--xla_a=1 --xla_b=2", ["--xla_a=1", "--xla_b=2"]])
def test_flags_are_words_of_a_text_or_of_a_list(requests, flags):
    mfu_jax.plan(step, *_arguments(), topology="v6e-8", xla_flags=flags)
    assert requests[0].flags == ("--xla_a=1", "--xla_b=2")


def test_a_clock_state_among_the_flags_is_the_plans(requests):
    state = "--xla_tpu_dvfs_p_state=3"
    plan = mfu_jax.plan(step, *_arguments(), topology="tpu7x:2x2x1", xla_flags=state)
    assert any(f"clock state is {state}" in note for note in plan.notes)


def test_arrays_are_taken_for_their_shapes(requests):
    arrays = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), _arguments())
    plan = mfu_jax.plan(step, *arrays, topology="v6e-1")
    assert plan.model_flops == 3 * MATMUL


def test_the_state_of_a_flax_module_keeps_its_variables(requests):
    linear = nnx.eval_shape(lambda: nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(linear)

    def of_state(state, x):
        assert isinstance(state["kernel"], nnx.Variable)
        return jax.grad(lambda s: (nnx.merge(graph, s)(x) ** 2).sum())(state)

    def of_module(module, x):
        return nnx.value_and_grad(lambda m: (m(x) ** 2).sum())(module)

    x = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
    for planned, argument in ((of_state, state), (nnx.jit(of_module), linear)):
        plan = mfu_jax.plan(planned, argument, x, topology="v6e-4")
        assert plan.model_flops == 2 * (2 * BATCH * WIDTH * WIDTH) // 4


def test_an_equinox_module_brings_its_functions_along(requests):
    eqx = pytest.importorskip("equinox")
    module = eqx.filter_eval_shape(
        lambda: eqx.nn.MLP(WIDTH, WIDTH, WIDTH, depth=1, key=jax.random.key(0))
    )

    def train_step(module, x):
        gradients = eqx.filter_grad(lambda m: (jax.vmap(m)(x) ** 2).sum())(module)
        return eqx.apply_updates(module, gradients)

    x = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
    for planned in (train_step, eqx.filter_jit(train_step)):
        plan = mfu_jax.plan(planned, module, x, topology="v6e-4")
        # Two matmuls forwards, two for the weights' gradients, one for the hidden units'.
        assert plan.model_flops == 5 * (2 * BATCH * WIDTH * WIDTH) // 4
        assert plan.executed_flops == plan.model_flops


@pytest.mark.parametrize(
    ("arguments", "options", "word"),
    [
        (_arguments(_abstract_mesh((2, 2))), {"topology": "v6e-8"}, "expected 8, those of v6e"),
        (_arguments(_abstract_mesh()), {"topology": "v9-8"}, "expected a TPU generation"),
        (_arguments()[:1], {"topology": "v6e-8"}, "cannot be lowered for tpu: TypeError"),
        (_arguments(_abstract_mesh()), {}, "no chips to plan for"),
        (_arguments(), {"topology": "v6e-8", "xla_flags": "xla_a=1"}, "xla_flags has 'xla_a=1'"),
        (_arguments(), {"topology": "v6e-8", "tokens_per_step": -5}, "tokens_per_step=-5"),
    ],
)
def test_wrong_input_is_one_line(requests, arguments, options, word):
    with pytest.raises(UserError, match=word):
        mfu_jax.plan(step, *arguments, **options)
    assert not requests


def test_a_step_of_this_machines_mesh_is_told(requests):
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2,
                         devices=jax.devices()[:4])  # fmt: skip
    fixed = jax.jit(step, in_shardings=({"w": NamedSharding(mesh, P())}, NamedSharding(mesh, P())))
    with pytest.raises(UserError, match=r"lowered for 4 devices|cannot be lowered"):
        mfu_jax.plan(fixed, *_arguments(), topology="v6e-8")
