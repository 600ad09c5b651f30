"""Values as formulas over strided buffers, in normal form.

For matching only, every value of a program is read as a **term** in normal form. Terms are interned,
so that equal terms are equal functions: sums and products are multisets with coefficients and
exponents, scalar factors are pulled out, composite operations are decomposed, and a view is an
**access**: an offset and strides over the buffer of the viewed term. An operation on strided operands
runs over a **loop nest**: loops that every operand traverses contiguously are coalesced, loops that no
operand traverses are left to the readers of the result, the other loops are ordered by strides. So
``gelu(linear(x, w, b))`` in three dims and ``gelu(b + x @ w)`` in two are the same term. A sum with
several readers is one operand in the sums that read it; otherwise a residual stream would be one sum.
The operations of the program do not change.
"""
