"""torchrun for one machine, without its own report of failures.

When a rank fails, or on Ctrl-C, torchrun prints a log and a traceback. The examples' ranks have then
already printed what happened, so this variant of torchrun prints nothing.

    python examples/_torchrun.py --nproc-per-node 2 examples/train_bytes.py --mesh tp=2
"""

from __future__ import annotations

import logging
import os
import signal
import sys

# Until torchrun installs its handler, Ctrl-C ends the process.
signal.signal(signal.SIGINT, signal.SIG_DFL)
# One thread for each rank, so that ranks do not compete for cores; torchrun warns unless it is set.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from torch.distributed import run  # noqa: E402
from torch.distributed.elastic.multiprocessing import SignalException  # noqa: E402
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: E402

# Seconds after which a rank that ignores SIGTERM is killed.
PATIENCE = 8


def main() -> int:
    logging.disable(logging.CRITICAL)
    flags = ["--standalone", "--max-restarts", "0"]
    if "--shutdown-timeout" in run.get_args_parser().format_help():  # from torch 2.12 on
        flags += ["--shutdown-timeout", str(PATIENCE)]
    try:
        run.main([*flags, *sys.argv[1:]])
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    except ChildFailedError as failed:
        codes = {rank: failure.exitcode for rank, failure in failed.failures.items()}
        if all(code < 0 for code in codes.values()):
            # All ranks were killed by signals, so none has printed a message.
            dead = ", ".join(f"rank {r} by {signal.Signals(-c).name}" for r, c in codes.items())
            print(f"\nkilled: {dead}", file=sys.stderr)
        return max(1, *codes.values())
    return 0


if __name__ == "__main__":
    sys.exit(main())
