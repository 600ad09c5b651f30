"""Ranks of a job as processes forked from this one, which has loaded torch already."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import torch

__all__ = ["forked_ranks"]


def forked_ranks(world: int) -> ProcessPoolExecutor:
    """A process for each rank, with one thread for operations.

    A forked process has none of its parent's threads, and the first to set their number makes torch's
    pool anew. In torch 2.11 two threads that do so at once abort the process, as autograd's threads do
    when they begin; so the number is set before there are any.
    """
    fork = multiprocessing.get_context("fork")
    return ProcessPoolExecutor(world, fork, initializer=torch.set_num_threads, initargs=(1,))
