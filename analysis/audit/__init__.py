"""Is any quantisation kernel biased, which rounding does it use, which edges break?

from analysis.audit import assert_rounds_to_nearest, audit
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from analysis.audit.api import assert_rounds_to_nearest, audit
    from analysis.audit.findings import AuditReport, Finding
    from analysis.audit.runner import CannotAudit

__all__ = ["AuditReport", "CannotAudit", "Finding", "assert_rounds_to_nearest", "audit"]
_HOME = {"AuditReport": "findings", "Finding": "findings", "CannotAudit": "runner"}


def __getattr__(name: str) -> Any:
    """Import on first use, so that a child process can be started before torch is imported here."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOME.get(name, 'api')}"), name)
