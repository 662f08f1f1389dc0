"""Starts the journal before JAX is imported, to record processes killed during start-up."""

from __future__ import annotations

from mfu_jax.logger.journal.absent import NoJournal
from mfu_jax.logger.journal.writer import Journal
from mfu_jax.trainer.config.pyconfig import Config


def start_journal(config: Config) -> Journal | NoJournal | None:
    """The journal of this process, until its exit.

    Returns:
        None if its number in the job is not known yet, because JAX has to find the cluster.
    """
    if config.metrics_path is None:
        return NoJournal()
    if config.distributed and not config.coordinator_address:
        return None
    return Journal(
        config.metrics_path,
        index=config.process_id,
        processes=config.num_processes,
        until_exit=True,
    )
