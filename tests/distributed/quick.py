"""The checks of ``make test``, in one job: every collective, and of training and compiling one of each kind."""

from __future__ import annotations

from tests.distributed.collectives import *  # noqa: F403
from tests.distributed.compiled import check_one_program, check_scalars_and_writes  # noqa: F401
from tests.distributed.training import check_ddp, check_fsdp, check_sync_batch_norm, check_tensor_parallel  # noqa: F401

# It runs a group into its time-out, so it comes last.
check_last = globals().pop("check_time_out")
