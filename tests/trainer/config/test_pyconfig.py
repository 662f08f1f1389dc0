"""YAML and key=value → Config: precedence, types, and one clear line for each kind of bad input."""

import ast
import dataclasses
from pathlib import Path

import pytest

from mfu_jax.errors import UserError
from mfu_jax.settings import MetricsKeys
from mfu_jax.trainer.config import pyconfig
from mfu_jax.trainer.config.keys import base_defaults
from mfu_jax.util.yaml_files import CONFIG_FOLDER, model_names
from tests.support.messages import is_told


def load(*arguments: str) -> pyconfig.Config:
    return pyconfig.load(["configs/base.yml", *arguments])


def test_base_yml_and_config_have_the_same_keys() -> None:
    assert set(base_defaults()) == {f.name for f in dataclasses.fields(pyconfig.Config)}


def test_the_trainer_reads_only_keys_that_exist() -> None:
    trainer = Path(pyconfig.__file__).parents[1]
    read = {
        node.attr
        for file in (
            trainer / "loop.py",
            *(trainer / "run").iterdir(),
            *(trainer / "step").iterdir(),
        )
        if file.suffix == ".py"
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("config", "self.config")
    }
    assert len(read) > 50
    assert read <= {*base_defaults(), *dir(pyconfig.Config)}


def test_base_yml_and_the_settings_have_the_same_defaults() -> None:
    of_trainer = {
        **dict.fromkeys(("metrics_file", "tensorboard_dir", "heartbeat_file"), "auto"),
        "profile_dir": "auto",
        "abort_on_nan_loss": True,
        "abort_on_inf_loss": True,
    }
    defaults = {field.name: field.default for field in dataclasses.fields(MetricsKeys)}
    base = base_defaults()
    assert {key: base[key] for key in defaults} == defaults | of_trainer


def test_every_key_of_base_yml_has_a_line_of_why() -> None:
    for line in (CONFIG_FOLDER / "base.yml").read_text().splitlines():
        if line and not line.startswith("#"):
            assert " # " in line, line


def test_without_a_file_the_embedded_demo_is_taken() -> None:
    assert pyconfig.load([]).run_name == "demo"


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "own.yml"
    file.write_text("steps: 5\nseed: 9\n")
    config = pyconfig.load([str(file), "steps=7"])
    assert (config.steps, config.seed) == (7, 9)


# The sizes are those of the Llama 2 paper (arXiv 2307.09288): 32 layers of width 4096.
@pytest.mark.parametrize("file", [[], ["configs/demo.yml"], ["configs/base.yml"]])
def test_a_named_models_sizes_win_over_those_of_a_bundled_file(file: list[str]) -> None:
    config = pyconfig.load([*file, "model_name=llama2-7b"])
    assert (config.num_decoder_layers, config.emb_dim, config.mlp_dim) == (32, 4096, 11008)
    assert (config.vocab_size, config.num_kv_heads, config.head_dim) == (32000, 32, 128)


def test_so_they_do_where_the_bundled_files_are_behind_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "configs"
    link.symlink_to(pyconfig.CONFIG_FOLDER, target_is_directory=True)
    monkeypatch.setattr(pyconfig, "CONFIG_FOLDER", link)
    assert pyconfig.load(["model_name=llama2-7b"]).num_decoder_layers == 32


def test_other_keys_of_the_demo_stay_beside_a_named_model() -> None:
    assert pyconfig.load(["model_name=llama2-7b"]).max_target_length == 256


LLAMA2_7B = {"num_decoder_layers": 32, "emb_dim": 4096}
CONTRADICTIONS = {
    "in the file": ("model_name: llama2-7b\nnum_decoder_layers: 2\n", [], "num_decoder_layers=2"),
    "by the default's value": ("model_name: llama2-7b\nemb_dim: 128\n", [], "emb_dim=128"),
    "on the command line": ("model_name: llama2-7b\n", ["emb_dim=64"], "emb_dim=64"),
    "name on the command line": ("emb_dim: 64\n", ["model_name=llama2-7b"], "emb_dim=64"),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_a_size_given_twice_is_refused_with_both_values_unless_overridden(
    case: str, tmp_path: Path
) -> None:
    text, arguments, given = CONTRADICTIONS[case]
    file = tmp_path / "own.yml"
    file.write_text(text)
    with pytest.raises(UserError, match="override_model_config=true") as error:
        pyconfig.load([str(file), *arguments])
    key, _, value = given.partition("=")
    assert given in str(error.value)
    assert f"{key}={LLAMA2_7B[key]}" in str(error.value)
    config = pyconfig.load([str(file), *arguments, "override_model_config=true"])
    assert getattr(config, key) == int(value)
    assert config.mlp_dim == 11008


def test_a_size_given_twice_with_one_value_is_no_contradiction(tmp_path: Path) -> None:
    file = tmp_path / "own.yml"
    file.write_text("model_name: llama2-7b\nemb_dim: 4096\nmlp_activations: [silu, linear]\n")
    assert pyconfig.load([str(file), "num_decoder_layers=3.2e1"]).num_decoder_layers == 32


def test_a_copy_of_base_yml_does_not_undo_the_model(tmp_path: Path) -> None:
    file = tmp_path / "copy.yml"
    file.write_text((CONFIG_FOLDER / "base.yml").read_text())
    assert pyconfig.load([str(file), "model_name=llama2-7b"]).num_decoder_layers == 32


@pytest.mark.parametrize(
    ("argument", "key", "value"),
    [
        ("learning_rate=3e-4", "learning_rate", 3e-4),
        ("steps=1e3", "steps", 1000),
        ("scan_layers=False", "scan_layers", False),
        ("run_name=123", "run_name", "123"),
        ("mlp_activations=[gelu,linear]", "mlp_activations", ("gelu", "linear")),
        ("mlp_activations=gelu", "mlp_activations", ("gelu",)),
        ("--steps=3", "steps", 3),
        ("metrics_file=", "metrics_file", ""),
    ],
)
def test_arguments_take_the_type_of_their_key(argument: str, key: str, value: object) -> None:
    got = getattr(load(argument), key)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["stepz=3"], ["'stepz'", "did you mean 'steps'"]),
        (["log_period=0"], ["log_period=0", "at least 1", "pass a large number"]),
        (["warmup_steps=-1"], ["warmup_steps=-1", "at least 0"]),
        (["peak_tflops_per_device=-1"], ["peak_tflops_per_device=-1", "positive number"]),
        (["hang_factor=-1"], ["hang_factor=-1", "at least 0"]),
        (["hardware=h1000"], ["'h1000'"]),
        (["steps=many"], ["steps='many'", "whole number"]),
        (["steps=1.5"], ["steps='1.5'", "whole number"]),
        (["steps=-1"], ["steps=-1", "0 or more"]),
        (["learning_rate=nan"], ["learning_rate=nan", "finite"]),
        (["scan_layers=maybe"], ["scan_layers='maybe'", "true or false"]),
        (
            ["remat_policy=half"],
            ["remat_policy='half'", "none, minimal, full, minimal_with_context"],
        ),
        (["num_kv_heads=3"], ["num_query_heads=4", "num_kv_heads=3"]),
        (["num_decoder_layers=0"], ["num_decoder_layers=0", "more than 0"]),
        (["head_dim=7"], ["head_dim=7", "even"]),
        (["mlp_activations=[]"], ["mlp_activations", "one entry"]),
        (["mlp_activations=[swoosh]"], ["'swoosh'", "silu, gelu"]),
        (["remat_policy=names"], ["remat_policy=names", "remat_save_names=[]"]),
        (["remat_policy=names", "remat_save_names=[contex]"], ["did you mean 'context'"]),
        (["num_experts=4"], ["num_experts=4", "moe_mlp_dim"]),
        (["num_experts_per_tok=2"], ["num_experts_per_tok=2", "num_experts=1"]),
        (
            ["num_experts=6", "moe_mlp_dim=8", "n_routing_groups=4", "topk_routing_group=1"],
            ["n_routing_groups=4", "equal size"],
        ),
        (["decoder_block=deepseek4"], ["decoder_block=deepseek4", "q_lora_rank"]),
        (["attention_type=mla"], ["attention_type=mla", "decoder_block=llama2", "deepseek"]),
        (["engram_layers=[1]"], ["engram_vocab_bases=[]", "engram_max_ngram_size=3"]),
        (["scale=tiny"], ["scale=tiny", "model_name"]),
        (["context=4"], ["expected one of remat, device, offload", "context_parallelism"]),
        (["fsdp=2", "ici_fsdp_parallelism=2"], ["fsdp is given twice"]),
        (["remat_policy=full", "context=device"], ["context=device", "remat_policy=custom"]),
        (["run_name=a/b"], ["run_name='a/b'"]),
        (["model_name=llama2-7c"], ["'llama2-7c'", "did you mean 'llama2-7b'"]),
        (["model_name=../base"], ["unknown model '../base'"]),
        (["eval_fraction=2"], ["eval_fraction=2", "0 to 1"]),
    ],
)
def test_bad_arguments_are_named_in_one_line(arguments: list[str], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        load(*arguments)
    assert is_told(str(error.value))
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("steps: [1\n", ["line 2"]),
        ("steps: !!python/object/apply:os.system ['true']\n", ["line 1", "python"]),
        ("- a\n- b\n", ["key: value"]),
        ("steps: 1\nsteps: 2\n", ["line 2", "'steps'", "twice"]),
        ("stepz: 1\n", ["'stepz'", "did you mean 'steps'"]),
        ("steps:\n", ["steps=None", "whole number"]),
    ],
)
def test_bad_files_are_named_in_one_line(tmp_path: Path, text: str, words: list[str]) -> None:
    file = tmp_path / "bad.yml"
    file.write_text(text)
    with pytest.raises(UserError) as error:
        pyconfig.load([str(file)])
    assert is_told(str(error.value))
    for word in ["bad.yml" if "None" not in words[0] else "", *words]:
        assert word in str(error.value)


def test_missing_folder_and_binary_files_are_refused(tmp_path: Path) -> None:
    binary = tmp_path / "binary.yml"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "none.yml", tmp_path, binary):
        with pytest.raises(UserError, match=path.name):
            pyconfig.load([str(path)])


@pytest.mark.parametrize("name", model_names())
def test_every_bundled_model_is_one_that_the_trainer_builds(name: str) -> None:
    assert load(f"model_name={name}").model_name == name


def test_of_a_model_that_sees_and_hears_the_text_part_is_trained() -> None:
    config = load("model_name=qwen3-omni-30b-a3b")
    assert (config.num_decoder_layers, config.num_experts) == (48, 128)
    assert config.hidden_size_for_vit == 0


def test_tiny_divides_sizes_and_keeps_the_pattern() -> None:
    whole, tiny = (load("model_name=deepseek3-671b", f"scale={s}") for s in ("full", "tiny"))
    assert (whole.num_decoder_layers, whole.first_num_dense_layers) == (61, 3)
    assert (tiny.num_decoder_layers, tiny.first_num_dense_layers) == (3, 1)
    assert (tiny.num_experts, tiny.num_experts_per_tok, tiny.vocab_size) == (8, 2, 256)
    assert tiny.attention_type == whole.attention_type == "mla"


def test_the_axes_of_the_mesh_have_maxtexts_names_too() -> None:
    config = load("ici_fsdp_parallelism=4", "ici_expert_parallelism=2", "ici_data_parallelism=1")
    assert (config.data, config.fsdp, config.expert, config.tensor) == (1, 4, 2, 1)


def test_tiny_keeps_queries_per_key_head() -> None:
    tiny = load("model_name=llama3-8b", "scale=tiny")  # 32 query heads, 8 key heads
    assert (tiny.num_query_heads, tiny.num_kv_heads) == (4, 1)


def test_an_output_directory_may_be_an_object_store() -> None:
    config = load("base_output_directory=gs://b/runs", "run_name=r", "tensorboard_dir=s3://c/tb")
    assert config.run_directory == "gs://b/runs/r"
    assert config.metrics_path == "gs://b/runs/r/metrics.jsonl"
    assert config.tensorboard_path == "s3://c/tb"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\0b", "a\nb", "é" * 128])
def test_a_run_name_is_the_name_of_a_folder(name: str) -> None:
    with pytest.raises(UserError, match="run_name="):
        pyconfig.from_mapping({}, overrides={"run_name": name})
    assert pyconfig.from_mapping({}, overrides={"run_name": "é" * 127}).run_name


@pytest.mark.parametrize("key", ["base_output_directory", "metrics_file", "tensorboard_dir"])
def test_paths_that_would_go_astray_are_refused(key: str) -> None:
    for path in ("gs:/b/x", "a\0b"):
        with pytest.raises(UserError, match=f"{key}="):
            pyconfig.from_mapping({}, overrides={key: path})
