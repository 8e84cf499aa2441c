"""The imperative shell: host access, collectors, evaluation, reports, the command line."""

__version__ = "0.1.0"
