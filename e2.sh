#!/bin/bash
. /tmp/planx/env; n=$1
export PYTHONPATH=/tmp/tpuonly TPU_SKIP_MDS_QUERY=1 TPU_ACCELERATOR_TYPE=v5litepod-4 TPU_WORKER_HOSTNAMES=localhost ALLOW_MULTIPLE_LIBTPU_LOAD=1
export LIBTPU_INIT_ARGS="$(sed 's/--2a886c8[^ ]*//' /tmp/planx/$n.flags)" XLA_FLAGS="--xla_dump_to=/tmp/planx/hlo_$n --xla_dump_hlo_as_text --xla_dump_large_constants=true"
date +%T > /tmp/planx/$n.start
timeout ${2:-600} python -m mfu_jax.trainer.ahead_of_time /tmp/planx/$n.json /tmp/planx/$n.mfu > /tmp/planx/$n.log 2>&1
