"""The minimum of a plan's cost over what each operation and each value may do along the mesh's axes."""
