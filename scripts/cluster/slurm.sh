#!/bin/bash
#SBATCH --nodes=4 --ntasks-per-node=8 --gpus-per-node=8
# One process per GPU, as JAX expects it. Exit code 75: a process died, and the same command resumes
# from the last checkpoint.
code=75
while [ $code -eq 75 ]; do
  srun mfu-jax train my.yml distributed=true fsdp=-1 run_name="$SLURM_JOB_NAME" \
    enable_checkpointing=true base_output_directory=/shared/runs
  code=$?
done
exit $code
