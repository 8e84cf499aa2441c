import inspect

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.parse import pci_aer, pci_link
from agent.parse.pci_aer import parse_aer
from agent.parse.pci_config import find_acs_control, is_all_ones
from agent.parse.pci_link import (
    ALL_ONES_WIDTH,
    PciIdentity,
    parse_device_path,
    parse_hex,
    parse_link_speed,
    parse_link_width,
    parse_pci_uevent,
)


def sample(function: object) -> str:
    """The sample in a docstring."""
    doc = inspect.getdoc(function) or ""
    return inspect.cleandoc(doc.split("::\n", 1)[1])


def test_samples_of_the_docstrings() -> None:
    assert parse_link_speed(sample(pci_link.parse_link_speed)) == 16.0
    assert parse_link_width(sample(pci_link.parse_link_width)) == 16
    assert parse_hex(sample(pci_link.parse_hex)) == 0x10DE
    assert parse_device_path(sample(pci_link.parse_device_path)) == (
        "0000:16:01.0", "0000:17:00.0",
    )  # fmt: skip
    assert parse_pci_uevent(sample(pci_link.parse_pci_uevent)) == PciIdentity(
        class_code=0x030200,
        vendor_id=0x10DE,
        device_id=0x2330,
        subsystem_vendor_id=0x10DE,
        subsystem_device_id=0x16C1,
        driver="nvidia",
    )
    assert parse_aer(sample(pci_aer.parse_aer)) == {
        "RxErr": 3, "BadTLP": 0, "BadDLLP": 1, "Rollover": 0, "Timeout": 0, "NonFatalErr": 0,
        "CorrIntErr": 0, "HeaderOF": 0, "TOTAL_ERR_COR": 4,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "speed"),
    [
        ("2.5 GT/s PCIe\n", 2.5),
        ("2.5 GT/s", 2.5),
        ("8 GT/s", 8.0),
        ("32.0 GT/s PCIe", 32.0),
        ("Unknown", None),
        ("Unknown speed", None),
    ],
)
def test_speeds_of_old_and_new_kernels(text: str, speed: float | None) -> None:
    assert parse_link_speed(text) == speed


@pytest.mark.parametrize("text", ["", "16", "0.0 GT/s PCIe", "-2.5 GT/s", "16.0 GT/s PCIe x16"])
def test_what_is_no_speed(text: str) -> None:
    with pytest.raises(ValueError, match="no link speed"):
        parse_link_speed(text)


@pytest.mark.parametrize(
    ("text", "width"), [("0", None), ("255", None), ("1", 1), ("12\n", 12), ("63", ALL_ONES_WIDTH)]
)
def test_widths(text: str, width: int | None) -> None:
    assert parse_link_width(text) == width


@pytest.mark.parametrize("text", ["", "x16", "3", "-1", "٤", "1600"])
def test_what_is_no_width(text: str) -> None:
    with pytest.raises(ValueError, match="no link width"):
        parse_link_width(text)


def test_a_device_behind_a_domain_of_its_own_begins_a_new_way() -> None:
    target = "../../../devices/pci0000:00/0000:00:0e.0/pci10000:e0/10000:e0:06.0/10000:e1:00.0"
    assert parse_device_path(target) == ("10000:e0:06.0", "10000:e1:00.0")


def test_a_function_without_driver_or_subsystem() -> None:
    assert parse_pci_uevent("PCI_CLASS=60400\nPCI_ID=1000:C030\n") == PciIdentity(
        class_code=0x060400, vendor_id=0x1000, device_id=0xC030
    )


def config(*capabilities: tuple[int, int, int, int], size: int = 4096) -> bytes:
    """A configuration space with extended capabilities: offset, id, next, ACS control."""
    space = bytearray(size)
    for at, id, following, control in capabilities:
        space[at : at + 4] = (id | 1 << 16 | following << 20).to_bytes(4, "little")
        space[at + 6 : at + 8] = control.to_bytes(2, "little")
    return bytes(space[:size])


def test_access_control_is_found_behind_other_capabilities() -> None:
    space = config((0x100, 0x3, 0xFB4, 0), (0xFB4, 0x1, 0xF24, 0), (0xF24, 0xD, 0, 0x1D))
    assert find_acs_control(space) == 0x1D
    with pytest.raises(EOFError):
        find_acs_control(space[:512])


@pytest.mark.parametrize(
    "space",
    [config(), config((0x100, 0x3, 0, 0)), bytes(256) + b"\xff" * 16],
)
def test_no_access_control(space: bytes) -> None:
    assert find_acs_control(space) is None


@pytest.mark.parametrize(
    "space",
    [config((0x100, 0x3, 0x100, 0)), config((0x100, 3, 0x40, 0)), config((0x100, 3, 0xFFC, 0))],
)
def test_a_list_of_capabilities_that_leads_nowhere(space: bytes) -> None:
    with pytest.raises(ValueError, match="extended capabilit"):
        find_acs_control(space)


def test_all_ones() -> None:
    assert is_all_ones(b"\xff" * 64)
    assert not is_all_ones(b"")
    assert not is_all_ones(b"\xde\x10\x30\x23")
    # a virtual function's ids read as ones by specification, its command register does not
    assert not is_all_ones(b"\xff\xff\xff\xff\x06\x04\x10\x00")


FUZZ = settings(max_examples=150, deadline=None)


@FUZZ
@given(st.text() | st.from_regex(r"[0-9.]{0,6} GT/s( PCIe)?"))
def test_fuzz_speed(text: str) -> None:
    try:
        speed = parse_link_speed(text)
    except ValueError:
        return
    assert speed is None or speed > 0


@FUZZ
@given(st.text() | st.integers().map(str))
def test_fuzz_width(text: str) -> None:
    try:
        width = parse_link_width(text)
    except ValueError:
        return
    assert width is None or 1 <= width <= ALL_ONES_WIDTH


@FUZZ
@given(st.text() | st.from_regex(r"([A-Za-z_ ]{1,8} [0-9]{1,4}\n){1,4}"))
def test_fuzz_aer(text: str) -> None:
    try:
        counts = parse_aer(text)
    except ValueError:
        return
    assert counts
    assert all(value >= 0 for value in counts.values())


@FUZZ
@given(st.text() | st.from_regex(r"PCI_CLASS=[0-9A-F]{0,8}\nPCI_ID=[0-9A-F:]{0,9}\n(DRIVER=.*)?"))
def test_fuzz_uevent(text: str) -> None:
    try:
        parse_pci_uevent(text)
    except ValueError:
        return


@FUZZ
@given(st.text() | st.from_regex(r"(/|pci0000:00|0000:0[0-9]:00\.0|\.\.){0,9}"))
def test_fuzz_device_path(text: str) -> None:
    assert isinstance(parse_device_path(text), tuple)


@FUZZ
@given(st.binary(max_size=64) | st.binary(min_size=256, max_size=300))
def test_fuzz_config(space: bytes) -> None:
    is_all_ones(space)
    try:
        find_acs_control(space)
    except (EOFError, ValueError):
        return
