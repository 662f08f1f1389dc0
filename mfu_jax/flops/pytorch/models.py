"""Builds the model class that transformers has for a ``config.json``, on the meta device."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from mfu_jax.errors import UserError
from mfu_jax.util.values import shown

_OLDEST = 5  # of transformers: attention, masks and experts have interfaces
# Fields about how a model runs or is loaded, not what it is.
_NOT_THE_MODEL = ("quantization_config", "attn_implementation", "_attn_implementation", "use_cache")


def imported() -> tuple[Any, Any]:
    """The modules torch and transformers; nothing is downloaded.

    Raises:
        UserError: one of them is not installed or too old.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        import torch
        import transformers
    except ImportError as error:
        raise _not_installed(str(error)) from None
    if int(transformers.__version__.split(".")[0]) < _OLDEST:
        raise _not_installed(f"transformers {transformers.__version__} is installed")
    return torch, transformers


def _not_installed(why: str) -> UserError:
    return UserError(
        f"--trace builds the PyTorch model, which needs torch and transformers {_OLDEST} or newer "
        f"({why})",
        hint="run pip install 'mfu-jax[trace-hf]'",
    )


def build(config: Mapping[str, Any], attention: str) -> Any:
    """The model of `config`, using the attention function of that name.

    Raises:
        UserError: transformers has no such type, the config names remote code, or it does not
            describe a model that can be built.
    """
    torch, transformers = imported()
    settings = _configuration(config, transformers)
    settings.use_cache = False
    with torch.device("meta"):
        try:
            chosen = _model_class(settings, transformers)
            # A wrapper's class for text alone takes the text model's configuration.
            if chosen.config_class == (settings.sub_configs or {}).get("text_config"):
                settings = settings.get_text_config()
            return _built(chosen, settings, attention).eval()
        except Exception as error:
            raise _unusable(settings.model_type, "be built", error) from error


def _configuration(config: Mapping[str, Any], transformers: Any) -> Any:
    """The configuration object, of transformers' own class."""
    if "auto_map" in config:
        raise UserError(
            f"auto_map={shown(config['auto_map'])}: the model is code of its own repository, "
            "which is never run here",
            hint="remove auto_map to count what transformers itself ships as "
            f"{config.get('model_type')!r}",
        )
    kind = str(config.get("model_type"))
    known = transformers.CONFIG_MAPPING
    if kind not in known:
        raise UserError(
            f"transformers {transformers.__version__} has no model_type {kind[:60]!r}; a newer "
            "one may have it",
            hint="count_model_flops(fn, *args) counts any JAX function",
        )
    fields = {k: v for k, v in config.items() if k not in ("model_type", *_NOT_THE_MODEL)}
    try:
        return known[kind].from_dict(fields)
    except Exception as error:
        raise _unusable(kind, "be read from this config", error) from error


def _model_class(settings: Any, transformers: Any) -> Any:
    """The class named in ``architectures``, else the one with a head that predicts tokens."""
    for name in settings.architectures or ():
        named = getattr(transformers, name, None)
        if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
            return named
    for auto in ("CausalLM", "ImageTextToText", "Seq2SeqLM", "MaskedLM"):
        table = getattr(transformers, f"MODEL_FOR_{_TABLES[auto]}_MAPPING")
        if type(settings) in table:
            found = table[type(settings)]
            return found[0] if isinstance(found, tuple) else found
    raise UserError(
        f"transformers has no model with a language-model head for {settings.model_type!r}",
        hint="name its class in architectures",
    )


_TABLES = {
    "CausalLM": "CAUSAL_LM",
    "ImageTextToText": "IMAGE_TEXT_TO_TEXT",
    "Seq2SeqLM": "SEQ_TO_SEQ_CAUSAL_LM",
    "MaskedLM": "MASKED_LM",
}


def _built(model_class: Any, settings: Any, attention: str) -> Any:
    """The model; runs only the experts that a token uses, if its code leaves the choice."""
    try:
        return model_class._from_config(
            settings, attn_implementation=attention, experts_implementation="batched_mm"
        )
    except (TypeError, ValueError, KeyError):
        pass
    try:
        return model_class._from_config(settings, attn_implementation=attention)
    except (ValueError, KeyError):  # it has its own attention
        return model_class._from_config(settings, attn_implementation="eager")


def _unusable(kind: str, what: str, error: Exception) -> UserError:
    line = (str(error).strip().splitlines() or [""])[0][:160]
    return UserError(
        f"the PyTorch model of {kind!r} cannot {what}: {type(error).__name__}: {line}",
        hint="count_model_flops(fn, *args) counts any JAX function",
    )


def cannot_run(kind: str, error: Exception) -> UserError:
    """The error for a forward pass that depends on values, which meta tensors lack."""
    return _unusable(kind, "run without values", error)
