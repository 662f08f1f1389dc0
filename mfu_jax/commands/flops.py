"""Model FLOPs of a bundled model, MaxText YAML or config.json.

usage: mfu-jax flops NAME_OR_FILE [key=value …] [--json]
       mfu-jax flops config.json --trace [key=value …] [--json]
       mfu-jax flops --list [--json]

NAME_OR_FILE  a bundled model (--list names them), a MaxText model YAML, or a config.json; or
              model=NAME_OR_FILE, as in the other commands
key=value     any field of the model or the step, for example per_device_batch_size=4
              max_target_length=8192 gradient_accumulation_steps=2 num_decoder_layers=4
convention=   maxtext (default), exact, dense, megatron, palm, 6n …: for the total and breakdown
mfu=          an MFU stated in that convention, to convert to all others
--serving     adds prefill of max_target_length tokens and decoding of the next token (bf16)
--trace       for any config.json that transformers can build: counts the PyTorch model itself, on
              the meta device; needs pip install 'mfu-jax[trace-hf]', and never runs remote code
--json        full precision, for programs

example: mfu-jax flops llama3-8b max_target_length=8192"""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from mfu_jax.errors import UserError, one_line
from mfu_jax.flops.analytic.conventions import CONVENTIONS, FlopsRow, find_convention
from mfu_jax.flops.analytic.inputs.config_files import model_name_of, read_source
from mfu_jax.flops.analytic.inputs.maxtext_keys import override_keys, parse_override
from mfu_jax.flops.analytic.inputs.overrides import load_model_config
from mfu_jax.flops.analytic.model_configs.model import ModelConfig
from mfu_jax.flops.analytic.model_configs.training import StepConfig
from mfu_jax.flops.analytic.parameters import count_parameters
from mfu_jax.flops.analytic.totals import (
    TERA,
    TflopsPerDevice,
    calculate_tokens_per_device,
    compare_conventions,
    flops_bounds,
    tflops_of,
)
from mfu_jax.flops.analytic.training import training_model
from mfu_jax.flops.exact import Number, integral
from mfu_jax.flops.masks import PairCounting
from mfu_jax.util.arguments import MODEL, Arguments, parse
from mfu_jax.util.formatting import columns, counted, json_text
from mfu_jax.util.values import fraction_of
from mfu_jax.util.yaml_files import model_names

_PARAMETERS = ("total", "active", "embedding", "active_non_embedding")


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit code.

    Raises:
        UserError: wrong arguments or input.
    """
    keys = {*override_keys(), MODEL, "convention", "mfu"}
    arguments = parse(argv, keys=keys, flags=("--json", "--serving", "--list", "--trace"))
    if "--list" in arguments.flags:
        if {*argv} - {"--list", "--json"}:
            raise UserError("--list takes no other arguments", hint="leave them out")
        names = model_names()
        print(json_text(names) if "--json" in arguments.flags else "\n".join(names))
        return 0
    name, arguments = _model(arguments)
    overrides, convention, mfu = _settings(arguments)
    if "--trace" in arguments.flags:
        if "--serving" in arguments.flags:
            raise UserError(
                "--serving needs a formula",
                hint="leave out --trace, or --serving",
            )
        return _printed(_traced(name, overrides, convention, mfu), arguments)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = load_model_config(name, overrides)
    answer = _answer(config, convention, mfu)
    for warning in caught:
        answer["notes"].append(str(warning.message))
        if not sys.stdout.isatty():  # where the note is seen
            print(one_line(f"mfu-jax flops: warning: {warning.message}"), file=sys.stderr)
    if "--serving" in arguments.flags:
        answer["serving"] = _serving(config)
    return _printed(answer, arguments)


def _model(arguments: Arguments) -> tuple[str, Arguments]:
    """The model, a bare word or ``model=``, and the other arguments."""
    key = MODEL if MODEL in arguments.values or arguments.names else "model_name"
    names = (*arguments.names, *(text for name, text in arguments.pairs if name == key))
    others = tuple(pair for pair in arguments.pairs if pair[0] != key)
    arguments = dataclasses.replace(arguments, names=names, pairs=others)
    return arguments.one_name("model name or file"), arguments


def _printed(answer: dict[str, Any], arguments: Arguments) -> int:
    answer = _plain(answer)
    print(json_text(answer) if "--json" in arguments.flags else _table(answer))
    return 0


def _settings(arguments: Arguments) -> tuple[dict[str, Any], str, float | None]:
    """Field overrides, the convention, and the MFU to convert."""
    overrides: dict[str, Any] = {}
    convention, mfu = "maxtext", None
    for key, text in arguments.pairs:
        if key == "convention":
            convention = find_convention(text).name
        elif key == "mfu":
            mfu = fraction_of("mfu", text, is_positive=True)
        elif key in overrides:
            raise UserError(f"{key} is given twice")
        else:
            overrides[key] = parse_override(key, text)
    return overrides, convention, mfu


def _answer(config: ModelConfig, convention: str, mfu: float | None) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    rows = find_convention(convention).rows(config, training_model(config))
    counted = compare_conventions(config)
    count = count_parameters(config)
    notes = []
    if config.vision.use_multimodal and not config.step.images_per_sequence:
        notes.append("text only: a config does not say how many images; images_per_sequence=1 does")
    bounds: dict[str, Any] = {}
    if config.experts.zero_experts:
        low, high = flops_bounds(config, convention)
        bounds["training_flops_range"] = [low.training, high.training]
        notes.append(_range_note(config, *bounds["training_flops_range"]))
    return {
        "model": config.model_name,
        "decoder_block": config.decoder_block,
        **_of_step(config.step, calculate_tokens_per_device(config)),
        **_sums(convention, tflops_of(rows)),
        **bounds,
        "parameters": {name: getattr(count, name) for name in _PARAMETERS},
        "conventions": _conventions(
            {name: (flops.training, flops.forward) for name, flops in counted.items()},
            convention,
            mfu,
        ),
        "breakdown": [row._asdict() for row in rows],
        "notes": notes,
    }


def _range_note(config: ModelConfig, low: Number, high: Number) -> str:
    sizes = config.experts
    skipped, total = sizes.zero_experts_per_tok, sizes.num_experts + sizes.zero_experts
    used = float(sizes.num_experts_per_tok - skipped)
    reason = "the mean of uniform routing" if skipped else "as PyTorch runs it"
    return (
        f"FLOPs depend on the tokens, from {float(low) / TERA:.6g} to {float(high) / TERA:.6g} "
        f"TFLOP: {sizes.zero_experts} of {total} experts compute nothing; each token is counted "
        f"with {used:g} of its {sizes.num_experts_per_tok} computing, {reason}"
    )


_TRACED: tuple[PairCounting, ...] = ("maxtext", "exact", "dense")
_STEP_KEYS = ("per_device_batch_size", "max_target_length", "gradient_accumulation_steps")


def _traced(
    source: str, overrides: dict[str, Any], convention: str, mfu: float | None
) -> dict[str, Any]:
    """The same object as `_answer`, from the PyTorch model."""
    if convention not in _TRACED:
        raise UserError(f"--trace counts matmuls: convention={convention} is not one of {_TRACED}")
    if wrong := [key for key in overrides if key not in _STEP_KEYS]:
        raise UserError(
            f"{wrong[0]} is no field of the step; --trace takes {', '.join(_STEP_KEYS)}",
            hint="change the model in its config.json",
        )
    config, _ = read_source(source)
    if "model_type" not in config:
        raise UserError(f"--trace takes a Hugging Face config.json; {source} has no model_type")
    from mfu_jax.flops.pytorch import count_pytorch_model

    step = StepConfig(**overrides)
    sequences = integral(step.per_device_batch_size * step.gradient_accumulation_steps)
    counted = count_pytorch_model(config, step.max_target_length)
    tables = {name: [FlopsRow(**row) for row in counted.rows(sequences, name)] for name in _TRACED}
    training = {name: sum(row.training_flops for row in rows) for name, rows in tables.items()}
    return {
        "model": model_name_of(source),
        "decoder_block": config["model_type"],
        **_of_step(step, integral(sequences * step.max_target_length)),
        **_sums(convention, tflops_of(tables[convention])),
        "parameters": {
            **dict.fromkeys(_PARAMETERS),
            "total": counted.parameters,
            "embedding": counted.embedding,
        },
        "conventions": _conventions(
            {name: (flops, integral(flops * Fraction(1, 3))) for name, flops in training.items()},
            convention,
            mfu,
        ),
        "breakdown": [row._asdict() for row in tables[convention]],
        "notes": list(counted.notes),
    }


def _of_step(step: StepConfig, tokens: Number) -> dict[str, Any]:
    return {**{key: getattr(step, key) for key in _STEP_KEYS}, "tokens_per_device": tokens}


def _sums(convention: str, tflops: TflopsPerDevice) -> dict[str, Any]:
    sums = {f"{name}_tflops": value for name, value in tflops._asdict().items()}
    return {"convention": convention, **sums}


def _conventions(
    totals: Mapping[str, tuple[Number, Number]], convention: str, mfu: float | None
) -> dict[str, Any]:
    """Training and forward FLOPs by convention, and the MFU stated in one of them in all others."""
    stated = totals[convention][0]
    return {
        name: {
            "total_tflops": float(training) / TERA,
            "training_flops": training,
            "forward_flops": forward,
            **({} if mfu is None else {"mfu": mfu * float(training / stated)}),
        }
        for name, (training, forward) in totals.items()
    }


def _serving(config: ModelConfig) -> dict[str, Any]:
    """Costs of one sequence: a prompt of max_target_length tokens, and the token after it."""
    from mfu_jax.flops.analytic.serving import decode_cost, prefill_cost

    length = config.step.max_target_length
    costs = {"prefill": prefill_cost(config, length), "decode": decode_cost(config, length)}
    return {name: dataclasses.asdict(cost) for name, cost in costs.items()}


def _plain(value: Any) -> Any:
    """Ints stay ints, fractions become floats."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return float(value) if isinstance(value, Fraction) else value


def _table(answer: dict[str, Any]) -> str:
    """The answer as text: model, breakdown by component, conventions side by side."""
    count = answer["parameters"]
    lines = [
        f"{answer['model'] or answer['decoder_block']}: {count['total']:,} parameters"
        + (f", {count['active']:,} active" if count["active"] not in (None, count["total"]) else "")
        + f", {count['embedding']:,} of them embeddings",
        f"one optimizer step on one device: {answer['tokens_per_device']:,} tokens "
        f"(per_device_batch_size={answer['per_device_batch_size']}, "
        f"max_target_length={answer['max_target_length']}, "
        f"gradient_accumulation_steps={answer['gradient_accumulation_steps']})",
        "",
        f"{answer['total_tflops']:.6g} TFLOP, convention {answer['convention']}: "
        f"{answer['learnable_weight_tflops']:.6g} learnable weights, "
        f"{answer['attention_tflops']:.6g} attention",
        "",
        *_breakdown_table(answer),
        "",
        *_conventions_table(answer),
        *_serving_lines(answer.get("serving", {})),
        *(f"note: {note}" for note in answer["notes"]),
    ]
    return "\n".join(lines)


def _serving_lines(serving: dict[str, Any]) -> list[str]:
    return [
        f"{name}: {cost['flops'] / TERA:.6g} TFLOP for {counted(cost['tokens'], 'token')} of a "
        f"sequence; reads {cost['weight_bytes'] / 1e9:.3f} GB of weights and "
        f"{cost['cache_read_bytes'] / 1e9:.3f} GB of cache, writes "
        f"{cost['cache_write_bytes'] / 1e9:.6f} GB (2 bytes a value)"
        for name, cost in serving.items()
    ]


def _breakdown_table(answer: dict[str, Any]) -> list[str]:
    header = ["layer", "component", "repeats", "forward TFLOP", "training TFLOP", "share"]
    rows = [_table_row(row, answer["total_tflops"]) for row in answer["breakdown"]]
    return columns([header, *rows], "<<>")


def _table_row(row: dict[str, Any], total: float) -> list[str]:
    training = row["training_flops"] / TERA
    return [
        row["layer"],
        row["component"],
        str(row["repeats"]),
        _tera(row["forward_flops"] / TERA),
        _tera(training),
        f"{training / total:.2%}",
    ]


def _tera(value: float) -> str:
    return f"{value:.4f}" if value >= 0.1 else f"{value:.3e}"


def _conventions_table(answer: dict[str, Any]) -> list[str]:
    """Every convention relative to the chosen one, with the MFU converted to it."""
    with_mfu = any("mfu" in values for values in answer["conventions"].values())
    rows = [
        [
            name,
            _tera(values["total_tflops"]),
            f"{values['total_tflops'] / answer['total_tflops']:.4f}",
            *([f"{values['mfu']:.2%}"] if with_mfu else []),
            CONVENTIONS[name].summary,
        ]
        for name, values in answer["conventions"].items()
    ]
    header = ["convention", "training TFLOP", f"vs {answer['convention']}"]
    header += [*(["MFU"] if with_mfu else []), "counts"]
    return columns([header, *rows], f"<{'>' * (len(header) - 2)}<")
