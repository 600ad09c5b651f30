"""An `nn.Module` in a call: what the call changes (state.py), rows of stacked layers (rows.py)."""
