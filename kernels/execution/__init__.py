"""Execution of kernels: the choice of an implementation, and memory for results.

On a CPU the implementation is chosen by timing, at the first call (`autotune.py`): the operations
one by one, Inductor, or either in blocks of rows that fit a cache. Implementations round differently,
and replicated values must not diverge, so the first rank to choose decides for all, through the store
(`rank_consensus.py`). Much of the time of a chain of cheap operations is spent on page faults of its
result, so large results are written to memory that was used before, once neither torch nor Python
holds a reference to it (`buffers.py`; at most an eighth of the machine's memory, which
``kernels.release()`` frees).

The library refers to its Triton functions by name (`optional_backends.py`); the module, and with it
Triton, is imported when one is to run on a CUDA device. Where Triton is not installed, or a kernel
fails to compile, the reference is compiled, and ``.kernels`` says so; and so it is for gated activations,
rms_norm and rope, of which Triton kernels were no faster on an H100. The Triton kernels read each
operand once, compute in float32 and round once; sums for weights and biases are computed per program
instance and then added up, without atomics.
"""
