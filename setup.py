"""Packaging. The top-level `configs/` and `layers/` are installed inside `mfu_jax`."""

from pathlib import Path

from setuptools import find_packages, setup

# Third-party libraries whose trainers tests/clients/ instruments.
CLIENTS = [
    "dm-haiku>=0.0.14",
    "equinox>=0.13",
    "flowjax>=19",
    "numpyro>=0.18",
    "transformers>=4.46,<5",  # version 5 dropped the Flax models
]

setup(
    name="mfu_jax",
    version="0.1.0",
    description="Compute-efficiency metrics for JAX training: MFU, HFU, and where the rest went",
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=[
        *find_packages(include=["mfu_jax", "mfu_jax.*"]),
        "mfu_jax.layers",
        "mfu_jax.configs",
    ],
    package_dir={"mfu_jax.layers": "layers", "mfu_jax.configs": "configs"},
    package_data={
        "mfu_jax": ["**/*.yml", "py.typed"],
        "mfu_jax.configs": ["*.yml", "models/*.yml"],
    },
    install_requires=[
        "absl-py>=2.1",
        "flax>=0.12.5",
        "grain>=0.2.15",
        "jax>=0.10",
        "numpy>=2",
        "optax>=0.2.6",
        "orbax-checkpoint>=0.11.30",
        "PyYAML>=6",
        "rich>=13",
        "tensorboardX>=2.6.4",
    ],
    extras_require={
        "tpu": ["jax[tpu]>=0.10"],
        "cuda": ["jax[cuda13]>=0.10"],
        "tensorboard": ["tensorboard>=2.19"],
        "wandb": ["wandb>=0.18"],
        "mlflow": ["mlflow-skinny>=2.16"],
        "prometheus": ["prometheus-client>=0.20"],
        "clients": CLIENTS,
        "test": [
            *CLIENTS,
            "hypothesis>=6.100",
            "import-linter>=2.5",
            "mypy>=1.15",
            "pytest>=8",
            "pytest-xdist>=3.6",
            "ruff>=0.11",
            "tensorboard>=2.19",
            "types-PyYAML",
        ],
    },
    entry_points={"console_scripts": ["mfu-jax = mfu_jax.cli:main"]},
)
