"""MaxText's own trainer, unchanged. Run: python examples/maxtext_train.py [METRICS_FILE]"""

import sys
import tempfile
from pathlib import Path

import maxtext as package
from maxtext.trainers.pre_train import train

from mfu_jax.integrations import maxtext

SIZES = """base_emb_dim=64 base_num_query_heads=2 base_num_kv_heads=2 base_mlp_dim=128 head_dim=32
    base_num_decoder_layers=2 vocab_size=128 max_target_length=64 per_device_batch_size=1"""
CPU = """hardware=cpu dataset_type=synthetic enable_checkpointing=false attention=dot_product
    skip_jax_distributed_system=true run_name=example steps=6"""
metrics_file = sys.argv[1] if len(sys.argv) > 1 else "runs/maxtext_train.jsonl"
base = Path(package.__file__).parent / "configs" / "base.yml"

with maxtext.instrumented(metrics_file=metrics_file):
    output = f"base_output_directory={tempfile.mkdtemp()}"
    train.main(["", str(base), *SIZES.split(), *CPU.split(), output])
