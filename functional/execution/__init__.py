"""From a program to code that runs, and what is said when it fails or is profiled."""
