"""The functional core: typed records and pure rules. No I/O, no clock, nothing of ours imported."""
