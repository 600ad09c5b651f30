"""The collectives that a user calls inside `shard_map`, and along which axes values vary."""
