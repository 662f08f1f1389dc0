"""What is trained, and what one optimizer step contains."""

from __future__ import annotations

from dataclasses import field

from mfu_jax.errors import UserError
from mfu_jax.flops.analytic.model_configs.group import POSITIVE, FieldGroup, field_group
from mfu_jax.flops.exact import Number


@field_group
class TrainingConfig(FieldGroup):
    """Which weights train: frozen parts, LoRA, DPO with its reference model."""

    use_dpo: bool = False
    frozen: tuple[str, ...] = ()
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()
    freeze_vision_encoder_params: bool = True
    freeze_audio_encoder_params: bool = True


@field_group
class StepConfig(FieldGroup):
    """Sequences per device and optimizer step, and what a sequence contains.

    Attributes:
        encoder_length: tokens of the source sequence; 0: as many as in the target.
        logits_positions: positions with logits; 0: all.
        packed_document_lengths: a sequence's documents; or `packed_document_length`, for each.
        make_vocab_size_divisible_by: Megatron's padding, used only in its conventions.
    """

    per_device_batch_size: Number = field(default=1, metadata=POSITIVE)
    max_target_length: int = field(default=2048, metadata=POSITIVE)
    gradient_accumulation_steps: int = field(default=1, metadata=POSITIVE)
    encoder_length: int = 0
    logits_positions: int = 0
    packed_document_lengths: tuple[int, ...] = ()
    packed_document_length: int = 0
    images_per_sequence: int = 0
    tiles_per_image: int = 0
    audio_frames_per_sequence: int = 0
    make_vocab_size_divisible_by: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if sum(self.packed_document_lengths) > self.max_target_length:
            raise UserError(
                f"packed_document_lengths sum to {sum(self.packed_document_lengths)}; expected at "
                f"most max_target_length={self.max_target_length}"
            )
