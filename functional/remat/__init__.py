"""What a backward keeps of its forward, recomputes or offloads."""
