"""JSON Schemas of what laggard writes, derived from the records."""

from __future__ import annotations

from typing import Any

import msgspec

from probes.result import REPORT_SCHEMA, Report
from probes.snapshot.node import SNAPSHOT_SCHEMA, NodeSnapshot

SCHEMAS: dict[str, tuple[str, type[msgspec.Struct]]] = {
    "report": (REPORT_SCHEMA, Report),
    "snapshot": (SNAPSHOT_SCHEMA, NodeSnapshot),
}


def schema_of(name: str) -> dict[str, Any]:
    """JSON Schema 2020-12 of one record; unknown properties are allowed (a newer minor version)."""
    identifier, record = SCHEMAS[name]
    schema = msgspec.json.schema(record)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": identifier, **schema}
