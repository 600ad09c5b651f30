"""Where data lives on a mesh, and what crosses the network."""
