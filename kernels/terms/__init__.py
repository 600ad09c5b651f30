"""Values as formulas over strided buffers, in normal form."""
