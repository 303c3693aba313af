"""Which bytes to keep, move, load or recompute. Pure: no I/O, no engine; the simulator drives the same objects."""
