"""Health as an exit code, in the language of whoever called."""

from __future__ import annotations

from probes.result import Health

# nagios is the default. node-problem-detector reads 0 as fine, 1 as a problem, anything else as
# unknown; Slurm's HealthCheckProgram must not fail for a node that is only worth looking at.
EXIT_CODES: dict[str, dict[Health, int]] = {
    "nagios": {Health.OK: 0, Health.WARNING: 1, Health.CRITICAL: 2, Health.UNKNOWN: 3},
    "npd": {Health.OK: 0, Health.WARNING: 0, Health.CRITICAL: 1, Health.UNKNOWN: 2},
    "zero": {Health.OK: 0, Health.WARNING: 0, Health.CRITICAL: 0, Health.UNKNOWN: 0},
}


def exit_code(health: Health, style: str = "nagios") -> int:
    """The exit code of a health in one of EXIT_CODES."""
    return EXIT_CODES[style][health]
