"""The snapshot records: what was read, typed, with units in the names."""
