"""The benchmark, its ranks forked: each would load torch again. Options as ``bench.py``'s."""

import functools
import sys

from paths import BENCHMARKS
from torch.multiprocessing.spawn import start_processes

sys.path.append(str(BENCHMARKS))

import bench

bench.spawn = functools.partial(start_processes, start_method="fork")

if __name__ == "__main__":
    bench.main()
