"""What libtpu is asked for."""

import pytest

from mfu_jax.planning.compilation.absent_devices import tpu_options
from mfu_jax.planning.compilation.compiling import Request, request_json
from mfu_jax.planning.targets import parse_target


@pytest.mark.parametrize(
    ("topology", "slices", "options"),
    [
        ("v5p:2x2x1", 1, {}),
        ("v5p:2x2x1", 2, {"num_slices": 2}),
        # JAX has one device for both cores of a v4; libtpu has one for each without being told.
        ("v4:2x2x1", 1, {"chip_config_name": "megacore"}),
        ("v4:2x2x1", 2, {"num_slices": 2, "chip_config_name": "megacore"}),
        # Cloud TPU's pods of 16 chips along an axis wrap around there.
        ("v6e:16x16", 1, {"wrap": (True, True, False)}),
        ("v5e:16x16", 1, {"wrap": (True, True, False)}),
        ("v5e:8x16", 1, {"wrap": (False, True, False)}),
        ("v5e:8x8", 1, {}),
        # Whole cubes of 4 x 4 x 4 chips are a torus, parts of one a mesh.
        ("v4:4x4x8", 1, {"chip_config_name": "megacore", "wrap": (True, True, True)}),
        ("v5p:2x4x4", 1, {}),
        ("tpu7x:4x8x8", 2, {"num_slices": 2, "wrap": (True, True, True)}),
        # libtpu refuses a topology that its hosts of 2x2x1 chips do not divide.
        ("v6e:1x1", 1, {"chips_per_host_bounds": (1, 1, 1)}),
        ("v5e:1x4", 1, {"chips_per_host_bounds": (1, 2, 1)}),
        ("tpu7x:1x1x1", 1, {"chips_per_host_bounds": (1, 1, 1)}),
    ],
)
def test_slices_hosts_and_the_cores_of_a_v4(topology, slices, options):
    target = parse_target(topology=topology, slices=slices)
    assert tpu_options(request_json(Request(module="", target=target))) == options
