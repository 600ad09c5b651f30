"""What a function reads without being given it, and whether that has changed since it was traced."""
