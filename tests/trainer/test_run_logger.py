"""The trainer's config as settings of the logger."""

from __future__ import annotations

from mfu_jax.settings import Settings
from mfu_jax.trainer.pyconfig import load
from mfu_jax.trainer.run_logger import settings_of


def test_keys_of_the_config_that_are_settings_keep_their_values() -> None:
    config = load(
        [
            "run_name=r",
            "base_output_directory=out",
            "metrics_file=auto",
            "tensorboard_dir=",
            "log_period=7",
            "warmup_steps=3",
            "convention=exact",
            "hardware=h100",
            "peak_tflops_per_device=2.5",
            "abort_on_nan_loss=false",
        ]
    )
    assert settings_of(config, start_step=5) == Settings(
        metrics_file="out/r/metrics.jsonl",
        log_period=7,
        warmup_steps=3,
        convention="exact",
        hardware="h100",
        peak_tflops_per_device=2.5,
        abort_on_nan_loss=False,
        flops_source="analytic",
        start_step=5,
    )
