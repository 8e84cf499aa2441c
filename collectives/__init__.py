"""The ring all-reduce self-test: plan, proof, cost model and timed sweeps."""
