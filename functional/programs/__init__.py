"""Programs: graph and leaves, the contracts of rewrites and runtimes, tags and labels of nodes."""
