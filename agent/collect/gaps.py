"""Turns the errors of a collector into gaps."""

from __future__ import annotations

import errno

from probes.gap import Gap, GapReason, fold_gaps

_REASONS = {
    errno.ENOENT: GapReason.ABSENT,
    errno.ENOTDIR: GapReason.ABSENT,
    errno.ENODEV: GapReason.ABSENT,
    errno.ENXIO: GapReason.ABSENT,
    errno.ESRCH: GapReason.ABSENT,
    errno.EACCES: GapReason.DENIED,
    errno.EPERM: GapReason.DENIED,
    errno.ETIMEDOUT: GapReason.TIMEOUT,
    errno.EOPNOTSUPP: GapReason.UNSUPPORTED,
    errno.ENOSYS: GapReason.UNSUPPORTED,
}


class Gaps:
    """Collects what one section could not read."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._gaps: list[Gap] = []

    def add(
        self,
        reason: GapReason,
        *fields: str,
        device: str | None = None,
        detail: str | None = None,
        allow: str | None = None,
    ) -> None:
        """Note a missing reading; no fields means the whole section or device."""
        self._gaps.append(
            Gap(
                source=self.source,
                reason=reason,
                fields=fields,
                devices=(device,) if device else (),
                detail=detail,
                allow=allow,
            )
        )

    def add_error(
        self,
        error: OSError | ValueError | TimeoutError,
        *fields: str,
        device: str | None = None,
        path: str | None = None,
        allow: str | None = None,
    ) -> None:
        """Note a reading that failed: the reason follows from errno; ValueError is malformed."""
        if isinstance(error, TimeoutError):
            reason = GapReason.TIMEOUT
        elif isinstance(error, OSError):
            reason = _REASONS.get(error.errno or 0, GapReason.MALFORMED)
        else:
            reason = GapReason.MALFORMED
        said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        detail = f"{path}: {said}" if path else said
        self.add(reason, *fields, device=device, detail=detail, allow=allow)

    def folded(self) -> tuple[Gap, ...]:
        """All gaps, folded."""
        return fold_gaps(tuple(self._gaps))
