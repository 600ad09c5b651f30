"""Which collectives a plan needs, when each is issued, and which are merged."""
