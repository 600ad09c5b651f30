"""torchrun for one machine, without its last words.

When a rank fails, or on Ctrl-C, torchrun prints its log and a traceback of its own. The examples' ranks
have then already said what happened, once and in a sentence: this is torchrun that leaves it at that.

    python examples/_torchrun.py --nproc-per-node 2 examples/train_bytes.py --mesh tp=2
"""

from __future__ import annotations

import logging
import os
import signal
import sys

# Ctrl-C just ends the process until torchrun knows what to do about it.
signal.signal(signal.SIGINT, signal.SIG_DFL)
# One thread for each rank, or they fight over the cores; and torchrun warns unless it is set.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from torch.distributed import run  # noqa: E402
from torch.distributed.elastic.multiprocessing import SignalException  # noqa: E402
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: E402

# A rank that does not end when asked to is killed after these seconds.
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
            # Nobody was left to speak.
            dead = ", ".join(f"rank {r} by {signal.Signals(-c).name}" for r, c in codes.items())
            print(f"\nkilled: {dead}", file=sys.stderr)
        return max(1, *codes.values())
    return 0


if __name__ == "__main__":
    sys.exit(main())
