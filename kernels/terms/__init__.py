"""Values as formulas over strided buffers, in normal form.

For matching only, every value of a program is read as a **term** in normal form, interned, so that
equal terms are equal functions: sums and products are multisets with coefficients and exponents,
scalar factors are pulled out, composite operations are taken apart, and a view is an **access**,
offset and strides over the buffer of the term it views. An operation on strided operands runs over
a **loop nest**: loops that every operand traverses contiguously are coalesced, loops that none
traverses belong to who reads the result, the rest are ordered by strides. That is what makes
``gelu(linear(x, w, b))`` in three dims and ``gelu(b + x @ w)`` in two the same term. Sums with
several readers stay whole in sums that read them, or a residual stream would be one sum. The
program keeps its own operations.
"""
