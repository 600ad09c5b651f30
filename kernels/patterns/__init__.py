"""What to look for in a program, and the proof that it is there."""
