"""`mfu-jax plan`: the JSON that other tools read, the screen, and wrong input."""

import io
import json
import sys
from importlib.util import find_spec

import pytest

from mfu_jax.cli import main
from mfu_jax.dumps.files import write
from mfu_jax.dumps.program import ProgramDump, Topology
from mfu_jax.errors import UserError
from mfu_jax.planning.compilation.compiling import Compiled, TooLarge
from mfu_jax.planning.step_sources import MaxTextStep
from mfu_jax.trainer.planned.planned_step import TrainerStep
from tests.support.fake_compiler import TEXT
from tests.support.messages import is_told

FLOPS = 2 * 8**3  # of TEXT
KEYS = set(
    "fits memory_peak_bytes memory model_flops executed_flops step_time_bound_seconds "
    "step_time_seconds step_time_range mfu hfu tokens_per_sec_per_chip time_by_cause collectives "
    "notes".split()
)
RUN = {
    "hardware": "v6e",
    "device_type": "v6e-8",
    "model_name": "llama2-7b",
    "per_device_batch_size": 1,
    "max_target_length": 2048,
    "remat_policy": "full",
    "splash": {"sa_block_q": 512},
}


@pytest.fixture
def dump(tmp_path):
    path = tmp_path / "step.mfu"
    write(ProgramDump(text=TEXT), path)
    return str(path)


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def fake_compiler(monkeypatch):
    for source in (TrainerStep, MaxTextStep):
        monkeypatch.setattr(source, "module", "tests.support.fake_compiler")


def _plan(capsys, *words):
    code = main(["plan", *words])
    return code, capsys.readouterr()


def test_a_dump(capsys, dump):
    code, shown = _plan(capsys, dump, "topology=v5e:1x1", f"model_flops={FLOPS // 2}", "--json")
    plan = json.loads(shown.out)
    assert code == 0
    assert plan.keys() >= KEYS
    assert (plan["executed_flops"], plan["model_flops"]) == (FLOPS, FLOPS // 2)
    assert plan["step_time_bound_seconds"] == pytest.approx(FLOPS / 197e12)
    assert plan["mfu"] == pytest.approx(plan["hfu"] / 2)


def test_a_dumps_tokens_need_no_model_flops(capsys, dump):
    words = ("topology=v5e:1x1", "tokens_per_step=8", "tokens=86400", "--json")
    _, shown = _plan(capsys, dump, *words)
    plan = json.loads(shown.out)
    assert plan["mfu"] is None
    assert plan["tokens_per_sec_per_chip"] == pytest.approx(8 / plan["step_time_seconds"])
    assert plan["days"] == pytest.approx(plan["step_time_seconds"] / 8)


@pytest.mark.parametrize(
    ("words", "note"),
    [
        (("tokens=1e12",), "no days for 1e+12 tokens"),
        (("price=2",), "no cost: pass tokens="),
        ((), None),
    ],
)
def test_days_and_cost_that_cannot_be_told_are_a_note(capsys, dump, words, note):
    notes = json.loads(_plan(capsys, dump, "topology=v5e:1x1", "--json", *words)[1].out)["notes"]
    assert [n.partition(note or " ")[0] for n in notes] == ([""] if note else [])


@pytest.mark.parametrize(
    ("platform", "kind", "note"),
    [("tpu", "TPU v5 lite", ""), ("tpu", "TPU v6 lite", "compiled for TPU v6 lite"), ("", "", "")],
)
def test_a_dump_of_another_chip_says_so(capsys, tmp_path, platform, kind, note):
    path = str(tmp_path / "step.mfu")
    write(ProgramDump(text=TEXT, topology=Topology(platform=platform, device_kind=kind)), path)
    code, shown = _plan(capsys, path, "topology=v5e:1x1")
    assert code == 0
    assert ("the program was compiled for" in shown.out) == bool(note)
    assert note in shown.out


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_a_dump_of_another_platform_is_one_line(capsys, tmp_path, platform):
    path = str(tmp_path / "step.mfu")
    write(ProgramDump(text=TEXT, topology=Topology(platform=platform)), path)
    code, shown = _plan(capsys, path, "topology=v5e:1x1")
    assert (code, shown.out) == (2, "")
    assert is_told(shown.err, hint=True)
    assert f"is a program for {platform}; expected one for tpu" in shown.err


def test_a_dump_for_other_chips_is_one_line(capsys, tmp_path):
    path = tmp_path / "of_256.mfu"
    head, rest = TEXT.split("\n", 1)
    write(ProgramDump(text=f"{head}, num_partitions=128, replica_count=2\n{rest}"), path)
    assert _plan(capsys, str(path), "topology=v6e-256")[0] == 0
    code, shown = _plan(capsys, str(path), "topology=v6e-8")
    assert (code, shown.out) == (2, "")
    assert is_told(shown.err, hint=True)
    assert "is a program of 256 devices; expected 8, those of v6e:2x4 (8 chips)" in shown.err


def test_one_screen_with_days_and_cost(capsys, dump):
    words = (dump, "topology=v5e:1x1", f"model_flops={FLOPS}", "tokens_per_step=8", "tokens=1e18")
    _, shown = _plan(capsys, *words, "price=1.2")
    assert "fits" in shown.out
    assert "days for 1e+18 tokens" in shown.out
    assert "at 1.2 a chip-hour" in shown.out
    assert len(shown.out.splitlines()) < 25


def test_the_verdict_is_first_and_in_the_json(capsys, dump):
    words = (dump, "topology=v5p:1x1x1", f"model_flops={FLOPS}", "tokens_per_step=8")
    found = json.loads(_plan(capsys, *words, "--json")[1].out)
    verdict = found["verdict"]
    assert (verdict["kind"], verdict["passed"], verdict["mfu"]) == ("plan", True, found["mfu"])
    assert verdict["bound_mfu"] == found["mfu_ceiling"]
    assert verdict["peak"] == "459 TFLOP/s"
    parts = sum(loss["fraction"] for loss in verdict["losses"])
    assert parts + verdict["mfu"] == pytest.approx(1.0), "every second of the step"
    assert "on TPU v5p" in verdict["like_runs"]["like"]
    assert verdict["sentence"].startswith("v5p:1x1x1 (1 chip): the program of step.mfu fits; ")
    first, *_ = _plan(capsys, *words)[1].out.splitlines()
    assert verdict["sentence"].startswith(first)


def test_days_and_cost_are_in_the_json(capsys, dump):
    words = (dump, "topology=v5e:1x1", f"model_flops={FLOPS}", "tokens_per_step=8", "tokens=1e18")
    _, shown = _plan(capsys, *words, "price=1.2", "--json")
    plan = json.loads(shown.out)
    seconds = 1e18 / 8 * plan["step_time_seconds"]
    assert plan["days"] == pytest.approx(seconds / 86400)
    assert plan["cost"] == pytest.approx(seconds / 3600 * 1.2)


def test_a_page_beside_the_answer(capsys, dump, tmp_path):
    page = tmp_path / "out.html"
    code, shown = _plan(capsys, dump, "topology=v5e:1x1", "--json", "--html", str(page))
    assert code == 0
    assert json.loads(shown.out)["fits"]
    assert "wrote" in shown.err
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.full
@pytest.mark.skipif(bool(find_spec("jax_cuda13_plugin")), reason="this environment has it")
def test_the_compilers_of_chips_that_are_not_here_are_extras(capsys):
    """The message that is read is JAX's own."""
    _, shown = _plan(capsys, "hardware=h100", "devices=8", "emb_dim=64", "mlp_dim=64")
    assert "mfu-jax[plan-gpu]" in shown.err.splitlines()[-1]


@pytest.mark.full
def test_a_config_is_compiled_for_all_devices(capsys, fake_compiler):
    words = ("topology=v6e-8", "model_name=llama2-7b", "max_target_length=128")
    code, shown = _plan(capsys, *words, "--json")
    assert code == 0
    assert json.loads(shown.out)["executed_flops"] == FLOPS
    assert "compiling" in shown.err


@pytest.mark.full
def test_maxtext_without_sizes_has_no_mfu_and_says_so(capsys, fake_compiler):
    words = ("--maxtext", "topology=v6e-8", "model_name=unheard-of", "max_target_length=512")
    code, shown = _plan(capsys, *words, "per_device_batch_size=4", "--json")
    plan = json.loads(shown.out)
    assert code == 0
    assert plan["mfu"] is None
    assert plan["notes"][-1].startswith("no MFU: ")


@pytest.mark.full
def test_maxtexts_defaults_are_counted_as_maxtext_takes_them(capsys, fake_compiler):
    _, shown = _plan(capsys, "--maxtext", "topology=v6e-8", "global_parameter_scale=2", "--json")
    # MaxText's base.yml: 12 rows of 2,048 tokens; a scale of 2 doubles heads and MLP.
    attention, mlp = 4 * 2048 * (32 * 128), 3 * 2048 * (2 * 7168)
    weights = 16 * (attention + mlp) + 2048 * 32000
    pairs = 16 * 4 * 2048 * (32 * 128) / 2
    assert json.loads(shown.out)["model_flops"] == 3 * 12 * 2048 * (2 * weights + pairs)


@pytest.mark.full
def test_empty_slots_are_no_model_flops_of_maxtexts_either(capsys, fake_compiler):
    words = ("--maxtext", "topology=v6e-8", "model_name=mixtral-8x7b", "per_device_batch_size=1")
    _, dropless = _plan(capsys, *words, "--json")
    _, dropping = _plan(capsys, *words, "capacity_factor=1.25", "--json")
    counts = [json.loads(shown.out)["model_flops"] for shown in (dropless, dropping)]
    assert counts[1] == counts[0]
    assert counts[0] is not None


@pytest.mark.full
def test_a_run_from_stdin(capsys, fake_compiler, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps({**RUN, "env": {"A": 1}})))
    code, shown = _plan(capsys, "--run", "-", f"maxtext_python={sys.executable}", "--json")
    assert code == 0
    assert json.loads(shown.out)["notes"] == ["environment variables are not set: A"]


@pytest.mark.full
def test_a_run_without_maxtext_is_planned_by_the_reference_model(capsys, fake_compiler, tmp_path):
    file = tmp_path / "run.json"
    file.write_text(json.dumps({**RUN, "quantization": "te_mxfp8"}), encoding="utf-8")
    code, shown = _plan(capsys, "--run", str(file), "--json")
    assert code == 2
    assert "quantization=te_mxfp8 (matmul precision); expected what it can follow" in shown.err
    code, shown = _plan(capsys, "--run", str(file), "--json", "follow=nearest")
    assert code == 0
    plan = json.loads(shown.out)
    assert plan["another_program"] == ["quantization=te_mxfp8 (matmul precision)"]
    assert plan["verdict"]["finding"].startswith("another program's plan, without quantization=te")
    memory, maxtext = plan["notes"]
    assert memory.startswith("the memory is that of the reference model's step")
    assert maxtext == "MaxText is not installed: the reference model's step is planned in its place"
    code, shown = _plan(capsys, "--run", str(file), "follow=nearest")
    first = "another program's plan, without quantization=te_mxfp8"
    assert shown.out.startswith(first)  # the verdict
    assert f"\n{first}" in shown.out  # and the plan below it
    code, shown = _plan(capsys, "--run", str(file), "follow=me")
    assert (code, "follow=me; expected nearest" in shown.err) == (2, True)


@pytest.mark.parametrize("tokamax", [False, True])
def test_a_plan_is_timed_with_the_kernels_of_its_run(capsys, monkeypatch, tmp_path, tokamax):
    file, asked = tmp_path / "run.json", []
    flags = {"use_tokamax_gmm": tokamax, "use_tokamax_splash": tokamax}
    run = {**RUN, "model_name": "mixtral-8x7b", "other_flags": flags}
    file.write_text(json.dumps(run), encoding="utf-8")

    def stop(*_, work, **__):
        asked.append((work.has_tokamax_experts, work.attention.skips_forward))
        raise UserError("asked enough")

    monkeypatch.setattr("mfu_jax.commands.planning.plan._compiled", stop)
    code, _ = _plan(capsys, "--run", str(file), f"maxtext_python={sys.executable}")
    assert (code, asked) == (2, [(tokamax, tokamax)])


def test_what_does_not_fit_has_figures_and_exit_code_1(capsys, monkeypatch):
    refusal = TooLarge(used_bytes=2**35, limit_bytes=2**34, message="too large")
    compiled = "mfu_jax.planning.compilation.cache.compile_known_flags"
    monkeypatch.setattr(compiled, lambda *_, **__: Compiled(refusal))
    code, shown = _plan(capsys, "topology=v6e-8")
    assert code == 1
    assert "does NOT fit: 32.00 GiB of 16.00 GiB" in shown.out


def test_a_run_that_is_no_run_is_not_called_wrong_json(capsys, tmp_path):
    file = tmp_path / "run.json"
    for text, part in (
        ("[]", "a run is list; expected a JSON object"),
        ("{", "run.json: not JSON"),
    ):
        file.write_text(text)
        code, shown = _plan(capsys, "--run", str(file))
        assert code == 2
        assert part in shown.err
        assert shown.err.count("not JSON") == part.count("not JSON")


def test_a_page_that_cannot_be_written_is_refused_before_the_compile(
    capsys, monkeypatch, tmp_path, dump
):
    run = tmp_path / "run.json"
    run.write_text(json.dumps(RUN))
    for compiles in ("_of_dump", "_of_run", "_compiled"):
        monkeypatch.setattr(f"mfu_jax.commands.planning.plan.{compiles}", lambda *_: 1 / 0)
    for words in (
        (dump, "topology=v5e:1x1"),
        ("topology=v6e-8", "model=llama2-7b"),
        ("--run", str(run)),
    ):
        code, shown = _plan(capsys, *words, f"--html={run / 'page.html'}")
        assert code == 2
        assert "cannot be written" in shown.err


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ((), "no chips to plan for"),
        (("topology=v9:2x2",), "expected a TPU generation"),
        (("topology=v6e-8", "emb_dimm=3"), "unknown key 'emb_dimm'"),
        (("topology=v6e-8", "no.mfu"), "no.mfu"),
        (("--run", "missing.json"), "missing.json"),
        (("topology=v6e-8", "price=-1"), "price=-1"),
        (("--run", "-", "emb_dim=3"), "emb_dim"),
        (("topology=v6e-8", "fsdp=3"), "does not fill the 8 devices"),
        (("topology=v6e-8", "data=2", "fsdp=1", "tensor=4", "per_device_batch_size=0.3"), "2.4"),
        (("topology=v6e-8", "a.html"), "expected a page once, after --html"),
        (("topology=v6e-8", "compile_gib=x"), "compile_gib='x'"),
        (("hardware=rtx9999",), "pass one of A100"),
        (("topology=v6e-8", "budget=20min"), "budget= is a key of --sweep"),
        (("topology=v6e-8", "model_flops=3"), "model_flops= is a key of a dump"),
        (("topology=v6e-8", "model=3"), "unknown model '3'"),
        (("topology=v6e-8", "maxtext_python=x"), "is a key of --maxtext or --run"),
        (("topology=v6e-8", "--sweep", "remat_policy=full,none", "tokens=1e9"), "a single plan"),
        (("topology=v6e-8", "--sweep", "plans=4", "compiles=4"), "plans= and compiles= are"),
        (("topology=v6e-8", "a.yml", "--maxtext"), "--maxtext reads no file"),
        (("topology=v6e-8", "a.mfu", "--sweep"), "a.mfu and --sweep; expected one form"),
        (("run.json", "--run", "--maxtext"), "--run and --maxtext; expected one form"),
        (("topology=v6e-8", "slices=0"), "slices=0; expected 1 or more"),
        (("topology=v6e-8", "xla_flags=--xla_a=1 xla_b=2"), "xla_flags has 'xla_b=2'"),
    ],
)
def test_wrong_input_is_one_line(capsys, words, part):
    code, shown = _plan(capsys, *words)
    assert code == 2
    assert part in shown.err
    assert is_told(shown.err, hint=True)
