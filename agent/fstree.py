"""The text form of one machine: every file, link and refusal that was read, in one reviewable file.

::

    # a comment
    /sys/devices/pci0000:16/0000:16:01.0/current_link_width = 16
    /sys/bus/pci/devices/0000:17:00.0 -> ../../../devices/pci0000:16/0000:16:01.0/0000:17:00.0
    /sys/devices/pci0000:16/0000:16:01.0/config !EACCES
    /sys/class/infiniband/             (an empty directory)
    /proc/meminfo:
    |MemTotal:       528000000 kB
    |MemFree:        100000000 kB
    /sys/devices/pci0000:16/vpd =base64 gjIA
    @1
    /sys/devices/pci0000:16/0000:17:00.0/aer_dev_fatal = 3

``=`` gives a one-line file with its newline, ``:`` the lines that follow behind ``|``. ``@1``
begins what has changed by the second reading. A command is a file called ``/@run/`` and its
arguments, see ``agent.host``.
"""

from __future__ import annotations

import base64
import binascii
import errno

from agent.errors import LaggardError
from agent.tree import Entry, Link, Refusal, TextTree


def parse_fstree(text: str, name: str = "fixture") -> TextTree:
    """Read the text form. Raises LaggardError with the line number on anything else."""
    epochs: list[dict[str, Entry]] = [{}]
    block: str | None = None
    lines: list[str] = []

    def close() -> None:
        nonlocal block
        if block is not None:
            epochs[-1][block] = "".join(line + "\n" for line in lines).encode(
                "utf-8", "surrogateescape"
            )
            block = None
            lines.clear()

    for number, line in enumerate(text.split("\n"), 1):
        if block is not None and line.startswith("|"):
            lines.append(line[1:])
            continue
        close()
        if not line.strip() or line.startswith("#"):
            continue
        if line.startswith("@"):
            if line.strip() != f"@{len(epochs)}":
                raise LaggardError(
                    f"{name}:{number}: expected @{len(epochs)}, got {line.strip()!r}"
                )
            epochs.append({})
            continue
        path, entry = _parse_line(line, f"{name}:{number}")
        if entry is None:
            block = path
        else:
            epochs[-1][path] = entry
    close()
    return TextTree(epochs)


def _parse_line(line: str, where: str) -> tuple[str, Entry | None]:
    if not line.startswith("/"):
        raise LaggardError(f"{where}: a line begins with an absolute path, '|', '@' or '#'")
    path, separator, rest = line, "", ""
    for candidate in (" -> ", " =base64 ", " = ", " !"):
        head, found, tail = line.partition(candidate)
        if found and (not separator or len(head) < len(path)):
            path, separator, rest = head, candidate, tail
    if separator == " -> ":
        return path, Link(rest)
    if separator == " = ":
        return path, (rest + "\n").encode("utf-8", "surrogateescape")
    if separator == " =base64 ":
        try:
            return path, base64.b64decode(rest, validate=True)
        except (binascii.Error, ValueError) as error:
            raise LaggardError(f"{where}: bad base64: {error}") from None
    if separator == " !":
        code = getattr(errno, rest.strip(), None)
        if not isinstance(code, int):
            raise LaggardError(f"{where}: {rest.strip()!r} is no errno name")
        return path, Refusal(code)
    if line.endswith(":"):
        return line[:-1], None
    if line.endswith(" ="):
        return line[:-2], b"\n"
    if line.endswith("/"):
        return line, b""  # "/dir/" makes the directory known and holds nothing
    raise LaggardError(f"{where}: expected one of ' = ', ' -> ', ' !', a final ':' or '/'")


def format_fstree(tree: TextTree) -> str:
    """The text form; ``parse_fstree`` gives the same tree back."""
    out: list[str] = []
    for index, entries in enumerate(tree.epochs):
        if index:
            out.append(f"@{index}")
        for path in sorted(entries):
            out.extend(_format_entry(path, entries[path]))
    return "\n".join(out) + "\n"


def _format_entry(path: str, entry: Entry) -> list[str]:
    if isinstance(entry, Link):
        return [f"{path} -> {entry.target}"]
    if isinstance(entry, Refusal):
        return [f"{path} !{errno.errorcode.get(entry.errno, 'EIO')}"]
    if path.endswith("/"):
        return [path]
    try:
        text = entry.decode("utf-8")
    except UnicodeDecodeError:
        text = ""
    clean = bool(text) and text.endswith("\n") and text.isprintable() is False
    if clean and all(line.isprintable() or "\t" in line for line in text[:-1].split("\n")):
        body = text[:-1].split("\n")
        if any("\r" in line or "\x00" in line or "\x1b" in line for line in body):
            return [f"{path} =base64 {base64.b64encode(entry).decode()}"]
        if len(body) == 1:
            return [f"{path} = {body[0]}" if body[0] else f"{path} ="]
        return [f"{path}:", *(f"|{line}" for line in body)]
    return [f"{path} =base64 {base64.b64encode(entry).decode()}"]
