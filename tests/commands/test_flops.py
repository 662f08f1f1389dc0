"""`mfu-jax flops` and the inputs that it takes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from mfu_jax.cli import main
from mfu_jax.errors import UserError
from mfu_jax.flops.analytic.inputs.overrides import load_model_config
from mfu_jax.flops.analytic.totals import calculate_tflops_per_device, convert_mfu
from mfu_jax.util.yaml_files import model_names
from tests.support.messages import is_told
from tests.support.paths import ROOT
from tests.support.work import count_calls

# MaxText's own model file, cut to what says something about sizes.
LLAMA2_7B_YAML = """
base_emb_dim: 4096
base_num_query_heads: 32
base_num_kv_heads: 32
base_mlp_dim: 11008
base_num_decoder_layers: 32
head_dim: 128
mlp_activations: ["silu","linear"]
vocab_size: 32000
enable_dropout: False
logits_via_embedding: False
normalization_layer_epsilon: 1.0e-5
decoder_block: "llama2"
"""


def run_json(capsys, *arguments):
    assert main(["flops", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_has_the_documented_keys_in_full_precision(capsys):
    answer = run_json(capsys, "llama2-7b", "per_device_batch_size=4", "max_target_length=8192")
    # MaxText's own numbers for this step.
    assert answer["total_tflops"] == pytest.approx(1510.1105012736, rel=1e-12)
    assert answer["learnable_weight_tflops"] == pytest.approx(1299.004268740608, rel=1e-12)
    assert answer["attention_tflops"] == pytest.approx(211.106232532992, rel=1e-12)
    assert answer["tokens_per_device"] == 32768
    assert answer["convention"] == "maxtext"
    assert answer["parameters"]["total"] == 6_738_415_616  # the published checkpoint
    training = sum(row["training_flops"] for row in answer["breakdown"])
    assert training == answer["conventions"]["maxtext"]["training_flops"]
    assert training / 1e12 == answer["total_tflops"]


def test_convention_is_a_key_like_any_other(capsys):
    dense = run_json(capsys, "llama2-7b", "convention=dense")
    maxtext = run_json(capsys, "llama2-7b")
    assert dense["attention_tflops"] == 2 * maxtext["attention_tflops"]
    assert dense["conventions"] == maxtext["conventions"]


def test_an_mfu_is_converted_by_the_ratio_of_the_counts(capsys):
    answer = run_json(capsys, "llama2-7b", "mfu=50%", "convention=dense")
    counted = answer["conventions"]
    ratio = counted["maxtext"]["training_flops"] / counted["dense"]["training_flops"]
    assert counted["maxtext"]["mfu"] == pytest.approx(0.5 * ratio, rel=1e-15)
    converted = convert_mfu(
        0.5, load_model_config("llama2-7b"), from_convention="dense", to_convention="maxtext"
    )
    assert converted == counted["maxtext"]["mfu"]


def test_an_mfu_may_be_100_percent(capsys):
    """Llama 2 has 6,738,415,616 weights, and 2 tables of 32,000 × 4,096."""
    convert = ["llama2-7b", "mfu=100%", "convention=6n"]
    mfu = run_json(capsys, *convert)["conventions"]["6n_non_embedding"]["mfu"]
    tables = 2 * 32_000 * 4096
    assert mfu == pytest.approx(1 - tables / 6_738_415_616, rel=1e-15)


def test_an_override_without_effect_is_a_warning_and_a_note(capsys):
    assert main(["flops", "llama2-7b", "capacity_factor=2", "num_kv_heads=32", "--json"]) == 0
    captured = capsys.readouterr()
    (note,) = json.loads(captured.out)["notes"]
    assert note.startswith("capacity_factor=2 changes nothing: ")
    assert captured.err == f"mfu-jax flops: warning: {note}\n"


def test_in_a_terminal_it_is_said_once(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert main(["flops", "llama2-7b", "capacity_factor=2"]) == 0
    captured = capsys.readouterr()
    assert (captured.out + captured.err).count("capacity_factor=2 changes nothing") == 1


def test_a_window_whose_size_decides_is_not_said_to_be_no_part_of_the_model(capsys):
    """With 256 keys at most, a sequence of 2,048 has S·W − W²/2 of its S²/2 pairs."""
    window = ["sliding_window_size=256", "attention_type=local_sliding"]
    count = run_json(capsys, "llama2-7b", "max_target_length=2048", *window)
    every = run_json(capsys, "llama2-7b", "max_target_length=2048")
    kept = count["attention_tflops"] / every["attention_tflops"]
    assert kept == pytest.approx((2048 * 256 - 256**2 / 2) / (2048**2 / 2), rel=1e-12)
    (note,) = count["notes"]
    assert "no such part" not in note


def test_the_table_names_components_and_conventions(capsys):
    assert main(["flops", "mixtral-8x7b"]) == 0
    table = capsys.readouterr().out
    for word in ("moe/experts/wi_0", "attention/scores_qk", "6n_non_embedding", "active"):
        assert word in table


def test_a_maxtext_yaml_as_it_stands(tmp_path):
    path = tmp_path / "mine.yml"
    path.write_text(LLAMA2_7B_YAML)
    assert calculate_tflops_per_device(load_model_config(path)) == calculate_tflops_per_device(
        load_model_config("llama2-7b")
    )


@pytest.mark.parametrize(
    ("scale", "width", "heads", "layers"), [(2, 1, 2, 1), (4, 2, 2, 1), (8, 2, 2, 2), (16, 2, 4, 2)]
)
def test_global_parameter_scale_doubles_heads_width_layers_in_turn(
    tmp_path, scale, width, heads, layers
):
    path = tmp_path / "mine.yml"
    path.write_text(LLAMA2_7B_YAML + f"global_parameter_scale: {scale}\n")
    config = load_model_config(path)
    assert config.emb_dim == 4096 * width
    assert config.attention.num_query_heads == 32 * heads
    assert config.feed_forward.mlp_dim == 11008 * heads
    assert config.num_decoder_layers == 32 * layers


def test_a_training_yaml_overrides_its_model_only_if_it_says_so(tmp_path):
    path = tmp_path / "train.yml"
    path.write_text("model_name: llama2-7b\nbase_num_decoder_layers: 2\n")
    with pytest.raises(UserError, match="override_model_config"):
        load_model_config(path)
    assert load_model_config(path, {"override_model_config": True}).num_decoder_layers == 2
    path.write_text(path.read_text() + "override_model_config: true\nmax_target_length: 64\n")
    config = load_model_config(path)
    assert (config.num_decoder_layers, config.emb_dim, config.step.max_target_length) == (
        2,
        4096,
        64,
    )


def test_a_bundled_model_is_scaled_as_its_file_would_be(tmp_path):
    path = tmp_path / "mine.yml"
    path.write_text(LLAMA2_7B_YAML)
    step = {"global_parameter_scale": 4}
    ours, bundled = (load_model_config(source, step) for source in (path, "llama2-7b"))
    assert calculate_tflops_per_device(ours) == calculate_tflops_per_device(bundled)
    assert load_model_config("llama2-7b", step).num_decoder_layers == 32
    assert load_model_config("llama2-7b", {**step, "num_decoder_layers": 3}).num_decoder_layers == 3
    path.write_text("model_name: llama2-7b\nglobal_parameter_scale: 2\n")
    assert load_model_config(path).feed_forward.mlp_dim == 2 * 11008


def test_base_config_is_read_beside_the_file_or_above_it(tmp_path):
    folder = tmp_path / "tpu" / "v5e"
    folder.mkdir(parents=True)
    (tmp_path / "base.yml").write_text("vocab_size: 99\nbase_emb_dim: 8\nmodel_name: default\n")
    (folder / "parent.yml").write_text(
        f"{LLAMA2_7B_YAML}base_config: base.yml\nper_device_batch_size: 3\n"
    )
    mine = folder / "mine.yml"
    mine.write_text("base_config: parent.yml\nbase_num_decoder_layers: 2\nmlp_dim: 12\n")
    config = load_model_config(mine)
    assert (config.num_decoder_layers, config.feed_forward.mlp_dim, config.emb_dim) == (2, 12, 4096)
    assert (config.vocab_size, config.step.per_device_batch_size) == (32000, 3)
    # A named model wins over what is inherited, as in MaxText.
    mine.write_text("base_config: base.yml\nmodel_name: llama2-7b-Instruct\n")
    assert (load_model_config(mine).emb_dim, load_model_config(mine).vocab_size) == (4096, 32000)
    mine.write_text("base_config: mine.yml\nvocab_size: 8\n")
    with pytest.raises(UserError, match="its own base_config"):
        load_model_config(mine)
    mine.write_text("base_config: gone.yml\nvocab_size: 8\n")
    with pytest.raises(UserError, match=r"gone\.yml"):
        load_model_config(mine)


def test_command_line_keys_win_in_both_spellings(tmp_path):
    path = tmp_path / "mine.yml"
    path.write_text(LLAMA2_7B_YAML)
    assert load_model_config(path, {"num_decoder_layers": 3}).num_decoder_layers == 3
    assert load_model_config(path, {"base_num_decoder_layers": 5}).num_decoder_layers == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llama3-8b", "max_target_lenght=4"], "max_target_length"),
        (["llama3-8b", "convention=pam"], "'palm'"),
        (["llama3-8B"], "llama3-8b"),
        (["llama3-8b", "emb_dim=-1"], "emb_dim=-1"),
        (["mixtral-8x7b", "capacity_factor=-2"], "capacity_factor=-2"),
        (["a" * 5000], "name too long"),
        (["qwen3-next-80b-a3b", "inhomogeneous_layer_cycle_interval=0"], "inhomogeneous_layer"),
        (["qwen3-vl-2b", "image_size_for_vit=1,2,3"], "image_size_for_vit"),
        (["deepseek-custom", "engram_num_heads=549755813888"], "engram_num_heads=549755813888"),
        (["deepseek-custom", "engram_num_heads=4096"], "expected at most 1024, of at most 2^40"),
        (["deepseek-custom", "engram_vocab_bases=[8,1099511627777]"], "of at most 2^40 rows"),
        (["llama3-8b", "emb_dim=4.5"], "whole number"),
        (["llama3-8b", "per_device_batch_size=0"], "per_device_batch_size"),
        (["llama3-8b", "per_device_batch_size=inf"], "per_device_batch_size"),
        (["llama3-8b", "num_decoder_layers=999999999"], "num_decoder_layers"),
        (["llama3-8b", "logits_via_embedding=maybe"], "logits_via_embedding"),
        (["llama3-8b", "mfu=-3"], "mfu"),
        (["llama3-8b", "mfu=0%"], "mfu=0%: expected above 0 and at most 100%"),
        (["llama3-8b", "mfu=101%"], "mfu=101%: expected above 0"),
        (["llama3-8b", "mfu=1"], "pass 1%"),
        (["llama3-8b", "--jsn"], "--json"),
        (["llama3-8b", "num_experts=8", "num_experts_per_tok=9", "moe_mlp_dim=8"], "per_tok"),
        (["llama3-8b", "gpt2-124m"], "one model"),
        (["nowhere/config.json"], "nowhere/config.json"),
        (["/dev/zero"], "regular file"),
        ([], "usage"),
    ],
)
def test_wrong_arguments_get_one_line_and_exit_code_2(capsys, arguments, message):
    assert main(["flops", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err + captured.out
    assert "Traceback" not in captured.err
    if arguments:
        assert is_told(captured.err, hint=True)


HOSTILE = {
    "list.yml": "- 1\n- 2\n",
    "tag.yml": "emb_dim: !!python/object/apply:os.system ['true']\n",
    "open.yml": "emb_dim: [1, 2\n",
    "nul.yml": "emb_dim: \0\n",
    "deep.yml": "a: " + "[" * 50_000,
    "deep.json": '{"model_type": ' + "[" * 100_000,
    "half.json": '{"model_type": "llama"',
    "no_type.json": '{"hidden_size": 64}',
    "list.json": "[]",
    "digits.json": '{"model_type": "llama", "hidden_size": ' + "9" * 5000 + "}",
    "large.yml": LLAMA2_7B_YAML.replace("4096", "9" * 4000),
    "twice.json": '{"model_type": "llama", "hidden_size": 64, "hidden_size": 128}',
    "own_base.yml": "base_config: own_base.yml\n" + LLAMA2_7B_YAML,
    "date.yml": "base_emb_dim: 2020-13-45\n",
    "missing.yml": "base_emb_dim: 64\nbase_num_decoder_layers: 2\n",
    "twice.yml": LLAMA2_7B_YAML + "emb_dim: 64\n",
    "text.yml": LLAMA2_7B_YAML.replace("base_emb_dim: 4096", "base_emb_dim: wide"),
    "scale.yml": LLAMA2_7B_YAML + "global_parameter_scale: 3\n",
    "huge.yml": LLAMA2_7B_YAML + "#" * (5 * 2**20),
    "bomb.yml": "a: &a [1, 1, 1, 1, 1, 1, 1, 1]\n"
    + "".join(
        f"{name}: &{name} [{', '.join(['*' + last] * 8)}]\n"
        for last, name in zip("abcdefghijk", "bcdefghijkl", strict=True)
    )
    + "emb_dim: *l\nvocab_size: 8\nnum_decoder_layers: 2\n",
    "block.yml": LLAMA2_7B_YAML.replace('"llama2"', '"llama9"'),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_bad_file_gets_one_line_and_exit_code_2(tmp_path, capsys, name):
    path = tmp_path / name
    path.write_text(HOSTILE[name])
    assert main(["flops", str(path)]) == 2
    error = capsys.readouterr().err
    assert is_told(error, hint=True)
    assert len(error) < 1000


COLD_START = """
import runpy, sys
count_calls = runpy.run_path("tests/support/work.py")["count_calls"]
before = set(sys.modules)
def command():
    from mfu_jax.cli import main
    main(["flops", "llama3-8b"])
_, calls = count_calls(command)
print(calls, *{name.split(".")[0] for name in set(sys.modules) - before})
"""


@pytest.mark.full
def test_a_cold_start_does_little_and_imports_yaml_alone():
    command = [sys.executable, "-c", COLD_START]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    calls, *imported = done.stdout.splitlines()[-1].split()
    assert int(calls) < 100_000  # 33,000, in an eighth of a second with Python's own start
    others = set(imported) - sys.stdlib_module_names - {"mfu_jax", "yaml"}
    assert all("cython" in name for name in others)  # what PyYAML's C parser registers


@pytest.mark.parametrize("name", model_names())
def test_a_call_does_little_for_any_bundled_model(name):
    config = load_model_config(name)
    calculate_tflops_per_device(config)  # what is worked out once, such as Engram's primes
    _, calls = count_calls(lambda: calculate_tflops_per_device(config))
    assert calls < 3000  # 1,400 for the largest, in half a millisecond


def test_an_unknown_type_names_trace_and_trace_names_its_extra(tmp_path, capsys, monkeypatch):
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "jetmoe"}')
    assert main(["flops", str(config)]) == 2
    assert "mfu-jax flops config.json --trace" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["flops", str(config), "--trace"]) == 2
    assert "pip install 'mfu-jax[trace-hf]'" in capsys.readouterr().err


def test_flops_that_depend_on_the_tokens_have_a_range_and_say_what_the_total_is(tmp_path, capsys):
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "longcat_flash", "num_layers": 1}')
    assert main(["flops", str(config), "max_target_length=1024", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    low, high = answer["training_flops_range"]
    assert high - low == 3 * 2 * 1024 * 12 * 3 * 6144 * 2048
    assert answer["conventions"]["maxtext"]["training_flops"] == low + (high - low) * 2 // 3
    assert main(["flops", str(config), "max_target_length=1024"]) == 0
    printed = capsys.readouterr().out
    assert (
        f"FLOPs depend on the tokens, from {low / 1e12:.6g} to {high / 1e12:.6g} TFLOP: 256 of 768 "
        "experts compute nothing; each token is counted with 8 of its 12 computing, the mean of "
        "uniform routing"
    ) in printed
    assert main(["flops", "llama2-7b", "--json"]) == 0
    assert "training_flops_range" not in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llama2-7b", "--trace"], "takes a Hugging Face config.json"),
        (["config.json", "--trace", "emb_dim=8"], "emb_dim is no field of the step"),
        (["config.json", "--trace", "convention=palm"], "convention=palm"),
        (["config.json", "--trace", "--serving"], "--serving needs a formula"),
    ],
)
def test_what_trace_does_not_take_is_said(arguments, message, capsys):
    assert main(["flops", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_trace_prints_the_same_object_as_a_formula(tmp_path, capsys):
    pytest.importorskip("torch")
    pytest.importorskip("transformers", minversion="5.0")
    config = tmp_path / "config.json"
    sizes = {"num_hidden_layers": 2, "hidden_size": 48, "num_attention_heads": 4, "vocab_size": 131}
    config.write_text(json.dumps({"model_type": "llama", "pad_token_id": 0, **sizes}))
    step = ["per_device_batch_size=2", "max_target_length=32", "gradient_accumulation_steps=3"]
    formula = run_json(capsys, str(config), *step)
    traced = run_json(capsys, str(config), *step, "--trace")
    for key in formula.keys() - {
        "breakdown",
        "conventions",
        "notes",
        "parameters",
        "decoder_block",
    }:
        assert traced[key] == formula[key], key
    assert traced.keys() == formula.keys()
    assert traced["parameters"]["total"] == formula["parameters"]["total"]
    assert traced["parameters"]["embedding"] == formula["parameters"]["embedding"]
    for name in ("maxtext", "exact", "dense"):
        assert traced["conventions"][name] == formula["conventions"][name]
    assert sum(row["training_flops"] for row in traced["breakdown"]) == pytest.approx(
        traced["total_tflops"] * 1e12
    )
