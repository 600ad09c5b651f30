"""What generated code calls for loops: collectors of values, and iterations in native code."""
