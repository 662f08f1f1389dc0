"""Loops of other libraries, and of trainers in their style."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from tests.support.client import Bare, Client
from tests.support.client_loops.plain import (
    HIDDEN,
    INPUTS,
    MLP,
    OUTPUTS,
    ROWS,
    batches,
    make_params,
    matmul,
    mlp_loss,
    norm_of,
)


def haiku(observer: Bare) -> Iterator[Any]:
    """`hk.transform_with_state`: parameters, batch norm's state and a key go in and out."""
    import haiku as hk

    def forward(x: jax.Array) -> jax.Array:
        x = jnp.tanh(hk.Linear(HIDDEN)(x))
        x = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.9)(x, True)
        return hk.Linear(OUTPUTS)(hk.dropout(hk.next_rng_key(), 0.1, x))

    model = hk.transform_with_state(forward)
    optimizer = optax.adam(1e-2)

    @jax.jit
    def update(params: Any, state: Any, opt_state: Any, key: jax.Array, x: jax.Array) -> Any:
        def loss_fn(params: Any) -> Any:
            y, new_state = model.apply(params, state, key, x)
            return jnp.mean((y - 1) ** 2), new_state

        (loss, state_), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), state_, opt_state, loss

    update = observer.wrap(update)
    keys = hk.PRNGSequence(0)
    params, state = model.init(next(keys), jnp.ones((ROWS, INPUTS)))
    opt_state = optimizer.init(params)
    for x in batches():
        params, state, opt_state, loss = update(params, state, opt_state, next(keys), x)
        yield params, state, loss


def numpyro_svi(observer: Bare) -> Iterator[Any]:
    """numpyro: `SVI.update` of a Bayesian network with a mean-field guide."""
    import numpyro
    from numpyro import distributions as dist
    from numpyro.infer import SVI, Trace_ELBO, autoguide

    def model(x: jax.Array, y: jax.Array) -> None:
        w1 = numpyro.sample("w1", dist.Normal(0, 1).expand([INPUTS, HIDDEN]).to_event(2))
        w2 = numpyro.sample("w2", dist.Normal(0, 1).expand([HIDDEN, OUTPUTS]).to_event(2))
        mean = jnp.tanh(x @ w1) @ w2
        numpyro.sample("y", dist.Normal(mean, 1.0).to_event(2), obs=y)

    svi = SVI(model, autoguide.AutoNormal(model), numpyro.optim.Adam(1e-2), Trace_ELBO())
    update = observer.wrap(jax.jit(svi.update))
    targets = jnp.ones((ROWS, OUTPUTS))
    state = svi.init(jax.random.key(0), jnp.ones((ROWS, INPUTS)), targets)
    for x in batches():
        state, loss = update(state, x, targets)
        yield svi.get_params(state), loss


def levanter_style(observer: Bare) -> Iterator[Any]:
    """An Equinox trainer state that holds everything, as levanter has it."""
    import equinox as eqx

    optimizer = optax.adamw(1e-2)

    class TrainerState(eqx.Module):
        step: jax.Array
        model: Any
        opt_state: Any
        training_key: jax.Array

    @eqx.filter_jit(donate="all-except-first")
    def train_step(x: jax.Array, state: TrainerState) -> Any:
        key, _ = jax.random.split(state.training_key)

        def loss_fn(model: Any) -> jax.Array:
            return jnp.mean(jax.vmap(model)(x) ** 2)

        loss, grads = eqx.filter_value_and_grad(loss_fn)(state.model)
        arrays = eqx.filter(state.model, eqx.is_inexact_array)
        updates, opt_state = optimizer.update(grads, state.opt_state, arrays)
        model = eqx.apply_updates(state.model, updates)
        return loss, TrainerState(state.step + 1, model, opt_state, key)

    train_step = observer.wrap(train_step)
    model = eqx.nn.MLP(INPUTS, OUTPUTS, HIDDEN, 1, key=jax.random.key(0))
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    state = TrainerState(jnp.array(0), model, opt_state, jax.random.key(1))
    for x in batches():
        loss, state = train_step(x, state)
        yield loss, state.step, jax.tree.leaves(eqx.filter(state.model, eqx.is_array))


class _AxlearnState(NamedTuple):
    prng_key: jax.Array
    model: Any
    learner: Any


def axlearn_style(observer: Bare) -> Iterator[Any]:
    """axlearn's `_train_step`: a state of three parts; summaries and outputs in one mapping."""
    optimizer = optax.adamw(1e-2)

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state: _AxlearnState, input_batch: Any) -> Any:
        key, _ = jax.random.split(state.prng_key)
        loss, grads = jax.value_and_grad(mlp_loss)(state.model, input_batch["x"])
        updates, learner = optimizer.update(grads, state.learner, state.model)
        model = optax.apply_updates(state.model, updates)
        summaries = {"learner": {"grad_norm": norm_of(grads)}}
        outputs = {"summaries": summaries, "loss": loss, "aux": {"num_rows": ROWS}}
        return _AxlearnState(key, model, learner), outputs

    train_step = observer.wrap(train_step)
    params = make_params()
    state = _AxlearnState(jax.random.key(0), params, optimizer.init(params))
    for x in batches():
        state, outputs = train_step(state, {"x": x})
        yield state.model, outputs


NODES, EDGES = 6, 10


def graph_network(observer: Bare) -> Iterator[Any]:
    """A graph convolution as jraph writes it: gather along edges, `segment_sum` into nodes."""

    class GraphsTuple(NamedTuple):
        nodes: jax.Array
        senders: jax.Array
        receivers: jax.Array

    def net(params: Any, graph: GraphsTuple) -> jax.Array:
        messages = (graph.nodes @ params["w1"])[graph.senders]
        nodes = jax.nn.relu(jax.ops.segment_sum(messages, graph.receivers, NODES))
        return nodes @ params["w2"]

    @jax.jit
    def train_step(params: Any, graph: GraphsTuple, labels: jax.Array) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            logits = net(params, graph)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": loss}

    train_step = observer.wrap(train_step)
    params = make_params()
    edges = jax.random.randint(jax.random.key(5), (2, EDGES), 0, NODES)
    for x in batches(NODES):
        graph = GraphsTuple(x, edges[0], edges[1])
        params, metrics = train_step(params, graph, jnp.arange(NODES) % OUTPUTS)
        yield params, metrics


GRAPH = 2 * matmul(NODES, INPUTS, HIDDEN) + 3 * matmul(NODES, HIDDEN, OUTPUTS)

CLIENTS = (
    Client(name="haiku", loop=haiku, flops=MLP, package="haiku"),
    # Nothing but the two samples is differentiated: the layers are an MLP's.
    Client(name="numpyro SVI", loop=numpyro_svi, flops=MLP, package="numpyro"),
    Client(name="levanter's style", loop=levanter_style, flops=MLP, package="equinox"),
    Client(name="axlearn's style", loop=axlearn_style, flops=MLP),
    Client(name="graph network", loop=graph_network, flops=GRAPH),
)
