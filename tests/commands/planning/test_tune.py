"""`mfu-jax tune` as its user runs it: by plans with a compiler that counts, by runs on the CPU."""

import json
import os
import subprocess
import sys

import pytest

from mfu_jax import cli
from mfu_jax.dumps.program import ProgramDump
from mfu_jax.planning import step_sources
from mfu_jax.planning.compilation.compiling import Compiled
from mfu_jax.planning.result import planner
from mfu_jax.trainer.config.pyconfig import load
from mfu_jax.trainer.planned.tuned_axes import axes_of
from tests.support.fake_compiler import TEXT

MAIN = """
import sys
from mfu_jax.cli import main
from mfu_jax.trainer.planned.planned_step import TrainerStep
TrainerStep.module = "tests.support.fake_compiler"
sys.exit(main(["tune", *sys.argv[1:]]))
"""
PLANS = (
    *("topology=v6e-8", "model_name=llama2-7b", "max_target_length=128"),
    *("remat_policy=none,minimal,full", "per_device_batch_size=1..8", "budget=5min"),
    "keep=num_vocab_tiling,attention,weight_gathers,fsdp",
)


def tune(*words, **environment):
    done = subprocess.run(
        [sys.executable, "-c", MAIN, *words],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full
def test_plans_find_the_fastest_point_that_fits_and_go_on(tmp_path):
    log = tmp_path / "log"
    words = (*PLANS, "xla_flags=--xla_a=1", f"cache={tmp_path}/plans")
    there = {"XDG_CACHE_HOME": str(tmp_path), "FAKE_COMPILER_LOG": str(log)}
    answer = json.loads(tune(*words, "--json", **there))
    assert answer["winner"]["values"]["remat_policy"] == "minimal"
    assert answer["winner"]["values"]["per_device_batch_size"] == "4"
    assert answer["plans"] <= answer["points"] // 3
    assert "remat_policy=minimal" in answer["flags"].split()
    assert answer["flags"].startswith("LIBTPU_INIT_ARGS=")
    assert answer["verdict"]["kind"] == "tune"
    compiled = log.read_text()
    text = tune(*words, **there)
    assert log.read_text() == compiled  # nothing anew
    assert text.splitlines()[-1] == f"evidence: {answer['evidence']}"


@pytest.mark.full
def test_runs_on_the_cpu_measure_and_explain(tmp_path):
    words = (
        *("configs/base.yml", "num_decoder_layers=1", "max_target_length=16", "trial_steps=2"),
        *("per_device_batch_size=1,4", "keep=remat_policy,attention,num_vocab_tiling,scan_layers"),
        f"evidence={tmp_path}/evidence.jsonl",
        *(f"metrics_file={tmp_path}/own.jsonl", "webhook_url=http://127.0.0.1:1/SECRET"),
    )
    answer = json.loads(tune(*words, "--json", XLA_FLAGS=""))
    assert [path.name for path in tmp_path.iterdir()] == ["evidence.jsonl"]
    assert "SECRET" not in (tmp_path / "evidence.jsonl").read_text()
    assert answer["plans"] == 0
    assert answer["runs"] == 2
    assert {row["source"] for row in answer["rows"]} == {"measured"}
    assert answer["winner"]["mfu"] > 0
    assert "mfu-jax train configs/base.yml" in answer["flags"]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("remat_polcy=full",), "unknown key 'remat_polcy'"),
        (("remat_policy=none,fulll",), "remat_policy='fulll'"),
        (("keep=fsdpp",), "unknown key 'fsdpp'"),
        (("budget=soon",), "expected a time"),
        (("plans=0",), "plans=0: expected a number above 0"),
        (("precisions=fp4",), "precisions=fp4: expected some of"),
        (("tensor=3", "fsdp=2"), "does not fill the 8 devices"),
    ],
)
def test_wrong_input_is_said(words, part, capsys):
    assert cli.main(["tune", "topology=v6e-8", "model_name=llama2-7b", "cache=", *words]) == 2
    assert part in capsys.readouterr().err


@pytest.mark.parametrize(
    "word", ["devices=4", "slices=2", "memory_fraction=0.9", "network_gbits=200"]
)
def test_what_belongs_to_chips_is_refused_without_them(word, capsys, tmp_path):
    assert cli.main(["tune", "model_name=llama2-7b", word]) == 2
    assert f"{word} without chips to plan for" in capsys.readouterr().err
    run = {"model_name": "llama2-7b", "per_device_batch_size": 1, "max_target_length": 2048}
    (tmp_path / "run.json").write_text(json.dumps({**run, "hardware": "h100", "chips": 64}))
    assert cli.main(["tune", "--run", str(tmp_path / "run.json"), word]) == 2
    assert f"{word} without chips to plan for: the search would plan for" in capsys.readouterr().err


@pytest.mark.full
def test_a_measured_run_is_where_the_search_begins(tmp_path):
    run = {
        **{"hardware": "v6e", "device_type": "v6e-8", "model_name": "llama2-7b"},
        **{"per_device_batch_size": 2, "max_target_length": 128, "remat_policy": "minimal"},
        "xla_flags": ["--xla_tpu_scoped_vmem_limit_kib=65536", "--xla_b=2"],
    }
    file = tmp_path / "run.json"
    file.write_text(json.dumps(run))
    words = ("per_device_batch_size=2,4", "keep=num_vocab_tiling,weight_gathers,fsdp,remat_policy")
    answer = json.loads(
        tune("--run", str(file), "cache=", *words, "--json", XDG_CACHE_HOME=str(tmp_path))
    )
    start = answer["start"]
    assert answer["target"].startswith("v6e:2x4")
    assert start["settings"]["--xla_b"] == "2"
    assert start["settings"]["--xla_tpu_scoped_vmem_limit_kib"] == "65536"
    assert set(start["values"]) == {"flags", "collectives", "per_device_batch_size"}
    assert answer["winner"]["tokens_per_sec_per_chip"] >= start["tokens_per_sec_per_chip"]


@pytest.mark.parametrize("flags", [[], ["--xla_tpu_dvfs_p_state=7"]])
def test_a_search_from_a_run_begins_with_the_plan_of_the_run(flags, tmp_path, monkeypatch, capsys):
    """At its clock, and with the tiles of its experts' matmuls."""
    planned = []

    def compiled(request, **_):
        return Compiled(ProgramDump(text=TEXT))

    def make_plan(program, target, *, work, flags, follows_run, compiled_by):
        assert follows_run
        assert compiled_by.startswith("jax ")
        planned.append((target.chip.clock_with(flags), work.tiles, work.attention))
        return planner.make_plan(program, target, work=work, flags=flags, follows_run=True)

    monkeypatch.setattr(step_sources.cache, "compile_cached", compiled)
    monkeypatch.setattr(step_sources, "make_plan", make_plan)
    run = {
        **{"hardware": "tpu7x", "topology": "2x2x1", "model_name": "mixtral-8x7b"},
        **{"per_device_batch_size": 1, "max_target_length": 1024, "remat_policy": "full"},
        **{"other_flags": {"wi_tile_fwd_batch_seq": 256}, "xla_flags": flags},
    }
    file = tmp_path / "run.json"
    file.write_text(json.dumps(run))
    assert cli.main(["plan", "--run", str(file), "cache="]) == 0
    words = ("plans=1", "cache=", f"evidence={tmp_path}/evidence.jsonl")
    assert cli.main(["tune", "--run", str(file), *words]) == 0
    of_plan, of_tune = planned
    assert of_tune == of_plan
    assert (of_plan[0] == 1.0) == bool(flags)
    assert of_plan[1].tiles["wi_fwd"].rows == 256


def test_axes_are_those_of_the_model_and_the_devices():
    given = {"remat_policy": "full", "dtype": "bfloat16", "num_vocab_tiling": "1,8"}
    words = [f"{key}={text}" for key, text in given.items() if "," not in text]
    config = load(["model_name=mixtral-8x7b", *words])
    axes, fixed = axes_of(
        config, given, platform="gpu", devices=8, chip=None, runs=False, keep=["data"]
    )
    found = {axis.name: axis for axis in axes}
    assert fixed == {"dtype": "bfloat16"}
    assert [*found["num_vocab_tiling"].choices] == ["1", "8"]
    remat = found["remat"]
    assert [*remat.choices.values()][remat.start] == {"remat_policy": "full"}
    assert "mesh" not in found  # data is one of its keys
    assert "sa_block" not in found
    assert "precision" not in found
    assert {"scheduler", "collectives"} <= set(found)


@pytest.mark.parametrize(
    ("given", "choices"),
    [({}, ["auto", "dot_product"]), ({"attention": "cudnn_flash"}, ["cudnn_flash", "dot_product"])],
)
def test_cudnns_attention_is_a_choice_once_and_only_where_it_takes_the_dtype(given, choices):
    """auto is cuDNN's for 16 bits, and another for float32."""
    config = load(
        ["model_name=llama2-7b", "dtype=bfloat16", *(f"{k}={v}" for k, v in given.items())]
    )
    axes, _ = axes_of(config, given, platform="gpu", devices=8, chip=None, runs=False)
    assert [*next(axis for axis in axes if axis.name == "attention").choices] == choices


def test_the_flags_of_a_run_are_kept_or_left_out():
    config = load(["model_name=llama2-7b"])
    flags = ["--xla_tpu_scoped_vmem_limit_kib=65536", "--xla_bare"]
    axes, _ = axes_of(config, {}, platform="tpu", devices=8, chip=None, runs=False, flags=flags)
    found = {axis.name: axis for axis in axes}
    as_given = {"--xla_tpu_scoped_vmem_limit_kib": "65536", "--xla_bare": "true"}
    assert found["flags"].choices == {"as given": as_given, "none": {}}
    assert "vmem" not in found
    assert "collectives" in found


def test_a_mesh_that_was_given_is_named_by_its_axes():
    config = load(["model_name=llama2-7b", "fsdp=2"])
    axes, fixed = axes_of(config, {"fsdp": "2"}, platform="gpu", devices=6, chip=None, runs=True)
    mesh = next(axis for axis in axes if axis.name == "mesh")
    assert [*mesh.choices][mesh.start] == "data=3 fsdp=2"
    assert fixed == {}


def test_the_places_of_a_custom_policy_are_its_own():
    words = ["remat_policy=custom", "context=offload"]
    config = load(["model_name=llama2-7b", *words])
    given = dict(word.split("=") for word in words)
    axes, fixed = axes_of(config, given, platform="tpu", devices=8, chip=None, runs=True)
    remat = next(axis for axis in axes if axis.name == "remat")
    assert [*remat.choices.values()][remat.start] == given
    assert fixed == {}  # context= would make every other policy invalid


def test_a_kept_number_of_tokens_makes_accumulation_an_axis():
    config = load(["model_name=llama2-7b"])
    axes, _ = axes_of(
        config,
        {},
        platform="tpu",
        devices=8,
        chip=None,
        runs=True,
        keep=["tokens_per_step"],
        precisions=["bfloat16", "fp8"],
    )
    found = {axis.name: axis for axis in axes}
    assert "gradient_accumulation_steps" in found
    assert found["precision"].choices["fp8"] == {"dtype": "bfloat16", "quantization": "fp8"}
    assert {"expert"}.isdisjoint(" ".join(found["mesh"].choices).split("="))
