"""brax's PPO: one `with` around its training. Run: python examples/brax_ppo.py [METRICS_FILE]"""

import sys

from brax import envs
from brax.training.agents.ppo import train as ppo

from mfu_jax.integrations import brax

metrics_file = sys.argv[1] if len(sys.argv) > 1 else "runs/brax_ppo.jsonl"
with brax.instrumented(metrics_file=metrics_file):  # a step is all between two evaluations
    make_policy, params, _ = ppo.train(
        environment=envs.get_environment("fast"),
        num_timesteps=4096,
        episode_length=64,
        num_envs=16,
        num_evals=5,
        batch_size=16,
        num_minibatches=2,
        unroll_length=4,
        num_updates_per_batch=2,
    )
