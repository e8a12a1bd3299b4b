"""CSV as people send it: bytes -> header and cells, whatever a spreadsheet made of them. No meaning of columns here.

Read where unambiguous: a byte order mark, UTF-16, CRLF, separators , ; tab |, a first line `sep=;`, blank rows and
columns at the edges. What was found is kept in `notes`. Everything else is a ValueError that names file and line.
`numbers` turns cells into numbers.

    cells = read_cells("theirs.csv")
    cells.header, cells.rows[0], cells.lines[0]
"""

from __future__ import annotations

import codecs
import csv
import io
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

SEPARATORS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "bar"}
_UTF16 = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}


@dataclass(frozen=True)
class Problem:
    """One complaint: where, what was found there and what should stand there."""

    file: str
    place: str  # 'line 4', 'row 17' or ''
    column: str  # '' where it is about the whole file
    found: str
    expected: str

    def __str__(self) -> str:
        where = ", ".join(part for part in (self.place, f"column {self.column!r}" if self.column else "") if part)
        return f"{self.file}: {where + ': ' if where else ''}found {self.found}, expected {self.expected}"


@dataclass
class Cells:
    """A table of text. `rows` are as wide as `header`; `lines` are the rows' first lines in the file, from 1."""

    file: str
    separator: str
    header: list[str]
    rows: list[list[str]]
    lines: list[int]
    notes: list[str] = field(default_factory=list)

    def column(self, name: str) -> list[str]:
        """The cells of one column, stripped."""
        at = self.header.index(name)
        return [row[at].strip() for row in self.rows]


def read_cells(path: str | Path, known: Collection[str] = (), separator: str | None = None) -> Cells:
    """The cells of a CSV.

    Args:
        known: column names, any case, that speak for a separator where several could be meant.
        separator: the separator, where the caller knows it.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is empty, not text, or its rows do not fit its header; the message names the line.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist or is not a file; name a CSV")
    notes: list[str] = []
    text = _decode(path, path.read_bytes(), notes)
    first, _, rest = text.partition("\n")
    skipped = 0
    if first.strip().lower().startswith("sep=") and separator is None:
        separator, text, skipped = first.strip()[4:5] or None, rest, 1
        notes.append("a first line that states the separator")
    header, rows, lines, separator = _split(path, text, known, separator)
    if separator != ",":
        notes.append(f"{SEPARATORS.get(separator, repr(separator))} as separator")
    return _trim(Cells(str(path), separator, header, rows, [line + skipped for line in lines], notes))


def _decode(path: Path, data: bytes, notes: list[str]) -> str:
    """Text of a file in UTF-8 or UTF-16."""
    if not data.strip():
        raise ValueError(f"{path} is empty; expected a CSV with a header line")
    for magic, kind in ((b"PK\x03\x04", "a spreadsheet or archive"), (b"PAR1", "a Parquet file")):
        if data.startswith(magic):
            raise ValueError(f"{path} is {kind}, expected CSV; export it as 'CSV UTF-8'")
    encoding = "utf-8"
    for mark, name in _UTF16.items():
        if data.startswith(mark):
            encoding, data = name, data[len(mark) :]
            notes.append("UTF-16 text")
    if data.startswith(codecs.BOM_UTF8):
        data = data[len(codecs.BOM_UTF8) :]
        notes.append("a byte order mark")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ValueError(
            f"{path}: line {line}: byte 0x{data[error.start]:02x} is not {encoding.upper()}; save it as 'CSV UTF-8'"
        ) from None
    if "\x00" in text:
        raise ValueError(f"{path} holds NUL bytes and is not text; save it as 'CSV UTF-8'")
    if "\r" in text:
        notes.append("CRLF line ends")
    return text.replace("\r\n", "\n").replace("\r", "\n")


_Split = tuple[list[str], list[list[str]], list[int], str]


def _split(path: Path, text: str, known: Collection[str], separator: str | None) -> _Split:
    """Header, rows, lines and separator: the one separator under which every row fits the header."""
    fitting: list[_Split] = []
    complaints: list[tuple[int, str]] = []
    for candidate in (separator,) if separator else SEPARATORS:
        try:
            header, rows, lines = _parse(path, text, candidate)
        except ValueError as error:
            complaints.append((text.split("\n", 1)[0].count(candidate), str(error)))
            continue
        fitting.append((header, rows, lines, candidate))
    if not fitting:
        raise ValueError(max(complaints)[1])
    wanted = {name.lower() for name in known}
    scores = [sum(name.strip().lower() in wanted for name in header) for header, *_ in fitting]
    best = [one for one, score in zip(fitting, scores, strict=True) if score == max(scores)]
    if len(best) > 1:
        names = " or ".join(SEPARATORS[one[3]] for one in best)
        raise ValueError(f"{path}: the separator may be {names}: every row fits either; save it with commas")
    return best[0]


def _parse(path: Path, text: str, separator: str) -> tuple[list[str], list[list[str]], list[int]]:
    """Cells under one separator. ValueError where a row does not fit the header, or there is one column only."""
    name = SEPARATORS.get(separator, repr(separator))
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    header: list[str] = []
    rows: list[list[str]] = []
    lines: list[int] = []
    start = 1
    try:
        for row in reader:
            line, start = start, reader.line_num + 1
            if not any(cell.strip() for cell in row):
                continue
            if not header:
                header = row
                continue
            if len(row) != len(header):
                hint = "; a decimal comma cannot be told from a separator" if separator == "," else ""
                widths = f"{len(row)} cell(s), the header has {len(header)}"
                raise ValueError(f"{path}: line {line} has {widths} (separator: {name}){hint}")
            rows.append(row)
            lines.append(line)
    except csv.Error as error:
        raise ValueError(f"{path}: line {reader.line_num}: {error} (separator: {name})") from None
    if len(header) < 2:
        raise ValueError(f"{path}: the header {text.split(chr(10), 1)[0]!r} has one column only, expected several")
    if not rows:
        raise ValueError(f"{path} has a header and no rows")
    return header, rows, lines


def _trim(cells: Cells) -> Cells:
    """Blank columns dropped, names stripped; ValueError for two columns of one name or one without a name."""
    names = [name.strip() for name in cells.header]
    blank = {at for at, name in enumerate(names) if not name and not any(row[at].strip() for row in cells.rows)}
    if blank:
        cells.notes.append(f"{len(blank)} blank column(s)")
        cells.rows = [[cell for at, cell in enumerate(row) if at not in blank] for row in cells.rows]
        names = [name for at, name in enumerate(names) if at not in blank]
    if "" in names:
        raise ValueError(f"{cells.file}: column {names.index('') + 1} has cells and no name; give it one or delete it")
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{cells.file}: two columns are named {name!r}; rename or delete one")
    cells.header = names
    return cells
