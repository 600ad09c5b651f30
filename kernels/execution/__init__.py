"""Which implementation of a kernel runs, and how.

On a CPU the implementation is chosen by time, at the first call (`autotune.py`): its operations,
Inductor, or either in blocks of rows that stay in a cache. They round differently, and what all
ranks hold must not drift apart, so the first rank to choose chooses for all, through the store
(`rank_consensus.py`). Much of the time of a chain of cheap operations is the first touch of the
pages of its result, so large results are written to memory that was used before, once neither torch
nor Python counts a reference to it (`buffers.py`; at most an eighth of the machine's memory, and
``kernels.release()`` gives it back).

The library names its Triton functions (`optional_backends.py`); the module, and with it Triton, is
imported when one is to run on a CUDA device. Where it is not installed, or a kernel fails to
compile, the reference is compiled, and ``.kernels`` says so. The Triton kernels read each operand
once, compute in float32 and round once; sums for weights and biases are made per program and then
added up, without atomics.
"""
