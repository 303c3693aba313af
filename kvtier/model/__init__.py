"""What a block is, what it is called and how big it is. Pure: no I/O, no engine, no torch."""
