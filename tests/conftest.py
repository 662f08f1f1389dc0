"""Eight virtual CPU devices for every test that wants a mesh, set before JAX starts."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
