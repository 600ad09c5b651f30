"""Ranks of a job as processes forked from this one, which has loaded torch already."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["forked_ranks", "of_each_rank", "print_found"]

# What one rank finds, of its number and the number of ranks.
Check = Callable[[int, int], Any]


def forked_ranks(world: int) -> ProcessPoolExecutor:
    """A process for each rank, with one thread for operations.

    A forked process has none of its parent's threads, and the first to set their number makes torch's
    pool anew. In torch 2.11 two threads that do so at once abort the process, as autograd's threads do
    when they begin; so the number is set before there are any.
    """
    fork = multiprocessing.get_context("fork")
    return ProcessPoolExecutor(world, fork, initializer=torch.set_num_threads, initargs=(1,))


def of_each_rank(found_by: Callable[[int], Any], world: int) -> list[Any]:
    """What each rank finds, of its number; an error of one ends all, as others may wait for it."""
    with forked_ranks(world) as ranks:
        return list(ranks.map(functools.partial(_or_end, found_by), range(world)))


def _or_end(found_by: Callable[[int], Any], rank: int) -> Any:
    try:
        return found_by(rank)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def print_found(found_by: Check) -> None:
    """What ``python script.py WORLD STORE`` does: print as JSON what each rank of a gloo group finds."""
    world, store = int(sys.argv[1]), sys.argv[2]
    # Forked: to load torch again takes each rank as long as a third of the checks.
    run = functools.partial(_in_a_group, found_by, world=world, store=store)
    print(json.dumps(of_each_rank(run, world)), flush=True)


def _in_a_group(found_by: Check, rank: int, world: int, store: str) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    found = found_by(rank, world)
    dist.destroy_process_group()
    return found
