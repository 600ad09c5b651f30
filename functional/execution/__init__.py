"""From a program to code that runs; its errors and its profiler ranges."""
