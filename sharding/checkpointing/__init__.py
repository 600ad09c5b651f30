"""Saving and loading placed values by torch.distributed.checkpoint."""
