"""One spelling for PCI addresses."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from probes.pci_address import normalize_pci_address


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0000:3b:00.0", "0000:3b:00.0"),
        ("00000000:3B:00.0", "0000:3b:00.0"),
        ("PCI:0000:3b:00", "0000:3b:00.0"),
        ("PCI:0018:01:00", "0018:01:00.0"),
        ("3b:00.0", "0000:3b:00.0"),
        ("3b:00", "0000:3b:00.0"),
        ("0000:3b:00.7\n", "0000:3b:00.7"),
        ("10000:e1:00.0", "10000:e1:00.0"),
        ("0x3b", None), ("3b:20.0", None), ("3b:00.8", None), ("", None), ("GPU-1", None),
        ("0000:3b:00.0.0", None), ("٣b:00.0", None),
    ],
)  # fmt: skip
def test_spellings(text: str, expected: str | None) -> None:
    assert normalize_pci_address(text) == expected


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_any_text_is_an_address_or_none(text: str) -> None:
    found = normalize_pci_address(text)
    assert found is None or normalize_pci_address(found) == found
