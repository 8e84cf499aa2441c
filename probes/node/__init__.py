"""The rules for one node; every Probe value in these modules is found by `registry.discover`."""
