"""`mfu-jax flops NAME_OR_FILE key=value … [--json]`: FLOPs and parameters from a config."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Any

from mfu_jax.errors import UserError, nearest
from mfu_jax.flops.analytic.conventions import CONVENTIONS, FlopsRow, find_convention
from mfu_jax.flops.analytic.inputs import load_model_config, override_keys, parse_override
from mfu_jax.flops.analytic.model_configs.model import ModelConfig
from mfu_jax.flops.analytic.parameters import ParameterCount, count_parameters
from mfu_jax.flops.analytic.totals import (
    TERA,
    calculate_tokens_per_device,
    compare_conventions,
    tflops_of,
)
from mfu_jax.flops.analytic.training import training_model
from mfu_jax.flops.exact import Number

USAGE = """\
usage: mfu-jax flops NAME_OR_FILE [key=value …] [--json]

NAME_OR_FILE  a bundled model (mfu-jax flops --list), a MaxText model YAML, or a config.json
key=value     any field of the model or the step, for example per_device_batch_size=4
              max_target_length=8192 gradient_accumulation_steps=2 num_decoder_layers=4
convention=   maxtext (default), exact, dense, megatron, palm, 6n … : what total and breakdown count
mfu=          an MFU stated in that convention; it is shown in all others
--serving     also prefill of max_target_length tokens, and decoding the token after them (bf16)
--json        full precision, for programs"""


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit code.

    Raises:
        UserError: wrong arguments or input.
    """
    arguments = list(argv)
    if not arguments or {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0 if arguments else 2
    if arguments == ["--list"]:
        from mfu_jax.yaml_files import model_names

        print("\n".join(model_names()))
        return 0
    as_json, serving = "--json" in arguments, "--serving" in arguments
    names = [a for a in arguments if "=" not in a and a not in ("--json", "--serving")]
    if flags := [a for a in names if a.startswith("-")]:
        raise UserError(f"unknown flag {flags[0]!r}; expected --json, --serving, --list or --help")
    if len(names) != 1:
        got = " ".join(names) or "none"
        raise UserError(f"expected one model name or file, got {got}")
    overrides, convention, mfu = _settings([a for a in arguments if "=" in a])
    with warnings.catch_warnings(record=True) as unheard:
        warnings.simplefilter("always")
        shape = load_model_config(names[0], overrides)
    answer = _answer(shape, convention, mfu)
    for warning in unheard:
        answer["notes"].append(str(warning.message))
        print(f"mfu-jax flops: warning: {warning.message}", file=sys.stderr)
    if serving:
        answer["serving"] = _serving(shape)
    if as_json:
        import json

        print(json.dumps(answer, indent=1))
    else:
        print(_table(answer))
    return 0


def _settings(arguments: Sequence[str]) -> tuple[dict[str, Any], str, float | None]:
    """Field overrides, the convention, and the MFU to convert."""
    overrides: dict[str, Any] = {}
    convention, mfu = "maxtext", None
    for argument in arguments:
        key, _, text = argument.lstrip("-").partition("=")
        key = key.strip()
        if key == "convention":
            convention = find_convention(text).name
        elif key == "mfu":
            mfu = _share(text)
        elif key in overrides:
            raise UserError(f"{key} is given twice")
        elif key not in override_keys():
            keys = [*override_keys(), "convention", "mfu"]
            raise UserError(f"unknown key {key!r}{nearest(key, keys)}")
        else:
            overrides[key] = parse_override(key, text)
    return overrides, convention, mfu


def _share(text: str) -> float:
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise UserError(f"mfu={text!r}: expected a share such as 0.41 or 41%")
    return value


def _answer(shape: ModelConfig, convention: str, mfu: float | None) -> dict[str, Any]:
    """What ``--json`` prints; ints stay ints, a fraction of a FLOP becomes a float."""
    rows = find_convention(convention).rows(shape, training_model(shape))
    tflops = tflops_of(rows)
    counted = compare_conventions(shape)
    stated = counted[convention].training
    conventions = {
        name: {
            "total_tflops": float(flops.training) / TERA,
            "training_flops": _plain(flops.training),
            "forward_flops": _plain(flops.forward),
            **({} if mfu is None else {"mfu": mfu * float(flops.training / stated)}),
        }
        for name, flops in counted.items()
    }
    return {
        "model": shape.model_name,
        "decoder_block": shape.decoder_block,
        "per_device_batch_size": _plain(shape.step.per_device_batch_size),
        "max_target_length": shape.step.max_target_length,
        "gradient_accumulation_steps": shape.step.gradient_accumulation_steps,
        "convention": convention,
        "total_tflops": tflops.total,
        "learnable_weight_tflops": tflops.learnable_weight,
        "attention_tflops": tflops.attention,
        "tokens_per_device": _plain(calculate_tokens_per_device(shape)),
        "parameters": _parameters(count_parameters(shape)),
        "conventions": conventions,
        "breakdown": [_row(row) for row in rows],
        "notes": _notes(shape),
    }


def _serving(shape: ModelConfig) -> dict[str, Any]:
    """One sequence: its prompt of max_target_length tokens, and the token after it."""
    from mfu_jax.flops.analytic.serving import decode_cost, prefill_cost

    length = shape.step.max_target_length
    costs = {"prefill": prefill_cost(shape, length), "decode": decode_cost(shape, length)}
    return {
        name: {
            "tokens": cost.tokens,
            "flops": _plain(cost.flops),
            "weight_bytes": cost.weight_bytes,
            "cache_read_bytes": _plain(cost.cache_read_bytes),
            "cache_write_bytes": _plain(cost.cache_write_bytes),
        }
        for name, cost in costs.items()
    }


def _parameters(count: ParameterCount) -> dict[str, int]:
    return {
        "total": count.total,
        "active": count.active,
        "embedding": count.embedding,
        "active_non_embedding": count.active_non_embedding,
    }


def _row(row: FlopsRow) -> dict[str, Any]:
    return {
        **row._asdict(),
        "forward_flops": _plain(row.forward_flops),
        "training_flops": _plain(row.training_flops),
    }


def _notes(shape: ModelConfig) -> list[str]:
    """What the config leaves open and the reader should know."""
    notes = []
    if shape.vision.use_multimodal and not shape.step.images_per_sequence:
        notes.append("text only: a config does not say how many images; images_per_sequence=1 does")
    return notes


def _plain(value: Number) -> int | float:
    return value if isinstance(value, int) else float(value)


def _table(answer: dict[str, Any]) -> str:
    """The readable form: what it is, the breakdown by component, the conventions side by side."""
    count = answer["parameters"]
    lines = [
        f"{answer['model'] or answer['decoder_block']}: {count['total']:,} parameters"
        + (f", {count['active']:,} active" if count["active"] != count["total"] else "")
        + f", {count['embedding']:,} of them in tables",
        f"one optimizer step on one device: {answer['tokens_per_device']:,} tokens "
        f"(per_device_batch_size={answer['per_device_batch_size']}, "
        f"max_target_length={answer['max_target_length']}, "
        f"gradient_accumulation_steps={answer['gradient_accumulation_steps']})",
        "",
        f"{answer['total_tflops']:.6g} TFLOP, convention {answer['convention']}: "
        f"{answer['learnable_weight_tflops']:.6g} learnable weights, "
        f"{answer['attention_tflops']:.6g} attention",
        "",
        _columns(
            ["layer", "component", "repeats", "forward TFLOP", "training TFLOP", "share"],
            [_table_row(row, answer["total_tflops"]) for row in answer["breakdown"]],
        ),
        "",
        _conventions_table(answer),
        *_serving_lines(answer.get("serving", {})),
        *(f"note: {note}" for note in answer["notes"]),
    ]
    return "\n".join(lines)


def _serving_lines(serving: dict[str, Any]) -> list[str]:
    return [
        f"{name}: {cost['flops'] / TERA:.6g} TFLOP for {cost['tokens']:,} token(s) of a sequence; "
        f"reads {cost['weight_bytes'] / 1e9:.3f} GB of weights and "
        f"{cost['cache_read_bytes'] / 1e9:.3f} GB of cache, writes "
        f"{cost['cache_write_bytes'] / 1e9:.6f} GB (2 bytes a value)"
        for name, cost in serving.items()
    ]


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


def _conventions_table(answer: dict[str, Any]) -> str:
    """Every convention, relative to the chosen one, with the MFU that is being converted."""
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
    return _columns([*header, *(["MFU"] if with_mfu else []), "counts"], rows)


def _columns(header: list[str], rows: list[list[str]]) -> str:
    """Aligned columns: text to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    numeric = [all(row[i][:1].isdigit() for row in rows) for i in range(len(header))]
    lines = []
    for row in [header, *rows]:
        cells = (
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(row, widths, numeric, strict=True)
        )
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
