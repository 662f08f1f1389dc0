"""What MaxText is told of the chips, seen from a stand-in of its `train_compile`."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest

from mfu_jax.planning.compilation import maxtext_step
from mfu_jax.planning.compilation.compiling import Request, request_json
from mfu_jax.planning.targets import parse_target


@pytest.mark.parametrize(
    ("chips", "axis", "topology", "slices", "hardware", "devices"),
    [
        ({"topology": "2xv6e-8"}, "dcn_data_parallelism=2", "v6e:2x4", 2, "tpu", 8),
        ({"hardware": "h100", "devices": 16}, "dcn_fsdp_parallelism=1", "1x2x8", 1, "gpu", 16),
        ({"hardware": "h100", "devices": 16}, "dcn_fsdp_parallelism=2", "1x2x8", 2, "gpu", 8),
    ],
)
def test_the_topology_and_the_devices_are_the_requests(
    chips, axis, topology, slices, hardware, devices, tmp_path, monkeypatch
):
    said = []
    table = SimpleNamespace(get_system_characteristics=None)
    stand_in = SimpleNamespace(
        accelerator_to_spec_map=table, jit_and_compile=None, main=said.extend
    )
    stand_in.Transformer = lambda config, mesh: f"model of {config} on {mesh}"
    stand_in.quantizations = SimpleNamespace(maybe_quantize_model=lambda *given: given)
    packages = {"maxtext": ModuleType("maxtext"), "maxtext.trainers": ModuleType("trainers")}
    packages["maxtext"].__file__ = str(tmp_path / "__init__.py")
    meshes = SimpleNamespace(create_hybrid_device_mesh=lambda **options: options)
    packages["maxtext.utils.maxtext_utils"] = SimpleNamespace(mesh_utils=meshes)
    packages["maxtext.trainers.pre_train"] = SimpleNamespace(train_compile=stand_in)
    for name, package in packages.items():
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setattr(maxtext_step, "obey_parent", lambda: None)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "")
    config = {"arguments": ["model_name=llama3.1-8b", axis]}
    target = parse_target(**chips)
    asked = tmp_path / "request.json"
    asked.write_text(json.dumps(request_json(Request(module="", target=target, config=config))))
    maxtext_step.main([str(asked), str(tmp_path / "out.mfu")])
    assert said[2:] == [
        "model_name=llama3.1-8b",
        axis,
        f"compile_topology={topology}",
        f"compile_topology_num_slices={slices}",
        f"hardware={hardware}",
    ]
    system = table.get_system_characteristics(topology)
    assert (system.platform, system.devices_per_slice) == ("tpu", devices)
    assert stand_in.Transformer("config", "mesh") == ("model of config on mesh", "config")
    of_hosts = {"process_is_granule": True} if (hardware, slices) == ("gpu", 2) else {}
    assert meshes.create_hybrid_device_mesh() == of_hosts
