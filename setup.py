"""Packaging. The top-level `configs/` and `layers/` are installed inside `mfu_jax`."""

from pathlib import Path

from setuptools import find_packages, setup

# What models and trainers of the tests need. No part of the core: a metrics library must not decide
# which Flax, Optax and Orbax (31 packages, 600 MB) somebody else's trainer has.
FLAX = [
    "flax>=0.11.2",
    "optax>=0.2.5",
    "orbax-checkpoint>=0.11.25",
]

# What the reference trainer needs beyond the core.
TRAIN = [
    *FLAX,
    "flax>=0.12.5",  # nnx.List, Variable.get_value
    "grain>=0.2.14",  # text files, every epoch in another order; random tokens need none
    "rich>=13",
]

# Third-party libraries whose trainers tests/clients/ instruments.
CLIENTS = [
    "dm-haiku>=0.0.14",
    "equinox>=0.13",
    "flowjax>=19",
    "numpyro>=0.18",
    "transformers>=4.46,<5",  # version 5 dropped the Flax models
]

# The pages as a site: mkdocs.yml.
DOCS = ["mkdocs-material>=9.6"]

# What scripts/test_matrix.sh installs for its selection of tests.
TEST_CORE = [*FLAX, "hypothesis>=6.100", "nvidia-ml-py>=12.535", "pytest>=9", "pytest-xdist>=3.6"]

setup(
    name="mfu_jax",
    version="0.1.0",
    description="Compute-efficiency metrics for JAX training: MFU, HFU, and where the rest went",
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    classifiers=[
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    packages=[
        *find_packages(include=["mfu_jax", "mfu_jax.*"]),
        *(f"mfu_jax.{name}" for name in find_packages(include=["layers", "layers.*"])),
        "mfu_jax.configs",
    ],
    package_dir={"mfu_jax.layers": "layers", "mfu_jax.configs": "configs"},
    package_data={
        "mfu_jax": ["**/*.yml", "**/*.css", "**/*.js", "py.typed"],
        "mfu_jax.configs": ["*.yml", "models/*.yml"],
    },
    # Lower bounds only, the lowest with which scripts/test_matrix.sh passes: trainers pin these
    # packages, and pip must find versions that suit both.
    install_requires=[
        "absl-py>=2.1",
        "crc32c>=2.4",  # without it tensorboardX computes checksums in Python: 0.1 ms a step
        "jax>=0.8",
        "numpy>=2",
        "PyYAML>=6.0.1",
        "tensorboardX>=2.6.2",
    ],
    extras_require={
        "train": TRAIN,
        # quantization=int8 and fp8 of the reference trainer
        "quantize": ["qwix>=0.1.8"],
        "tpu": ["jax[tpu]>=0.8"],
        "cuda": ["jax[cuda13]>=0.8"],
        # mfu-jax plan: the compilers of chips that are not here; jax pins libtpu.
        "plan-tpu": ["jax[tpu]>=0.8", "qwix>=0.1.8"],  # recipes in fp8 and int8 are qwix's
        "plan-gpu": ["jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cudnn-cu13"],
        "tensorboard": ["tensorboard>=2.19"],
        "wandb": ["wandb>=0.18"],
        "mlflow": ["mlflow-skinny>=2.16"],
        "nvidia": ["nvidia-ml-py>=12.535"],
        "prometheus": ["prometheus-client>=0.20"],
        "clients": CLIENTS,
        "docs": DOCS,
        "trace-hf": ["torch>=2.6", "transformers>=5.0"],
        "test-core": TEST_CORE,
        "test": [
            *TRAIN,
            *CLIENTS,
            *TEST_CORE,
            *DOCS,
            "import-linter>=2.5",
            "mypy>=1.15",
            "qwix>=0.1.8",
            "ruff>=0.11",
            "tensorboard>=2.19",
            "types-PyYAML",
        ],
    },
    entry_points={"console_scripts": ["mfu-jax = mfu_jax.cli:main"]},
)
